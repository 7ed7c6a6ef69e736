"""Chooses micro-batches that fit the GPUs' memory, by an estimate 10 % above the one case measured; flags win.

A trial at the start finds out where the estimate is wrong (``PolicyActor.try_longest_micro_batch``). The estimate
leaves out a reference model, and an engine that does not sleep.
"""

from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings
from openrlhf_dbb.driver.capacity import OPTIMIZER, WEIGHT
from openrlhf_dbb.driver.cpu_fit import rank_count, shared_prompts, with_free
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cuda, machine
from openrlhf_dbb.platform.machine import GIB

# Bytes a logit at the peak of training, and where log-probs are taken. Our pass holds bfloat16 and chunks in float32,
# as measured on a processor; OpenRLHF's, which packed rows take, copies to float32, and its gradient twice.
_OURS, _COPIED = (4, 3), (10, 6)
_SAVED = 2  # bytes a token, unit and layer: gradient checkpointing keeps a layer's input in bfloat16
_LAYER = 40  # bytes a token, unit and layer whose inside is kept: half of what cpu_fit has measured in float32
_BESIDE = 4e9  # bytes: two CUDA contexts, graphs and sampler of the sleeping engine, DeepSpeed's buckets
_GATHERED = 2e9  # bytes of weights that ZeRO 3 holds whole at a time (stage3_max_live_parameters is 1e9)
_USABLE = 0.95  # of a GPU's memory: torch's allocator leaves holes


def fitted(settings: Settings) -> Settings:
    """Return the settings with the largest micro-batches, up to the present ones, that fit; at least one row.

    Raise UsageError if weights, gradients and Adam's states alone need more memory than a GPU has.
    """
    card, least = min(gpu.memory for gpu in machine.look().gpus), memory(settings)[0]
    if least > card:
        raise UsageError(
            f"--actor.model_name_or_path {settings.args.actor.model_name_or_path} needs {least / GIB:.1f} GiB of each "
            f"GPU for weights, gradients and Adam, the smallest has {card / GIB:.1f}; give {cuda.SMALLER}"
        )
    for needed, part in enumerate(("train", "rollout"), start=1):
        most = settings.values[f"{part}.micro_batch_size"]
        # A divisor of the size that has passed the checks divides the batches too.
        for rows in (rows for rows in range(most, 0, -1) if most % rows == 0):
            settings = with_free(settings, f"{part}.micro_batch_size", rows)
            if settings.origin.get(f"{part}.max_tokens_per_gpu") == cuda.PADDED:
                tokens = settings.values[f"{part}.micro_batch_size"] * settings.args.data.max_len
                settings = settings.with_values({f"{part}.max_tokens_per_gpu": tokens}, cuda.PADDED)
            if memory(settings)[needed] <= _USABLE * card:
                break
    return settings


def memory(settings: Settings) -> tuple[float, float, float]:
    """Return the bytes of each GPU that are needed in any case, at the peak of training, and to take log-probs."""
    args, shape, stage = settings.args, settings.shape, settings.args.ds.zero_stage
    assert shape is not None
    shards = [rank_count(args) if stage >= first else 1 for first in range(4)]  # of what ZeRO shards from a stage on
    trained = 0 if args.ds.adam_offload else shape.trained(args)
    weights, kept = WEIGHT * shape.parameters / shards[3], trained * (WEIGHT / shards[2] + OPTIMIZER / shards[1])
    beside = _BESIDE + min(WEIGHT * shape.parameters, _GATHERED) * (stage == 3)
    responses = not args.ds.packing_samples and settings.estimator != NO_ESTIMATOR  # logits of these alone
    logits = shape.vocabulary * ((responses and args.rollout.max_new_tokens) or args.data.max_len)
    layers = _LAYER + _SAVED * shape.layers if args.actor.gradient_checkpointing_enable else _LAYER * shape.layers
    units = args.data.max_len * shape.hidden
    in_training, taken = _OURS if responses else _COPIED
    training = cuda.rows(args, "train") * (units * layers + in_training * logits)
    log_probs = cuda.rows(args, "rollout") * (units * _LAYER + taken * logits)
    awake = kept * (not args.ds.enable_sleep)
    return weights + kept, weights + kept + training + beside, weights + awake + log_probs + beside


def describe(settings: Settings) -> list[str]:
    """Return one line about GPUs and micro-batches, and a warning where the estimate is above the GPU's memory."""
    line, args = f"machine    {machine.look().describe()}", settings.args
    if settings.shape is None:
        return [line]
    needed, card = max(memory(settings)) / GIB, min(gpu.memory for gpu in machine.look().gpus) / GIB
    sizes = f"{cuda.rows(args, 'train')} rows (training) and {cuda.rows(args, 'rollout')} (log-probs)"
    line += f"; micro-batches of {sizes}{shared_prompts(settings)}, about {needed:.1f} GiB of each GPU (estimated)"
    warning = f"warning: of {card:.1f} GiB of a GPU the estimate takes {needed:.1f}: {cuda.LESS_MEMORY}"
    return [line] + [warning] * (needed > _USABLE * card)
