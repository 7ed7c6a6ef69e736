"""Refusals of every training: GPUs, adapters, and the loss. A rule may rely on those before it."""

from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings
from openrlhf_dbb.methods import CONSTANT_LENGTH

PLACES: Rules[Settings] = Rules()

NODES = "actor.num_nodes"
GPUS = "actor.num_gpus_per_node"
_ADAPTERS = "ds.lora.rank"


@PLACES.add
def no_engine(settings: Settings) -> Refusal:
    """Nothing generates."""
    if settings.args.vllm.num_engines or settings.args.rollouts.of_run:
        return None
    flag = settings.shown("vllm.num_engines")
    return f"{flag}: missing; name the number of engines that generate"


@PLACES.add
def policy_and_engines_differ(settings: Settings) -> Refusal:
    """On shared GPUs OpenRLHF asserts it, once Ray has started."""
    args = settings.args
    if not args.train.colocate_all or args.train.async_enable or args.rollouts.of_run:
        return None
    policy = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    if policy == engines:
        return None
    flags = settings.shown(
        "train.colocate_all", NODES, GPUS, "vllm.num_engines", "vllm.tensor_parallel_size"
    )
    return f"{flags}: the policy and vLLM need as many GPUs; change one of them"


@PLACES.add
def adapters_alone(settings: Settings) -> Refusal:
    """OpenRLHF's own weight sync sends adapters by names that vLLM does not know."""
    if not settings.args.ds.lora.rank or settings.estimator != NO_ESTIMATOR:
        return None
    both = settings.shown(_ADAPTERS, "estimator")
    return f"{both}: vLLM does not know OpenRLHF's names of adapters; use --estimator point"


@PLACES.add
def split_adapters(settings: Settings) -> Refusal:
    """Our weight sync merges adapters on one GPU."""
    if not settings.args.ds.lora.rank or settings.args.ds.tensor_parallel_size <= 1:
        return None
    both = settings.shown(_ADAPTERS, "ds.tensor_parallel_size")
    return f"{both}: adapters are not split over GPUs; leave one out"


@PLACES.add
def adapters_of_4_bits(settings: Settings) -> Refusal:
    """vLLM gets whole weights, which 4 bits are not."""
    if not settings.args.ds.lora.rank or not settings.args.ds.load_in_4bit:
        return None
    both = settings.shown(_ADAPTERS, "ds.load_in_4bit")
    return f"{both}: adapters are merged into whole weights for vLLM; leave one out"


@PLACES.add
def adapters_sent_by_ray(settings: Settings) -> Refusal:
    """OpenRLHF's weight sync by Ray sends unmerged weights."""
    if not settings.args.ds.lora.rank or not settings.args.vllm.sync_with_ray:
        return None
    both = settings.shown(_ADAPTERS, "vllm.sync_with_ray")
    return f"{both}: only a policy that sends its weights merges adapters; leave one out"


@PLACES.add
def averaged_adapters(settings: Settings) -> Refusal:
    """OpenRLHF averages a copy of the model, which it loads without adapters."""
    if not settings.args.ds.lora.rank or not settings.args.train.enable_ema:
        return None
    both = settings.shown(_ADAPTERS, "train.enable_ema")
    return f"{both}: the averaged model has no adapters; leave one out"


@PLACES.add
def sums_of_another_loss(settings: Settings) -> Refusal:
    """A constant length divides sums over tokens, which only the loss of PPO has."""
    actor = settings.args.actor
    if actor.loss_agg_mode != CONSTANT_LENGTH or actor.policy_loss_type == "ppo":
        return None
    both = settings.shown("actor.loss_agg_mode", "actor.policy_loss_type")
    return f"{both}: it sums over tokens; leave one out"
