"""Flag values, refusals and environment of a machine with CUDA."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import chosen
from openrlhf_dbb.chosen import Values
from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import machine

# The printed configuration names these reasons behind a value.
FAST = "fast on CUDA"
PADDED = "micro-batch size x --data.max_len"

FLASH = "flash_attention_2"
TORCH = "sdpa"
# Major compute capabilities for which FLASH has kernels: 8 is Ampere and Ada, 9 Hopper
_KERNELS = range(8, 10)

BLOCK = 64  # tokens; vLLM's caches of keys and values on GPUs have blocks of at most so many

ALL_GPUS = "actor.num_gpus_per_node", "vllm.num_engines"  # flags for which a preset may say "all"
_ATTENTION = "ds.attn_implementation"

Layer = tuple[str, Mapping[str, Any]]  # the reason for some flag values, and the values

# Replaces values of a preset, which lets DeepSpeed and vLLM take turns on the same GPUs.
APART: Layer = (
    "--train.async_enable: the engines have GPUs of their own",
    {"vllm.enable_sleep": False, "ds.enable_sleep": False},
)


def check_machine() -> None:
    """Raise UsageError if the installed stack cannot run here; a stack for CUDA does not run on the processor."""
    built_for = str(machine.torch_cuda())
    why = machine.no_gpus(machine.look(), built_for)
    if why:
        raise UsageError(
            f"the installed torch is built for CUDA {built_for}, and {why}; to train without a GPU, set up another "
            "environment: OPENRLHF_DBB_PLATFORM=cpu bash scripts/setup_env.sh"
        )
    lacking = machine.lacks()
    if lacking:
        raise UsageError("; ".join(lacking))


CUDA: Rules[SimpleNamespace] = Rules()
"""Why a run would fail late or train wrongly on these GPUs; of OpenRLHF's arguments."""


@CUDA.add
def attention_that_is_not_there(args: SimpleNamespace) -> Refusal:
    """The policy would fail at its first layer."""
    gpus = machine.look().gpus
    attention = args.ds.attn_implementation
    why_not = unavailable(attention, gpus)
    if not why_not:
        return None
    usable, _ = choose_attention(gpus)
    return f"--{_ATTENTION} {attention}: {why_not}; use {usable}, or leave it out"


@CUDA.add
def old_gpus(args: SimpleNamespace) -> Refusal:
    """vLLM's bfloat16 has no kernels for them."""
    old = [gpu.name for gpu in machine.look().gpus if gpu.capability < (8, 0)]
    if not old:
        return None
    why = "vLLM's bfloat16 needs compute capability 8.0"
    return f"{', '.join(old)}: {why}; hide it with CUDA_VISIBLE_DEVICES"


@CUDA.add
def other_precision_than_vllm(args: SimpleNamespace) -> Refusal:
    """The policy would train on rollouts of another precision."""
    if args.ds.param_dtype != "fp16":
        return None
    return "--ds.param_dtype fp16: vLLM generates in bfloat16; use bf16"


@CUDA.add
def states_that_cannot_sleep(args: SimpleNamespace) -> Refusal:
    """DeepSpeed moves the states of its ZeRO optimizers only."""
    if args.ds.zero_stage != 0 or not args.ds.enable_sleep:
        return None
    advice = "use 2, or --no-ds.enable_sleep"
    return f"--ds.zero_stage 0: --ds.enable_sleep cannot move its states; {advice}"


@CUDA.add
def four_bits(args: SimpleNamespace) -> Refusal:
    """Weights of 4 bits have no gradient, and vLLM takes whole ones."""
    if not args.ds.load_in_4bit:
        return None
    return "--ds.load_in_4bit: 4-bit weights cannot be trained, nor sent to vLLM; leave it out"


@CUDA.add
def no_ring_attention(args: SimpleNamespace) -> Refusal:
    """A sequence over several GPUs needs a package of its own."""
    ds = args.ds
    has_ring = ds.attn_implementation == FLASH and machine.is_real("ring_flash_attn")
    if ds.ring_attn_size <= 1 or has_ring:
        return None
    needs = f"it needs {FLASH} and ring_flash_attn"
    return f"--ds.ring_attn_size {ds.ring_attn_size}: {needs}; install it, or leave it out"


@CUDA.add
def no_liger_kernel(args: SimpleNamespace) -> Refusal:
    """OpenRLHF imports it in the policy's actors."""
    if not args.ds.use_liger_kernel or machine.is_real("liger_kernel"):
        return None
    return "--ds.use_liger_kernel: liger_kernel is not installed; install it, or leave it out"


@CUDA.add
def no_compiler(args: SimpleNamespace) -> Refusal:
    """DeepSpeed compiles some of its parts at the first use, in an actor."""
    compiled = {
        "ds.adam_offload": args.ds.adam_offload,
        "ds.deepcompile": args.ds.deepcompile,
        "actor.optim muon": args.actor.optim == "muon",
    }
    for flag, is_on in compiled.items():
        if is_on and not machine.nvcc():
            why = "DeepSpeed compiles this with nvcc, which is missing"
            return f"--{flag}: {why}; install it, or leave it out"
    return None


def worker_environment() -> dict[str, str]:
    """Return the environment variables of every Ray worker, and so of the vLLM engines."""
    # vLLM would compile this sampler at the first top-p, which only evaluations have.
    sampler = "VLLM_USE_FLASHINFER_SAMPLER"
    variables = {sampler: os.environ.get(sampler, "0")}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in os.environ:
            variables[name] = without_expandable_segments(os.environ[name])
    return variables


def without_expandable_segments(settings: str) -> str:
    """Return the settings of torch's allocator without ``expandable_segments``.

    vLLM reads the weights in the policy's memory on the same GPU. Another process may open a
    segment that expands only with ptrace rights, which containers and most systems refuse.
    """
    kept = [
        part
        for part in settings.split(",")
        if part.partition(":")[0].strip() != "expandable_segments"
    ]
    return ",".join(kept)


def choose_attention(gpus: Sequence[machine.Gpu]) -> tuple[str, str]:
    """Return the attention that the policy trains with on these GPUs, and the reason."""
    why_not = unavailable(FLASH, gpus)
    if why_not:
        return TORCH, f"CUDA, {why_not}"
    return FLASH, f"CUDA, {FLASH} is installed"


def unavailable(attention: str, gpus: Sequence[machine.Gpu]) -> str | None:
    """Return why an attention cannot be used; None if it can, and None for another name than FLASH."""
    if attention != FLASH:
        return None
    if not machine.is_real("flash_attn_2_cuda"):
        return "no compiled flash-attn is installed"
    for gpu in gpus:
        if gpu.capability[0] not in _KERNELS:
            capability = ".".join(map(str, gpu.capability))
            return f"{FLASH} has no kernels for {gpu.name} (compute capability {capability})"
    return None


def layers(gpus: Sequence[machine.Gpu], *, with_preset: bool) -> Iterator[Layer]:
    """Yield the layers of values that depend on the GPUs, below a preset; without one only what OpenRLHF needs."""
    attention, why = choose_attention(gpus)
    yield why, {_ATTENTION: attention}
    if with_preset:  # the rollouts of a group share their prompt
        yield FAST, {"vllm.enable_prefix_caching": True}


def numbers_of_gpus(run: Values) -> None:
    """Put numbers in place of a preset's "all"; engines of their own GPUs get half."""
    values = run.values
    hosts = values["actor.num_nodes"]
    tensor_parallel = max(values["vllm.tensor_parallel_size"], 1)
    gpus = hosts * len(machine.look().gpus)
    if values["train.async_enable"]:
        engines = max((gpus - gpus // 2) // tensor_parallel, 1)
        ranks = (gpus - engines * tensor_parallel) // hosts
    else:
        engines = max(gpus // tensor_parallel, 1)
        ranks = gpus // hosts
    all_of = {"actor.num_gpus_per_node": ranks, "vllm.num_engines": engines}
    for flag in ALL_GPUS:
        if values[flag] == "all":
            values[flag] = max(all_of[flag], 1)


def prefix_cache(run: Values) -> None:
    """It is not known whether the cache forgets the blocks of requests that wait for new weights."""
    flag = "vllm.enable_prefix_caching"
    is_ours = run.origin.get(flag) in (machine.NO_CUDA, FAST)
    if is_ours and run.values["train.partial_rollout_enable"]:
        run.put({flag: False}, "--train.partial_rollout_enable")


def beside_policy(run: Values) -> None:
    """Models that share the policy's GPUs have as many."""
    values = run.values
    is_used = {
        "ref": values["algo.kl.init_coef"] > 0,
        "critic": values["algo.advantage.estimator"] == "gae",
        "reward": not values["reward.remote_url"],
    }
    for model, used in is_used.items():
        for places in ("num_nodes", "num_gpus_per_node"):
            flag = f"{model}.{places}"
            if values["train.colocate_all"] and used and flag not in run.origin:
                why = "--train.colocate_all: on the policy's GPUs"
                run.put({flag: values[f"actor.{places}"]}, why)


def token_limits(run: Values) -> None:
    """Dynamic micro-batches take at most the memory of padded ones."""
    values = run.values
    for part in ("train", "rollout"):
        flag = f"{part}.max_tokens_per_gpu"
        if values["train.dynamic_batch_enable"] and flag not in run.origin:
            tokens = values[f"{part}.micro_batch_size"] * values["data.max_len"]
            run.put({flag: tokens}, PADDED)


def smaller(args: SimpleNamespace) -> str:
    """Return the flags by which weights and Adam's states take less memory of a GPU, without those in use."""
    ways = []
    if args.ds.zero_stage < 3:
        ways.append("--ds.zero_stage 3 (on several GPUs)")
    if not args.ds.adam_offload:
        ways.append("--ds.adam_offload")
    if not args.ds.lora.rank:
        ways.append("--ds.lora.rank 64")
    return " or ".join([*ways, "a smaller model"])


def less_memory(args: SimpleNamespace) -> str:
    """Return what makes a run take less memory of a GPU."""
    sizes = "lower --train.micro_batch_size, --rollout.micro_batch_size or --data.max_len"
    if args.actor.gradient_checkpointing_enable:
        return f"{sizes}, or give {smaller(args)}"
    return f"give --actor.gradient_checkpointing_enable, {sizes}, or give {smaller(args)}"


def gives_up_weights(args: SimpleNamespace) -> bool:
    """Return whether an engine that sleeps keeps no weights, because the policy sends all of them before it generates.

    With adapters the frozen weights are not sent, and of a model that sees images vLLM has tensors that no weight is
    loaded into.
    """
    sends_all = not args.ds.lora.rank and not args.data.max_images_per_prompt
    return bool(args.vllm.enable_sleep and sends_all)


def rows(args: SimpleNamespace, part: str) -> int:
    """Return the most rows of ``--data.max_len`` tokens in a micro-batch; ``part`` is "train" or "rollout"."""
    sizes = getattr(args, part)
    if args.train.dynamic_batch_enable:
        return max(1, int(sizes.max_tokens_per_gpu // args.data.max_len))
    size = sizes.micro_batch_size
    if part == "train":  # at most so many rows are replayed beside the fresh ones
        size += math.ceil(size * args.replay.samples / args.rollout.n_samples_per_prompt)
    return int(size)


def engine_limits(args: SimpleNamespace) -> dict[str, int]:
    """Return vLLM's limits for an engine that runs its share of a step's rollouts at a time."""
    rollouts = chosen.rollouts_of_a_step(args)
    share = -(-rollouts // max(args.vllm.num_engines, 1))
    # vLLM's defaults are 128 sequences at a time and 2,048 tokens a step. It keeps 4 bytes for each
    # sequence and word of the vocabulary.
    return {"max_num_seqs": min(max(share, 128), 512), "max_num_batched_tokens": 8192}
