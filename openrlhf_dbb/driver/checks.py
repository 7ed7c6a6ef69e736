"""Refuses settings that would train wrongly in silence, or fail after an expensive start; ``rules/`` has the reasons.

OpenRLHF's own checks have passed. The range of an estimator's or a strategy's parameter stands beside the parameter.
"""

from collections.abc import Iterator
from types import SimpleNamespace

from openrlhf_dbb import estimators
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.rules import Refusal
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, OUTPUTS, Settings
from openrlhf_dbb.driver.rules.alone import ALONE
from openrlhf_dbb.driver.rules.places import PLACES
from openrlhf_dbb.driver.rules.posteriors import POSTERIORS
from openrlhf_dbb.driver.rules.recorded import RECORDED
from openrlhf_dbb.driver.rules.replay import REPLAY
from openrlhf_dbb.driver.rules.run import RUN
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine, ray_start
from openrlhf_dbb.storage.address import parse_url


def check(settings: Settings) -> None:
    """Raise UsageError for the first thing that is refused."""
    ray_start.check_socket_path()
    parts = (
        _of_machine,
        RUN.refusal,
        PLACES.refusal,
        REPLAY.refusal,
        RECORDED.refusal,
        _of_estimator,
        _unread,
        _of_gpus,
        _of_outputs,
    )
    for part in parts:
        line = part(settings)
        if line is not None:
            raise UsageError(line)


def _of_machine(settings: Settings) -> Refusal:
    """What this machine cannot do."""
    if not cpu.active():
        return cuda.CUDA.refusal(settings.args)
    if settings.preset_read.needs_cuda:
        return f"--preset {settings.preset} needs CUDA, and there is none here; use --preset tiny"
    return cpu.CPU.refusal(settings.args)


def _of_estimator(settings: Settings) -> Refusal:
    rules = ALONE if settings.estimator == NO_ESTIMATOR else POSTERIORS
    return rules.refusal(settings)


def _unread(settings: Settings) -> Refusal:
    """A parameter of another estimator or strategy than the run's would do nothing."""
    read = {settings.strategy.name}
    if settings.estimator != NO_ESTIMATOR:
        read.add(estimators.get(settings.estimator).name)
    others = {*estimators.available(), *strategies.available()} - read
    for flag in settings.values:
        if settings.given(flag) and flag.partition(".")[0] in others:
            return f"--{flag} is not read by this run's {' and '.join(sorted(read))}; leave it out"
    return None


def _of_gpus(settings: Settings) -> Refusal:
    """The GPUs of other hosts are counted when Ray has started."""
    if cpu.active() or machine.ray_cluster() is not None:
        return None
    return next(too_few_gpus(settings.args, len(machine.look().gpus)), None)


def _of_outputs(settings: Settings) -> Refusal:
    """``ray job submit`` copies the working folder, and deletes the copy with what was written there."""
    places = {flag: settings.values[flag] for flag in OUTPUTS}
    places["store.url"] = parse_url(settings.args.store.url).path
    for flag, place in places.items():
        if "/_ray_pkg_" in (place or ""):
            return (
                f"--{flag} {place} is in Ray's temporary copy of the working directory; give an absolute path on a "
                "shared file system"
            )
    return None


def too_few_gpus(args: SimpleNamespace, there: int) -> Iterator[str]:
    """Yield an error line if the flags need more GPUs than there are: OpenRLHF would wait for them for ever."""
    needed = gpus_needed(args)
    if needed > there:
        yield (
            f"these flags need {needed} GPUs, there are {there}; lower --actor.num_gpus_per_node and "
            "--vllm.num_engines, or share GPUs with --train.colocate_all and without --train.async_enable (Ray needs a "
            "CPU beside each GPU: `ray start --num-cpus`, SLURM's --cpus-per-task)"
        )


def gpus_needed(args: SimpleNamespace) -> int:
    """Return the GPUs that OpenRLHF's placement groups ask Ray for (without CUDA: logical ones)."""
    train = args.train
    has_critic = bool(args.critic.model_name_or_path)
    apart = {
        "ref": args.algo.kl.init_coef > 0 and not train.colocate_actor_ref,
        "critic": has_critic,
        "reward": not args.reward.remote_url and not (has_critic and train.colocate_critic_reward),
    }
    needed = args.actor.num_nodes * args.actor.num_gpus_per_node
    for name, has_own in apart.items():
        model = getattr(args, name)
        if has_own and not train.colocate_all:
            needed += model.num_nodes * model.num_gpus_per_node
    if train.async_enable or not train.colocate_all:
        needed += (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    return int(needed)
