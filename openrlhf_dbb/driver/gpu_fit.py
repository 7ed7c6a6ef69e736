"""Chooses micro-batches that fit the GPUs' memory, by an estimate that no run has confirmed; flags win.

A trial at the start finds out where the estimate is wrong (``PolicyActor.try_longest_micro_batch``).
"""

from __future__ import annotations

from openrlhf_dbb.driver.cpu_fit import rank_count, with_free
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cuda
from openrlhf_dbb.platform.machine import GIB

# Bytes a parameter
_WEIGHT = _GRADIENT = 2  # bfloat16
_STATES = 12  # in float32 the weight and Adam's two moments
_STEP = 4  # a step has the gradient in float32 too, when the logits are gone; with ZeRO 3 of a part at a time
# Bytes a logit
_TRAINED = 10  # at the peak of training: in float32 4, their gradient 4, that again in bfloat16 2
_TAKEN = 6  # in the pass that takes log-probs: in bfloat16 2, a copy in float32 4
# Bytes a token and hidden unit
_SAVED = 2  # of each layer: gradient checkpointing keeps its input in bfloat16
_LAYER = 40  # of a layer whose inside is kept: half of what cpu_fit has measured in float32
# Bytes
_BESIDE = 4e9  # two CUDA contexts, graphs and the sampler's table of the sleeping engine, DeepSpeed's buckets
_GATHERED = 2e9  # the weights that ZeRO 3 holds whole at a time: 1e9 parameters (stage3_max_live_parameters)
_USABLE = 0.95  # of a GPU's memory: torch's allocator leaves holes
_FLAGS = "--ds.zero_stage 3 (on several GPUs), --ds.adam_offload, --ds.lora.rank 64 or a smaller model"


def fitted(settings: Settings) -> Settings:
    """Return the settings with the largest micro-batches, up to the present ones, that fit; at least one row.

    Raises:
        UsageError: weights, gradients and Adam's states alone need more memory than a GPU has.
    """
    card, least = _card(settings), memory(settings)[0]
    if least > card:
        raise UsageError(
            f"--actor.model_name_or_path {settings.args.actor.model_name_or_path} needs {least / GIB:.1f} GiB of each "
            f"GPU for weights, gradients and Adam's states, the smallest has {card / GIB:.1f}; give {_FLAGS}"
        )
    for needed, part in enumerate(("train", "rollout"), start=1):
        most, tokens = settings.values[f"{part}.micro_batch_size"], f"{part}.max_tokens_per_gpu"
        # A divisor of the size that has passed the checks divides the batches too.
        for rows in (rows for rows in range(most, 0, -1) if most % rows == 0):
            settings = with_free(settings, f"{part}.micro_batch_size", rows)
            if settings.origin.get(tokens) == cuda.PADDED:
                padded = settings.values[f"{part}.micro_batch_size"] * settings.values["data.max_len"]
                settings = settings.with_values({tokens: padded}, cuda.PADDED)
            if memory(settings)[needed] <= _USABLE * card:
                break
    return settings


def memory(settings: Settings) -> tuple[float, float, float]:
    """Return the bytes of each GPU that are needed in any case, at the peak of training, and to take log-probs."""
    args, shape, stage = settings.args, settings.shape, settings.args.ds.zero_stage
    assert shape is not None
    trained, shards = shape.trained(args), [1 if stage < first else rank_count(args) for first in range(4)]
    weights = _WEIGHT * shape.parameters / shards[3]
    kept = 0 if args.ds.adam_offload else _GRADIENT * trained / shards[2] + _STATES * trained / shards[1]
    step = 0 if args.ds.adam_offload or stage == 3 else _STEP * trained / shards[1]

    beside, shared = _BESIDE, args.train.colocate_all and not args.train.async_enable
    if shared and not args.vllm.enable_sleep:
        beside += args.vllm.gpu_memory_utilization * _card(settings)
    if stage == 3:
        beside += min(_WEIGHT * shape.parameters, _GATHERED)
    if args.algo.kl.init_coef > 0 and (args.train.colocate_all or args.train.colocate_actor_ref):
        beside += 0 if args.ref.offload else weights  # of the reference model

    # Our pass makes the logits of responses only.
    responses = not args.ds.packing_samples and settings.estimator != NO_ESTIMATOR
    logits = shape.vocabulary * ((responses and args.rollout.max_new_tokens) or args.data.max_len)
    layers = _SAVED * shape.layers + _LAYER if args.actor.gradient_checkpointing_enable else _LAYER * shape.layers
    units = args.data.max_len * shape.hidden
    training = cuda.rows(args, "train") * (units * layers + _TRAINED * logits)
    log_probs = cuda.rows(args, "rollout") * (units * _LAYER + _TAKEN * logits)
    awake = 0 if args.ds.enable_sleep else kept
    return weights + kept + step, weights + kept + training + beside, weights + awake + log_probs + beside


def describe(settings: Settings) -> list[str]:
    """Return one line about GPUs and micro-batches, and a warning where the estimate is above the GPU's memory."""
    line, args = f"machine    {settings.machine.describe()}", settings.args
    if settings.shape is None:
        return [line]
    needed, has = max(memory(settings)) / GIB, _card(settings) / GIB
    sizes = f"{cuda.rows(args, 'train')} rows (training) and {cuda.rows(args, 'rollout')} (log-probs)"
    line += f"; micro-batches of {sizes}, about {needed:.1f} GiB of each GPU (estimated)"
    warning = (
        f"warning: the estimate is {needed:.1f} GiB of each GPU, the smallest has {has:.1f}: lower "
        f"--train.micro_batch_size, --rollout.micro_batch_size or --data.max_len, or give {_FLAGS}"
    )
    return [line] + [warning] * (needed > _USABLE * has)


def _card(settings: Settings) -> int:
    return min(gpu.memory for gpu in settings.machine.gpus)
