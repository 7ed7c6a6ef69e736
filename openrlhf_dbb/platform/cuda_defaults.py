"""Flag values that make training fast on CUDA, chosen for the machine; the command line and presets can change each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.platform import attention
from openrlhf_dbb.platform.machine import Gpu

FAST = "fast on CUDA"
"""Where these values come from, as the configuration prints it."""
PADDED = "micro-batch size x --data.max_len"
"""Where limits of tokens come from until preflight, which knows the model, fits them to the GPUs."""
SHARED = "--train.colocate_all: on the policy's GPUs"
MAX_NUM_SEQS = range(128, 1025)
"""Sequences that an engine runs at a time: from vLLM's own default to the most that a rollout batch is given."""
MAX_NUM_BATCHED_TOKENS = 8192
"""Tokens in a step of an engine; vLLM's own default for an asynchronous engine is 2,048."""
PACKING = _PACKING, _DYNAMIC = "ds.packing_samples", "train.dynamic_batch_enable"
_ATTENTION = "ds.attn_implementation"

Layer = tuple[str, dict[str, Any]]
APART: Layer = (
    "--train.async_enable: the engines have GPUs of their own",
    {"vllm.enable_sleep": False, "ds.enable_sleep": False},
)
"""Values above those of a preset, which lets DeepSpeed and vLLM take turns on the same GPUs."""


def layers(gpus: Sequence[Gpu], *, with_preset: bool) -> list[Layer]:
    """Values, beneath those of a preset, that depend on the GPUs, and where each comes from.

    Args:
        with_preset: whether there is a preset; without one, only what OpenRLHF cannot do without.
    """
    name, why = attention.choose(gpus)
    made: list[Layer] = [(why, {_ATTENTION: name})]
    if with_preset:
        fast: dict[str, Any] = {"vllm.enable_prefix_caching": True}  # the rollouts of a group share their prompt
        if attention.packs(name):
            fast |= dict.fromkeys(PACKING, True)
        made.append((FAST, fast))
    return made


def engines(devices: int, tensor_parallel: int, *, apart: bool) -> int:
    """Engines of these GPUs: of all of them, or if they have theirs apart from the policy, of half, rounded up.

    Args:
        devices: GPUs in all.
        tensor_parallel: GPUs of an engine.
    """
    return max((devices - devices // 2 if apart else devices) // tensor_parallel, 1)


def derive(flags: dict[str, Any], origin: dict[str, str]) -> None:
    """Take back what other flags exclude, place what shares GPUs, and size the batches; changes both arguments."""

    def put(flag: str, value: Any, why: str) -> None:
        flags[flag], origin[flag] = value, why

    excluded = _excludes_packing(flags)
    if origin.get(_PACKING) == FAST and excluded:
        put(_PACKING, False, excluded)
    excluded = "--no-ds.packing_samples" if not flags[_PACKING] else _excludes_dynamic(flags)
    if origin.get(_DYNAMIC) == FAST and excluded:
        put(_DYNAMIC, False, excluded)
    if flags["train.colocate_all"]:
        for model, used in (
            ("ref", flags["algo.kl.init_coef"] > 0),
            ("critic", flags["algo.advantage.estimator"] == "gae"),
            ("reward", not flags["reward.remote_url"]),
        ):
            if used and f"{model}.num_gpus_per_node" not in origin:
                put(f"{model}.num_gpus_per_node", flags["actor.num_gpus_per_node"], SHARED)
    if flags[_DYNAMIC]:
        for part in ("train", "rollout"):  # as much memory as padded micro-batches take at most
            if f"{part}.max_tokens_per_gpu" not in origin:
                tokens = flags[f"{part}.micro_batch_size"] * flags["data.max_len"]
                put(f"{part}.max_tokens_per_gpu", tokens, PADDED)
    if flags["vllm.num_engines"] and flags["vllm.max_num_seqs"] is None:
        rollouts = flags["rollout.batch_size"] * flags["rollout.n_samples_per_prompt"]
        share = -(-rollouts // flags["vllm.num_engines"])
        sequences = min(max(share, MAX_NUM_SEQS[0]), MAX_NUM_SEQS[-1])
        put(
            "vllm.max_num_seqs",
            sequences,
            f"{FAST}: a step's rollouts for each engine, {MAX_NUM_SEQS[0]} to {MAX_NUM_SEQS[-1]}",
        )
    if flags["vllm.max_num_batched_tokens"] is None:
        put("vllm.max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS, FAST)


def _excludes_packing(flags: dict[str, Any]) -> str | None:
    if not attention.packs(flags[_ATTENTION]):
        return f"--{_ATTENTION} {flags[_ATTENTION]}"
    return "--data.max_images_per_prompt" if flags["data.max_images_per_prompt"] else None


def _excludes_dynamic(flags: dict[str, Any]) -> str | None:
    return "--replay.samples makes the micro-batches" if flags["replay.samples"] else None
