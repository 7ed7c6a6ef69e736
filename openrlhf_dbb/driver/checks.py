"""Refuses settings that would train wrongly in silence, or fail after an expensive start, in one pass over rules.

OpenRLHF's own checks have passed. The range of an estimator's or a strategy's parameter stands beside the parameter.
"""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from openrlhf_dbb import estimators, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.data import TRAINING
from openrlhf_dbb.driver.arguments import MODEL_FLAG, NO_ESTIMATOR, OUTPUTS, Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.methods import CONSTANT_LENGTH
from openrlhf_dbb.platform import cpu, cuda, machine, ray_start
from openrlhf_dbb.storage.address import parse_url
from openrlhf_dbb.terminal import shown

_GROUP, _LORA = "rollout.n_samples_per_prompt", "ds.lora.rank"
_REPLAY = "replay.samples"
_FORM, _SUMS = "algo.advantage.estimator", "actor.loss_agg_mode"
_REWARD, _REWARD_MODEL = "reward.remote_url", "reward.model_name_or_path"
_POLICYS_GPUS = "actor.num_nodes actor.num_gpus_per_node"
_STEP = f"rollout.batch_size {_GROUP}"
_MISSING = "missing; name one, or leave out --preset none"
_OURS = "OpenRLHF alone has no such thing; use --estimator point, its group mean"
_VANISH = "and left-over rollouts would vanish; change one of them"
_NEVER = "too low; give 1 or more, or -1 for never"


class Rule(NamedTuple):
    """Flags that do not go together, or a value that does not work."""

    flags: str  # to name with their values, by spaces
    why: str  # and what to do instead; ``{s}`` is the settings, ``{forms}`` our advantage forms
    refused: Callable[[Settings, SimpleNamespace], Any] | None = None  # by settings and arguments; None: all are set


# A rule may rely on those before it.
_ANY = (
    Rule(MODEL_FLAG, _MISSING, lambda s, a: not s.values[MODEL_FLAG]),
    Rule(TRAINING, _MISSING, lambda s, a: not s.values[TRAINING]),
    Rule("run_name", "it names folders; use letters, digits and . _ + -, no - first, at most 200",
         lambda s, a: not re.fullmatch(r"(?!\.+$)[\w.+][\w.+-]{,199}", s.run_name)),
    Rule("resume warm_start", "one continues a run, the other begins a new one; give one of them",
         lambda s, a: None not in (a.resume, a.warm_start)),
    Rule("data.pass_rate_key warm_start", "both say what a run begins with; give one of them"),
    Rule("ckpt.max_num", "OpenRLHF deletes an old checkpoint before the new one is whole; give 2 or more",
         lambda s, a: a.ckpt.max_num < 2),
    Rule("ckpt.save_adapter", "there are no adapters; give --ds.lora.rank, or leave it out",
         lambda s, a: a.ckpt.save_adapter and not a.ds.lora.rank),
    Rule("ds.use_universal_ckpt", "a run resumes from its own checkpoints only; leave it out"),
    Rule("logger.logging_steps", "too low; give 1 or more", lambda s, a: a.logger.logging_steps < 1),
    Rule("data.input_template data.apply_chat_template",
         "a prompt gets one of them; leave one out"),
    # Python takes 0 as a queue without an end.
    Rule("train.async_queue_size", "too low; give 1 or more", lambda s, a: a.train.async_queue_size < 1),
    Rule("vllm.num_engines", "missing; name the number of engines that generate", lambda s, a: not a.vllm.num_engines),
    Rule(f"train.colocate_all {_POLICYS_GPUS} vllm.num_engines vllm.tensor_parallel_size",
         "the policy and vLLM need as many GPUs; change one of them",  # OpenRLHF asserts it when Ray has started
         lambda s, a: a.train.colocate_all and not a.train.async_enable and a.actor.num_nodes
         * a.actor.num_gpus_per_node != a.vllm.num_engines * a.vllm.tensor_parallel_size),
    Rule(f"{_LORA} estimator", "vLLM does not know OpenRLHF's names of adapters; use --estimator point",
         lambda s, a: a.ds.lora.rank and s.estimator == NO_ESTIMATOR),
    Rule(f"{_LORA} ds.tensor_parallel_size", "adapters are not split over GPUs; leave one out",
         lambda s, a: a.ds.lora.rank and a.ds.tensor_parallel_size > 1),
    Rule(f"{_LORA} ds.load_in_4bit", "adapters are merged into whole weights for vLLM; leave one out"),
    Rule(f"{_LORA} vllm.sync_with_ray", "only a policy that sends its weights merges adapters; leave one out"),
    Rule(f"{_LORA} train.enable_ema", "the averaged model has no adapters; leave one out"),
    Rule(f"{_REPLAY} train.dynamic_batch_enable", "replay makes the micro-batches itself; leave one out"),
    Rule(f"{_REPLAY} algo.advantage.is_correction_level", "no log-probs of vLLM are kept; leave one out",
         lambda s, a: a.replay.samples and a.algo.advantage.is_correction_level != "off"),
    Rule(f"{_REPLAY} algo.kl.use_loss", "no log-probs of the reference model are kept; leave one out"),
    Rule(f"{_REPLAY} data.max_images_per_prompt", "no images are kept; leave one out"),
    Rule(f"replay.cache {_REPLAY}", "nothing is replayed; give --replay.samples, or leave it out",
         lambda s, a: s.given("replay.cache") and not a.replay.samples),
    Rule(f"{_SUMS} actor.policy_loss_type", "it sums over tokens; leave one out",
         lambda s, a: a.actor.loss_agg_mode == CONSTANT_LENGTH and a.actor.policy_loss_type != "ppo"),
)  # fmt: skip

_WITHOUT_ESTIMATOR = (
    *(Rule(f"{flag} estimator", _OURS) for flag in (
        "train.max_rollouts", "eval.benchmarks", "probe.fraction", "warm_start", "data.pass_rate_key", "data.group_key",
        _REPLAY, "train.thin", "train.vllm_log_probs", "data.chat_template_kwargs",
    )),
    # OpenRLHF has dynamic filtering of its own, which its switch then asks for.
    Rule("rollout.strategy estimator", _OURS,
         lambda s, a: a.rollout.strategy != ("dynamic" if a.algo.dynamic_filtering_enable else "plain")),
    Rule(f"{_SUMS} estimator", _OURS, lambda s, a: a.actor.loss_agg_mode == CONSTANT_LENGTH),
    Rule(f"{_FORM} estimator", _OURS, lambda s, a: s.values[_FORM] not in upstream.choices(_FORM)),
    Rule("train.max_lag estimator", _OURS, lambda s, a: a.train.max_lag is not None),
    Rule("eval.top_p estimator", _OURS, lambda s, a: a.eval.top_p != a.rollout.top_p),
)  # fmt: skip

_WITH_ESTIMATOR = (
    Rule(f"estimator {_GROUP}", "it needs {s.built_estimator.min_rollouts} or more; or use auto, which has a history",
         lambda s, a: a.rollout.n_samples_per_prompt < s.built_estimator.min_rollouts),
    Rule(_FORM, "it has no place for an estimator; use {forms}, or --estimator none",
         lambda s, a: s.values[_FORM] not in FORMS.available()),
    Rule(f"train.thin {_FORM}", "whitening moves every advantage away from 0; leave one out",
         lambda s, a: a.train.thin and FORMS.get(s.values[_FORM]).whitened),
    Rule(f"{_REPLAY} {_FORM}", "replayed rows are not whitened; leave one out",
         lambda s, a: a.replay.samples and FORMS.get(s.values[_FORM]).whitened),
    Rule("train.vllm_log_probs algo.kl.init_coef", "the KL term takes the policy's log-probs; leave one out",
         lambda s, a: a.train.vllm_log_probs and a.algo.kl.init_coef > 0),
    Rule("train.vllm_log_probs algo.advantage.is_correction_level",
         "the correction compares vLLM's log-probs with the policy's; leave one out",
         lambda s, a: a.train.vllm_log_probs and a.algo.advantage.is_correction_level != "off"),
    Rule(f"{_FORM} estimator", "the form scores a rollout by the mean without it, which this estimator cannot tell "
         "(its group_weight is None); use dr_grpo, or --estimator dbb",
         lambda s, a: FORMS.get(s.values[_FORM]).leave_one_out and not s.built_estimator.can_leave_one_out()),
    Rule(f"rollout.strategy {_GROUP}", "it looks for groups with different rewards; give {s.strategy.min_rollouts} or "
         "more", lambda s, a: a.rollout.n_samples_per_prompt < s.strategy.min_rollouts),
    Rule("rollout.strategy algo.dynamic_filtering_enable", "the switch asks for another strategy; give one of them",
         lambda s, a: a.algo.dynamic_filtering_enable and not s.strategy.reads_score_range),
    Rule("rollout.strategy", "it draws prompts by a forecast, and {s.built_estimator.belief.name} makes none; use "
         "--estimator point with --point.memory auto, or --estimator auto or dbb",
         lambda s, a: s.strategy.draws and not s.built_estimator.belief.can_predict()),
    Rule(_REWARD, "missing; give math_answer, exact_match, reasoning_gym, a FILE.py of yours, or a server's "
         f"http://...; or --preset none and --{_REWARD_MODEL}",
         lambda s, a: not (a.reward.model_name_or_path or a.reward.remote_url)),
    Rule(f"{_REWARD_MODEL} {_REWARD}", "the model is not asked; give one, the model with --preset none"),
    Rule(f"{_REWARD_MODEL} estimator", "a model gives any real number, this estimator or its memory takes "
         "scores of 0 to 1 only; use gaussian, or point with --point.memory gaussian",
         lambda s, a: a.reward.model_name_or_path
         and not s.built_estimator.support == s.built_estimator.belief.support == "real"),
    Rule(f"{_REWARD_MODEL} probe.fraction rollout.strategy", f"these need rewards at generation: give --{_REWARD}",
         lambda s, a: a.reward.model_name_or_path and (s.strategy.needs_scores or a.probe.fraction)),
    Rule("eval.steps", _NEVER, lambda s, a: a.eval.steps < 1 and a.eval.steps != -1),
    Rule("ckpt.save_steps", _NEVER, lambda s, a: a.ckpt.save_steps < 1 and a.ckpt.save_steps != -1),
    # Otherwise the rollouts of a group are equal.
    Rule("rollout.temperature", "too low; give more than 0", lambda s, a: a.rollout.temperature <= 0),
    Rule("rollout.vllm_generate_batch_size rollout.batch_size", "steps would be short of rollouts; give as many",
         lambda s, a: a.rollout.vllm_generate_batch_size < a.rollout.batch_size),
    Rule(f"train.max_rollouts {_STEP}", "less than one step; give more",
         lambda s, a: a.train.max_rollouts is not None and a.train.max_rollouts < _rollouts(a)),
    Rule(f"{_STEP} train.batch_size", f"a step's rollouts are no multiple of a batch, {_VANISH}",
         lambda s, a: _rollouts(a) % a.train.batch_size),
    Rule(f"train.batch_size train.micro_batch_size {_POLICYS_GPUS}",
         f"a batch is no multiple of the micro-batches of all ranks, {_VANISH}",
         lambda s, a: a.train.batch_size % _of_all_ranks(a, a.train)),
    Rule(f"{_STEP} rollout.micro_batch_size {_POLICYS_GPUS}",
         f"a step's rollouts are no multiple of the micro-batches of all ranks, {_VANISH}",
         lambda s, a: not a.train.dynamic_batch_enable and _rollouts(a) % _of_all_ranks(a, a.rollout)),
)  # fmt: skip


def check(settings: Settings) -> None:
    """Raise UsageError for the first thing that is refused."""
    ray_start.check_socket_path()
    if line := next(_refusals(settings), None):
        raise UsageError(line)


def _refusals(settings: Settings) -> Iterator[str]:
    args, values = settings.args, settings.values
    if not cpu.active():
        yield from cuda.refusals(args, machine.look().gpus)
    elif settings.preset_read.needs_cuda:
        yield f"--preset {settings.preset} needs CUDA, and there is none here; use --preset tiny"
    else:
        yield from cpu.refusals(args)
    for rule in (*_ANY, *(_WITHOUT_ESTIMATOR if settings.estimator == NO_ESTIMATOR else _WITH_ESTIMATOR)):
        flags = rule.flags.split()
        if rule.refused(settings, args) if rule.refused else all(values[flag] for flag in flags):
            why = rule.why.format(s=settings, forms=", ".join(FORMS.available()))
            yield f"{' with '.join(_named(flag, values[flag]) for flag in flags)}: {why}"
    known, read = {*estimators.available(), *strategies.available()}, {settings.strategy.name}
    if settings.estimator != NO_ESTIMATOR:
        read.add(estimators.get(settings.estimator).name)
    for flag in filter(settings.given, values):
        if flag.partition(".")[0] in known - read:
            yield f"--{flag} is not read by this run's {' and '.join(sorted(read))}; leave it out"
    if not cpu.active() and machine.ray_cluster() is None:  # those of other hosts are counted when Ray has started
        yield from too_few_gpus(args, len(machine.look().gpus))
    places = {flag: values[flag] for flag in OUTPUTS} | {"store.url": parse_url(args.store.url).path}
    for flag, place in places.items():
        if "/_ray_pkg_" in (place or ""):  # `ray job submit` copies the working folder, and deletes the copy
            yield (
                f"--{flag} {place} is in Ray's temporary copy of the working directory; give an absolute path on a "
                "shared file system"
            )


def _named(flag: str, value: Any) -> str:
    text = ",".join(value) if isinstance(value, list) else value
    return f"--{flag}" if text is True or text in (None, "") else f"--{flag} {shown(text, 300)}"


def _rollouts(args: SimpleNamespace) -> int:
    return int(args.rollout.batch_size * args.rollout.n_samples_per_prompt)


def _of_all_ranks(args: SimpleNamespace, part: SimpleNamespace) -> int:
    """Return the rows of a micro-batch on every rank; dynamic batches have at least one each."""
    ds, ranks = args.ds, args.actor.num_nodes * args.actor.num_gpus_per_node
    rows = 1 if args.train.dynamic_batch_enable else part.micro_batch_size
    return int(ranks // ds.ring_attn_size // ds.tensor_parallel_size * rows)


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
    train, critic, parts = args.train, bool(args.critic.model_name_or_path), [args.actor]
    for part, apart in (
        (args.ref, args.algo.kl.init_coef > 0 and not train.colocate_actor_ref),
        (args.critic, critic),
        (args.reward, not args.reward.remote_url and not (critic and train.colocate_critic_reward)),
    ):
        parts += [part] if apart and not train.colocate_all else []
    needed = sum(part.num_nodes * part.num_gpus_per_node for part in parts)
    if train.async_enable or not train.colocate_all:
        needed += (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    return int(needed)
