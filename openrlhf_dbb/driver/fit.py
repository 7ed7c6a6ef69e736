"""Fits a run to its model and to this machine: threads, precision, attention and micro-batches.

They are chosen by an estimate of the memory that they take. A flag of OpenRLHF's that somebody has
given wins over the choice, and so does ``OMP_NUM_THREADS`` for the threads.

The estimate for GPUs, without what is beside a pass, is a quarter above what an H200 took: 42.2 and
33.6 GB for Qwen3-1.7B, ZeRO 2, 4 rows of 5,120 tokens, recomputed. It leaves out a reference model
and an engine that stays awake. A trial at the start finds out where it is wrong
(``PolicyActor.try_longest_micro_batch``).
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import presets
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.platform.machine import GIB

ORIGIN = "fits the model and this machine"
WEIGHT = 2  # bytes a parameter in bfloat16; as many for its gradient
OPTIMIZER = 12  # bytes a parameter: in 32 bits the weight and Adam's two moments

# Without CUDA. With fewer parameters a second thread mostly waits for the first, and every choice
# below costs more than it saves.
SMALL = 20_000_000
_PROCESS = 1.2 * GIB  # a process that has imported torch, transformers and DeepSpeed or vLLM
_SHORT = 256  # tokens; for short sequences torch's fused attention takes longer backward than the plain one
_LEAST_CACHE = 64 * 2**20  # bytes of an engine
_MOST_CACHE = 2 * GIB  # vLLM queues rollouts that find no room
_SEQUENCES = 256  # that an engine generates at a time at most
_SAVED = 80  # bytes that a backward pass keeps for each token, layer and hidden unit; measured on SmolLM2 in float32

# With CUDA. Bytes a logit at the peak of training, and where log-probs are taken. Our pass holds
# bfloat16 and chunks in float32, as measured on a processor; OpenRLHF's, which packed rows take,
# copies to float32, and its gradient twice.
_OURS = (4, 3)
_COPIED = (10, 6)
# Bytes a token, unit and layer: gradient checkpointing keeps a layer's input in bfloat16
_INPUT = 2
# Bytes a token, unit and layer whose inside is kept: on a processor Qwen3's layers keep 55 in bfloat16, Llama's 46.
_LAYER = 56
# Bytes: two CUDA contexts, graphs and sampler of the sleeping engine, DeepSpeed's buckets
_BESIDE = 4e9
# Bytes of weights that ZeRO 3 holds whole at a time (stage3_max_live_parameters is 1e9)
_GATHERED = 2e9
_USABLE = 0.95  # of a GPU's memory: torch's allocator leaves holes
_BUSY = 8192  # tokens of a micro-batch, which keep a GPU busy
# Bytes that a sleeping engine pins for each byte of its weights: torch rounds blocks up
_PINNED = 4 / 3
_HOST_PROCESS = 4e9  # bytes of main memory: a process of an engine or of the policy with CUDA, with its share of Ray
RECOMPUTES = "actor.gradient_checkpointing_enable"


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that decide its memory."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    key_values: int  # numbers in a token's keys and values
    adapter: int  # parameters of adapters of rank 1 to all linear layers

    @classmethod
    def of(cls, config: Any) -> "Shape | None":
        """Return the shape in a transformers configuration; None for a mixture of experts or another kind."""
        if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
            return None
        try:
            hidden = config.hidden_size
            layers = config.num_hidden_layers
            vocabulary = config.vocab_size
            heads = config.num_attention_heads
            inner = config.intermediate_size
        except AttributeError:
            return None
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or hidden // heads
        attention_width = head_size * (heads + key_heads)
        layer = 2 * hidden * attention_width + 3 * hidden * inner
        embeddings = vocabulary * hidden
        if not config.tie_word_embeddings:
            embeddings *= 2
        adapter_of_layer = 4 * hidden + 2 * attention_width + 3 * (hidden + inner)
        return cls(
            parameters=embeddings + layers * layer,
            layers=layers,
            hidden=hidden,
            vocabulary=vocabulary,
            key_values=2 * layers * key_heads * head_size,
            adapter=layers * adapter_of_layer,
        )

    def trained(self, args: SimpleNamespace) -> int:
        """Return the number of parameters that are trained; these alone have gradients and optimizer states."""
        return self.adapter * args.ds.lora.rank or self.parameters


def fitted(settings: Settings, shape: Shape | None) -> Settings:
    """Return the settings with the flags that fit the model.

    A small model without CUDA, and a model without a known shape, keep theirs, but for the preset's for float32.

    Raises:
        UsageError: the memory of this machine cannot be enough.
    """
    if not cpu.active():
        return settings if shape is None else _fitted_to_gpus(settings, shape)
    if shape is None or not cpu_memory(settings, shape):
        return _in_fp32(settings)
    return _fitted_to_cpu(settings, shape)


def describe(settings: Settings, shape: Shape | None) -> list[str]:
    """Return one line about the machine and the choices for it, and warnings."""
    return _cpu_in_words(settings, shape) if cpu.active() else _gpus_in_words(settings, shape)


def with_free(settings: Settings, flag: str, value: Any) -> Settings:
    """Return the settings with this value unless somebody has chosen one."""
    free_origins = (None, machine.NO_CUDA, f"preset {presets.DEFAULT}", ORIGIN)
    if settings.origin.get(flag) not in free_origins:
        return settings
    return settings.with_values({flag: value}, ORIGIN)


def _fitted_to_cpu(settings: Settings, shape: Shape) -> Settings:
    short = settings.args.data.max_len <= _SHORT
    settings = with_free(settings, "ds.attn_implementation", "eager" if short else "sdpa")
    settings = with_free(settings, "ds.param_dtype", "bf16" if cpu.has_bf16() else "fp32")
    settings = _in_fp32(settings)
    if rank_count(settings.args) == 1 and settings.args.actor.max_norm > 0:
        # The others copy each gradient, also on one rank. Without clipping, 0 gives no norm of the gradient.
        settings = with_free(settings, "ds.zero_stage", 0)
    needed = cpu_memory(settings, shape, longest=False)
    free = _available()
    if needed > free:
        raise UsageError(
            f"--actor.model_name_or_path {settings.args.actor.model_name_or_path} needs {needed / GIB:.1f} GiB "
            f"of memory beside its rollouts, {free / GIB:.1f} are free; take a smaller model, or lower "
            "--actor.num_gpus_per_node"
        )
    without = with_free(settings, RECOMPUTES, False)
    fits = cpu_memory(without, shape) <= free
    return without if fits else with_free(settings, RECOMPUTES, True)


def _in_fp32(settings: Settings) -> Settings:
    """Return the settings; in float32 with the preset's values for it, where nobody but a preset has given others."""
    if settings.args.ds.param_dtype != "fp32":
        return settings
    for flag, value in settings.preset_read.fp32.items():
        if settings.origin.get(flag, "preset").startswith("preset"):
            settings = settings.with_values({flag: value}, f"preset {settings.preset}, in fp32")
    return settings


def engine_arguments(settings: Settings, shape: Shape | None) -> dict[str, Any]:
    """Return the arguments of vLLM that OpenRLHF does not set."""
    args = settings.args
    arguments: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if cpu.active():
        if args.ds.param_dtype == "fp32":
            arguments["dtype"] = "float32"
        return cpu.engine_arguments(arguments | engine_limits(args, shape))
    if settings.preset == presets.NONE:
        return arguments
    return arguments | cuda.engine_limits(args) | _cache_beside_policy(args, shape)


def engine_limits(args: SimpleNamespace, shape: Shape | None) -> dict[str, int]:
    """Return vLLM's limits for an engine's share of a step's rollouts; none for a small model."""
    if shape is None or shape.parameters < SMALL:
        return {}
    prompts = max(args.rollout.batch_size, args.rollout.vllm_generate_batch_size or 0)
    rollouts = prompts * args.rollout.n_samples_per_prompt
    sequences = -(-rollouts // max(args.vllm.num_engines, 1))
    needed = _cache_bytes(args, shape, sequences, cpu.BLOCK, _width(args))
    cache = min(max(needed, _LEAST_CACHE), _MOST_CACHE)
    return {"max_num_seqs": min(sequences, _SEQUENCES), "kv_cache_memory_bytes": cache}


def _width(args: SimpleNamespace) -> int:
    """Return the bytes of a parameter in the models' precision."""
    return 4 if args.ds.param_dtype == "fp32" else WEIGHT


def _cache_bytes(
    args: SimpleNamespace, shape: Shape, sequences: int, block: int, width: int
) -> int:
    """Return the bytes of keys and values of so many of the longest sequences.

    ``block`` is in tokens, ``width`` in bytes a number.
    """
    blocks_of_sequence = -(-args.data.max_len // block)
    blocks = sequences * blocks_of_sequence + 1  # one block is vLLM's own
    bytes_of_token = shape.key_values * width
    return blocks * block * bytes_of_token


def _cache_beside_policy(args: SimpleNamespace, shape: Shape | None) -> dict[str, int]:
    """Return the size of an engine's cache where the engine starts while the policy does, on its GPU.

    Without a size vLLM measures what is free meanwhile. It takes the policy's memory for its own,
    and an assertion ends its start if the policy frees some.
    """
    at_once = args.train.colocate_all and not args.train.async_enable and not args.vllm.enable_sleep
    if shape is None or not at_once:
        return {}
    sequences = cuda.engine_limits(args)["max_num_seqs"]
    needed = _cache_bytes(args, shape, sequences, cuda.BLOCK, WEIGHT)
    # The other half of the engine's share is for its weights and activations.
    most = args.vllm.gpu_memory_utilization * _smallest_gpu() / 2
    return {"kv_cache_memory_bytes": int(min(needed, most))}


def threads(args: SimpleNamespace, shape: Shape | None) -> int:
    """Return the OpenMP threads of each rank and engine; they take turns on all cores. 0 with CUDA: torch's choice."""
    if not cpu.active():
        return 0
    if "OMP_NUM_THREADS" in os.environ:
        return int(os.environ["OMP_NUM_THREADS"])
    if shape is None or shape.parameters < SMALL:
        return 1
    at_once = rank_count(args)
    take_turns = args.train.colocate_all and not args.train.async_enable
    if not take_turns:
        at_once *= 2
    return max(1, len(os.sched_getaffinity(0)) // at_once)


def cpu_memory(settings: Settings, shape: Shape | None, *, longest: bool = True) -> float:
    """Return an estimate of the bytes of all processes of a run on one host; 0 for a small model.

    ``longest`` counts micro-batches of the longest rollouts allowed too; without, only what is needed in any case.
    """
    args = settings.args
    if shape is None or shape.parameters < SMALL:
        return 0
    ranks = rank_count(args)
    engines = args.vllm.num_engines
    width = _width(args)
    # All are bytes of all ranks and engines together.
    weights = (ranks + engines) * width * shape.parameters
    gradients = ranks * width * shape.trained(args)
    # Ranks share Adam's two moments, and beside bfloat16 a weight and a gradient in float32.
    optimizer = (8 if width == 4 else 16) * shape.trained(args)
    processes = (ranks + engines + 1) * _PROCESS
    needed = weights + gradients + optimizer + processes
    if not longest:
        return float(needed)
    tokens = ranks * args.train.micro_batch_size * args.data.max_len
    layers = 2 if args.actor.gradient_checkpointing_enable else shape.layers
    activations = _SAVED * tokens * layers * shape.hidden
    # As measured. OpenRLHF's pass, which packed rows take too, copies the logits.
    bytes_of_logit = 6
    if settings.estimator == NO_ESTIMATOR or args.ds.packing_samples:
        bytes_of_logit = 16
    response = args.rollout.max_new_tokens or args.data.max_len
    logits = bytes_of_logit * ranks * args.train.micro_batch_size * response * shape.vocabulary
    caches = engines * engine_limits(args, shape)["kv_cache_memory_bytes"]
    return float(needed + activations + logits + caches)


def _cpu_in_words(settings: Settings, shape: Shape | None) -> list[str]:
    args = settings.args
    needed = cpu_memory(settings, shape)
    saved = "with" if args.actor.gradient_checkpointing_enable else "without"
    at_most = f"; at most {needed / GIB:.1f} GiB of memory" if needed else ""
    lines = [
        f"machine    CPU: {args.ds.param_dtype}, {args.ds.attn_implementation}, {saved} gradient checkpointing, "
        f"ZeRO {args.ds.zero_stage}, OMP_NUM_THREADS={threads(args, shape)}{at_most}"
    ]
    gpus = machine.look().describe()
    if gpus:
        lines.append(
            f"warning: there is {gpus}, but the installed torch is built without CUDA; "
            "OPENRLHF_DBB_PLATFORM=cuda bash scripts/setup_env.sh installs the stack for it"
        )
    if needed > _available():
        lines.append(
            f"warning: {_available() / GIB:.1f} GiB of memory are free, too few if a micro-batch holds the longest "
            "rollouts allowed: lower --train.micro_batch_size, --data.max_len or --rollout.max_new_tokens"
        )
    return lines


def _fitted_to_gpus(settings: Settings, shape: Shape) -> Settings:
    """Return the settings with the largest micro-batches, up to the present ones, that fit; at least one row.

    The policy recomputes no activations where enough tokens of a micro-batch fit without that.

    Raises:
        UsageError: weights, gradients and Adam's states alone need more memory than a GPU has.
    """
    card = _smallest_gpu()
    always = gpu_memory(settings, shape).always
    if always > card:
        raise UsageError(
            f"--actor.model_name_or_path {settings.args.actor.model_name_or_path} needs {always / GIB:.1f} GiB of each "
            f"GPU for weights, gradients and Adam, the smallest has {card / GIB:.1f}; give "
            f"{cuda.smaller(settings.args)}"
        )
    most_rows = settings.values["train.micro_batch_size"]
    kept = _with_rows(with_free(settings, RECOMPUTES, False), shape, "train", card)
    rows = kept.values["train.micro_batch_size"]
    keeps_gpu_busy = rows == most_rows or rows * settings.args.data.max_len >= _BUSY
    if keeps_gpu_busy and gpu_memory(kept, shape).training <= _USABLE * card:
        settings = kept
    else:
        settings = _with_rows(settings, shape, "train", card)
    return _with_rows(settings, shape, "rollout", card)


def _with_rows(settings: Settings, shape: Shape, part: str, card: float) -> Settings:
    """Return the settings with the most rows of a micro-batch that fit; ``part`` is "train" or "rollout"."""
    most_rows = settings.values[f"{part}.micro_batch_size"]
    for rows in range(most_rows, 0, -1):
        if most_rows % rows:
            continue  # a divisor of the size that has passed the checks divides the batches too
        settings = with_free(settings, f"{part}.micro_batch_size", rows)
        if settings.origin.get(f"{part}.max_tokens_per_gpu") == cuda.PADDED:
            tokens = settings.values[f"{part}.micro_batch_size"] * settings.args.data.max_len
            settings = settings.with_values({f"{part}.max_tokens_per_gpu": tokens}, cuda.PADDED)
        memory = gpu_memory(settings, shape)
        needed = memory.training if part == "train" else memory.log_probs
        if needed <= _USABLE * card:
            break
    return settings


@dataclass(frozen=True)
class GpuMemory:
    """Estimated bytes of each GPU."""

    always: float  # weights, gradients and Adam's states of a rank
    training: float  # at the peak of training
    log_probs: float  # while log-probs are taken


def gpu_memory(settings: Settings, shape: Shape) -> GpuMemory:
    """Return the memory of a GPU that a rank of the policy needs, beside an engine that sleeps."""
    args = settings.args
    stage = args.ds.zero_stage
    ranks = rank_count(args)
    trained = 0 if args.ds.adam_offload else shape.trained(args)
    weights = WEIGHT * shape.parameters / (ranks if stage >= 3 else 1)
    gradients = WEIGHT * trained / (ranks if stage >= 2 else 1)
    optimizer = OPTIMIZER * trained / (ranks if stage >= 1 else 1)
    beside = _BESIDE
    if stage == 3:
        beside += min(WEIGHT * shape.parameters, _GATHERED)
    train_row, log_probs_row = _row_memory(settings, shape)
    always = weights + gradients + optimizer
    awake = weights if args.ds.enable_sleep else always
    return GpuMemory(
        always=always,
        training=always + beside + cuda.rows(args, "train") * train_row,
        log_probs=awake + beside + cuda.rows(args, "rollout") * log_probs_row,
    )


def _row_memory(settings: Settings, shape: Shape) -> tuple[float, float]:
    """Return the bytes of a row in the training, and where its log-probs are computed."""
    args = settings.args
    only_responses = not args.ds.packing_samples and settings.estimator != NO_ESTIMATOR
    length = args.data.max_len
    if only_responses and args.rollout.max_new_tokens:
        length = args.rollout.max_new_tokens
    logits_of_row = length * shape.vocabulary
    units_of_row = args.data.max_len * shape.hidden
    bytes_of_unit = _LAYER * shape.layers
    if args.actor.gradient_checkpointing_enable:
        bytes_of_unit = _LAYER + _INPUT * shape.layers
    in_training, in_log_probs = _OURS if only_responses else _COPIED
    train_row = units_of_row * bytes_of_unit + logits_of_row * in_training
    return train_row, units_of_row * _LAYER + logits_of_row * in_log_probs


def host_memory(settings: Settings, shape: Shape) -> float:
    """Return an estimate of the bytes of main memory that a host with GPUs needs.

    The policy that sleeps keeps its gradients and Adam's states there, and an engine a copy of its weights unless they
    are sent anew, which OpenRLHF's own trainer does not do.
    """
    args = settings.args
    engines = args.vllm.num_engines / args.actor.num_nodes
    processes = engines * args.vllm.tensor_parallel_size + args.actor.num_gpus_per_node
    needed = _HOST_PROCESS * processes
    keeps_copies = settings.estimator == NO_ESTIMATOR or not cuda.gives_up_weights(args)
    if args.vllm.enable_sleep and keeps_copies:
        needed += engines * _PINNED * WEIGHT * shape.parameters
    if args.ds.enable_sleep or args.ds.adam_offload:
        needed += (WEIGHT + OPTIMIZER) * shape.trained(args) / args.actor.num_nodes
    return float(needed)


def _gpus_in_words(settings: Settings, shape: Shape | None) -> list[str]:
    line = f"machine    {machine.look().describe()}"
    if shape is None:
        return [line]
    args = settings.args
    memory = gpu_memory(settings, shape)
    needed = max(memory.always, memory.training, memory.log_probs)
    card = _smallest_gpu()
    recomputes = "with" if args.actor.gradient_checkpointing_enable else "without"
    lines = [
        f"{line}; micro-batches of {cuda.rows(args, 'train')} rows (training) and {cuda.rows(args, 'rollout')} "
        f"(log-probs), {recomputes} gradient checkpointing, about {needed / GIB:.1f} GiB of each GPU (estimated)"
    ]
    if needed > _USABLE * card:
        lines.append(
            f"warning: of {card / GIB:.1f} GiB of a GPU the estimate takes {needed / GIB:.1f}: {cuda.less_memory(args)}"
        )
    host = host_memory(settings, shape) / GIB
    there = machine.main_memory() / GIB
    if host > there:
        lines.append(
            f"warning: of {there:.0f} GiB of main memory the estimate takes {host:.0f}, since models that sleep are "
            "kept there: take a host with more, or fewer --vllm.num_engines with a larger --vllm.tensor_parallel_size"
        )
    return lines


def _smallest_gpu() -> int:
    return min(gpu.memory for gpu in machine.look().gpus)


def _available() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def rank_count(args: SimpleNamespace) -> int:
    """Return the number of ranks of the policy, one a GPU."""
    return int(args.actor.num_nodes * args.actor.num_gpus_per_node)


def checkpoint_warnings(shape: Shape, args: SimpleNamespace) -> list[str]:
    """Return a warning if the disk has no room for the checkpoints."""
    # Of what is trained: weights, and in 32 bits the weights and Adam's two moments.
    size = (OPTIMIZER + _width(args)) * shape.trained(args)  # bytes of one checkpoint
    kept = int(max(1, min(args.ckpt.max_num, args.ckpt.max_mem * GIB / size)))
    folder = Path(args.ckpt.path)
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if kept * size <= free or args.ckpt.save_steps <= 0 or args.ckpt.disable_ds:
        return []
    return [
        f"warning: {kept} checkpoints of {size / 1e9:.2g} GB are kept in {folder}, where only {free / 1e9:.2g} GB are "
        "free; make room, or lower --ckpt.max_num"
    ]
