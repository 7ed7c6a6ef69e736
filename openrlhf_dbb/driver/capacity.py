"""Does it fit: what a training takes of GPU memory, main memory and disk, compared with what there is.

Memory that does not fit is a warning: the estimates have not been compared with a GPU yet. A disk without room for the
checkpoints is refused: their size has been measured. Mixtures of experts and other models whose configuration does not
tell their size are not checked.

P parameters, R ranks, V words of the vocabulary, T tokens of a micro-batch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.core import best_model
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform.machine import GIB, Gpu

WEIGHT, OPTIMIZER = 2, 12
"""Bytes a parameter: bfloat16; in 32 bits the weight and Adam's two moments."""
LOGIT = 6
"""Bytes a token and word: logits in bfloat16 and in 32 bits. Training takes their gradients as well."""


MOST_TOKENS = {"train": 32_768, "rollout": 65_536}
"""Of a dynamic micro-batch; more makes a step hardly faster."""
SHARE = 0.8
"""Of the memory that is left by these estimates, how much dynamic micro-batches are given."""


@dataclass(frozen=True)
class Shape:
    """Of a dense model, from its configuration.

    Attributes:
        parameters: P.
        layers, hidden: of what gradient checkpointing keeps.
        vocabulary: V.
    """

    parameters: int
    layers: int
    hidden: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Shape | None:
        """From a transformers configuration; None for a model that is not of the common dense kind."""
        if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
            return None
        try:
            hidden, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
            heads, inner = config.num_attention_heads, config.intermediate_size
        except AttributeError:
            return None
        size = getattr(config, "head_dim", None) or hidden // heads
        keys = getattr(config, "num_key_value_heads", None) or heads
        layer = 2 * hidden * size * (heads + keys) + 3 * hidden * inner
        embeddings = vocabulary * hidden * (1 if config.tie_word_embeddings else 2)
        return cls(embeddings + layers * layer, layers, hidden, vocabulary)


@dataclass(frozen=True)
class Needs:
    """Bytes that a training takes.

    Attributes:
        states: weights, gradients and optimizer on each GPU.
        longest: beside them, training on one sequence of the greatest length.
        training, scoring: beside them, a micro-batch of such sequences, trained on or given log-probabilities.
        asleep: of the states, what stays on a GPU while vLLM generates.
        engine: a GPU's part of vLLM's weights.
        host: main memory of a host for what sleeps or is offloaded.
        checkpoint: one of them, on disk.
        disk: all that are kept, the trained model, and the best ones by evaluation.
    """

    states: int
    longest: int
    training: int
    scoring: int
    asleep: int
    engine: int
    host: int
    checkpoint: int
    disk: int


def needs(shape: Shape, args: SimpleNamespace) -> Needs:
    """What a training with these arguments takes of each GPU, of a host, and of the disk."""
    parameters, stage = shape.parameters, args.ds.zero_stage
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    weights = WEIGHT * parameters / (ranks if stage == 3 else 1)
    gradients = WEIGHT * parameters / (ranks if stage >= 2 else 1)
    optimizer = OPTIMIZER * parameters / (ranks if stage >= 1 else 1)
    states = weights + gradients + (0 if args.ds.adam_offload else optimizer)
    replays = 1 + args.replay.samples / args.rollout.n_samples_per_prompt
    kept = shape.layers * shape.hidden * WEIGHT if args.actor.gradient_checkpointing_enable else 0
    token = 2 * LOGIT * shape.vocabulary + kept
    here = optimizer * args.actor.num_gpus_per_node * (args.ds.enable_sleep or args.ds.adam_offload)
    engines = -(-(args.vllm.num_engines or 0) // args.actor.num_nodes)
    here += WEIGHT * parameters * engines * args.vllm.enable_sleep
    checkpoint = checkpoint_bytes(shape, args)
    kept_on_disk = min(args.ckpt.max_num * checkpoint, max(args.ckpt.max_mem * GIB, checkpoint))
    return Needs(
        states=round(states),
        longest=args.data.max_len * token,
        training=round(_tokens(args, "train") * replays) * token,
        scoring=_tokens(args, "rollout") * LOGIT * shape.vocabulary,
        asleep=round(weights if args.ds.enable_sleep else states),
        engine=WEIGHT * parameters // args.vllm.tensor_parallel_size,
        host=round(here),
        checkpoint=checkpoint,
        disk=round(kept_on_disk) + WEIGHT * parameters * (1 + _best_models(args)),
    )


def describe_checkpoints(shape: Shape, args: SimpleNamespace) -> str:
    """Return what a checkpoint takes on disk, when one is saved, and how many are kept; "none" if none is."""
    size = checkpoint_bytes(shape, args)
    if not size or args.ckpt.save_steps <= 0:
        return "none: a run that stops cannot be resumed (--ckpt.save_steps)"
    kept = int(max(1, min(args.ckpt.max_num, args.ckpt.max_mem * GIB / size)))
    return (
        f"{size / 1e9:.2g} GB each, after every {args.ckpt.save_steps} steps; the last {kept} kept, "
        f"{kept * size / 1e9:.2g} GB in {args.ckpt.path}"
    )


def checkpoint_bytes(shape: Shape, args: SimpleNamespace) -> int:
    """Return the bytes of one checkpoint: weights as trained, and in 32 bits the weights and Adam's two moments."""
    if args.ckpt.disable_ds or args.ckpt.save_steps == -1:
        return 0
    weight = 2 * WEIGHT if args.ds.param_dtype == "fp32" else WEIGHT
    return (weight + OPTIMIZER) * shape.parameters


def _best_models(args: SimpleNamespace) -> int:
    """Most that are on disk: the best one, one for a resume, one that is being written."""
    evaluates = args.eval.dataset or args.eval.benchmarks
    return 3 if evaluates and args.ckpt.best_metric_key != "none" else 0


def _tokens(args: SimpleNamespace, part: str) -> int:
    """Most tokens of a micro-batch of ``train`` or ``rollout``."""
    sizes = getattr(args, part)
    if args.train.dynamic_batch_enable:
        return max(sizes.max_tokens_per_gpu, args.data.max_len)
    return sizes.micro_batch_size * args.data.max_len


def token_limits(shape: Shape, args: SimpleNamespace, gpus: Sequence[Gpu]) -> dict[str, int]:
    """``--train.max_tokens_per_gpu`` and ``--rollout.max_tokens_per_gpu`` that these GPUs have room for, by flag."""
    needed, memory = needs(shape, args), min(gpu.memory for gpu in gpus)
    room = SHARE * (memory - needed.states - _beside(args, memory))
    found = {}
    for part, takes in (("train", needed.training), ("rollout", needed.scoring)):
        fits = math.floor(room / (takes / _tokens(args, part)) / 1024) * 1024
        found[f"{part}.max_tokens_per_gpu"] = max(min(fits, MOST_TOKENS[part]), args.data.max_len)
    return found


def _beside(args: SimpleNamespace, memory: int) -> float:
    """Bytes of a GPU that vLLM keeps while the policy trains on it."""
    shared = args.train.colocate_all and not args.train.async_enable
    return args.vllm.gpu_memory_utilization * memory if shared and not args.vllm.enable_sleep else 0.0


def check(shape: Shape, args: SimpleNamespace, gpus: Sequence[Gpu], *, host: float) -> list[str]:
    """Return warnings about what does not fit in memory, or may not, each with the flags to change.

    Nothing is refused: the estimates have not been compared with a GPU.

    Args:
        gpus: to train on.
        host: bytes of main memory.
    """
    needed = needs(shape, args)
    lines = []
    if needed.host > host:
        lines.append(
            f"what sleeps or is offloaded takes {_gib(needed.host)} of main memory, there are {_gib(host)}; leave out "
            "--ds.enable_sleep, --vllm.enable_sleep or --ds.adam_offload, or use more hosts"
        )
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    lines += _at_least(needed, args, smallest) or _at_most(needed, args, smallest)
    return [f"warning: {line} (estimated)" for line in lines]


def _at_least(needed: Needs, args: SimpleNamespace, gpu: Gpu) -> list[str]:
    """What does not fit on a GPU even if all responses are short."""
    has = f"a {gpu.name} has {_gib(gpu.memory)}"
    share = args.vllm.gpu_memory_utilization * gpu.memory
    if needed.engine > share:
        return [
            f"vLLM's weights take {_gib(needed.engine)} of each GPU, --vllm.gpu_memory_utilization "
            f"{args.vllm.gpu_memory_utilization:g} gives it {_gib(share)} ({has}); raise it, or "
            "--vllm.tensor_parallel_size"
        ]
    shared = args.train.colocate_all and not args.train.async_enable
    if shared and needed.asleep + share > gpu.memory:
        sleep = "" if args.ds.enable_sleep else " or give --ds.enable_sleep"
        return [
            f"while vLLM has its {_gib(share)} of a GPU, the policy keeps {_gib(needed.asleep)} there, and {has}; "
            f"lower --vllm.gpu_memory_utilization{sleep}"
        ]
    beside = _beside(args, gpu.memory)
    least = needed.states + needed.longest + beside
    if least > gpu.memory:
        return [
            f"training takes {_gib(least)} of a GPU at least ({_gib(needed.states)} weights, gradients and optimizer, "
            f"{_gib(needed.longest)} a sequence of --data.max_len {args.data.max_len}{_vllm(beside)}), and {has}; "
            f"{_ways_out(args, beside)}"
        ]
    return []


def _at_most(needed: Needs, args: SimpleNamespace, gpu: Gpu) -> list[str]:
    """What does not fit on a GPU if all responses of a micro-batch are as long as they can be."""
    lines = []
    room = gpu.memory - needed.states - _beside(args, gpu.memory)
    for part, what, takes in (
        ("train", "training", needed.training),
        ("rollout", "the log-probabilities", needed.scoring),
    ):
        if takes > room:
            flag, fits = _smaller(args, part, room / takes)
            lines.append(
                f"if all responses of a micro-batch are as long as they can be, {what} may take "
                f"{_gib(gpu.memory - room + takes)} of a GPU, and a {gpu.name} has {_gib(gpu.memory)}; then give "
                f"--{flag} {fits}"
            )
    return lines


def _ways_out(args: SimpleNamespace, beside: float) -> str:
    ways = {
        "--vllm.enable_sleep": beside > 0,
        "--ds.zero_stage 3": args.ds.zero_stage < 3,
        "--ds.adam_offload": not args.ds.adam_offload,
        "a lower --data.max_len": True,
    }
    return f"use more GPUs, {' or '.join(flag for flag, helps in ways.items() if helps)}"


def _vllm(share: float) -> str:
    return f", {_gib(share)} vLLM, which does not sleep" if share else ""


def _smaller(args: SimpleNamespace, part: str, fraction: float) -> tuple[str, int]:
    """The flag that sizes the micro-batches of a part, and a value with this fraction of the tokens, if that can be."""
    sizes = getattr(args, part)
    if args.train.dynamic_batch_enable:
        return f"{part}.max_tokens_per_gpu", max(math.floor(sizes.max_tokens_per_gpu * fraction), args.data.max_len)
    return f"{part}.micro_batch_size", 2 ** int(math.log2(max(1, sizes.micro_batch_size * fraction)))


def check_disk(shape: Shape, args: SimpleNamespace) -> None:
    """Refuse a training whose checkpoints have no room; those that are there already are counted.

    Raises:
        UsageError: names the folder and the flags to change.
    """
    needed = needs(shape, args)
    folder = Path(args.ckpt.path)
    files = {file for each in (folder, best_model.models(folder)) for file in each.rglob("*") if file.is_file()}
    there = sum(file.stat().st_size for file in files)
    exists = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(exists).free
    and_best = f" and {_best_models(args)} best ones" if _best_models(args) else ""
    if needed.disk - there > free:
        raise UsageError(
            f"--ckpt.path {folder} has {_gib(free)} free; --ckpt.max_num {args.ckpt.max_num} checkpoints of "
            f"{_gib(needed.checkpoint)} and the trained model{and_best} take {_gib(needed.disk)}; make room, lower "
            "--ckpt.max_num, or give another --ckpt.path"
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
