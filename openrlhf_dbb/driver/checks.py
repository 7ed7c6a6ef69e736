"""Refuses arguments that would train wrongly in silence, or fail after an expensive start.

OpenRLHF's own checks have passed. The range of an estimator's or a strategy's parameter stands beside the parameter.
"""

import re
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

from openrlhf_dbb import estimators, presets, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import FORMS, RewardEstimator
from openrlhf_dbb.methods import CONSTANT_LENGTH
from openrlhf_dbb.platform import cpu, cuda
from openrlhf_dbb.presets.made import cache

_FORM = "algo.advantage.estimator"
_LONGEST_NAME = 200  # bytes; a file's name may have 255, and trackers add to it


def check(settings: Settings) -> None:
    """Raise UsageError for arguments that cannot work; the message names the flags, the values, and what to do."""
    args = settings.args
    if not settings.on_cpu:
        cuda.check_flags(args, settings.machine.gpus)
    elif presets.load(settings.preset).needs_cuda:
        raise UsageError(f"--preset {settings.preset} needs CUDA, and there is none here; use --preset tiny")
    else:
        cpu.check_flags(args)
    _check_run(settings)
    _check_placement(args)
    _check_pairs(args)
    if settings.estimator == NO_ESTIMATOR:
        _check_openrlhf_alone(args)
        return
    estimator = estimators.build(settings.estimator, **settings.parameters)
    _check_estimator(settings, estimator)
    _check_form(settings, estimator)
    _check_strategy(settings, estimator)
    _check_reward(settings, estimator)
    _check_numbers(args)
    _check_batches(args)
    if settings.given("data.input_template") and args.data.input_template is None:  # OpenRLHF has emptied the value
        raise UsageError("--data.input_template has no {} where the prompt goes; put it in")


def _check_run(settings: Settings) -> None:
    args = settings.args
    for flag in ("actor.model_name_or_path", "data.prompt_dataset"):
        if not attrgetter(flag)(args):
            raise UsageError(f"--{flag} is missing; name one, or leave out --preset none to start from a preset")
    model = args.actor.model_name_or_path
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and not model.startswith(str(cache(""))) and not Path(model).is_dir():
        raise UsageError(f"--actor.model_name_or_path {model}: there is no such folder")
    known, read = {*estimators.available(), *strategies.available()}, {settings.strategy.name}
    if settings.estimator != NO_ESTIMATOR:
        read.add(estimators.get(settings.estimator).name)
    for flag in filter(settings.given, settings.values):
        if flag.partition(".")[0] in known - read:
            raise UsageError(f"--{flag} is not read by this run's {' and '.join(sorted(read))}; leave it out")
    name = settings.run_name
    if not re.fullmatch(r"(?!\.+$)[\w.+][\w.+-]*", name) or len(name.encode(errors="replace")) > _LONGEST_NAME:
        raise UsageError(
            f"--run_name {name!r:.300} names folders: use letters, digits and . _ + - only, not only dots, no - at the "
            f"start, and at most {_LONGEST_NAME} bytes"
        )
    if args.resume is not None and args.warm_start is not None:
        raise UsageError("--resume continues a run, --warm_start begins a new one; give one of them")
    if args.data.pass_rate_key is not None and args.warm_start is not None:
        raise UsageError("--data.pass_rate_key and --warm_start both say what a run begins with; give one of them")
    if args.data.pass_rate_attempts is not None and args.data.pass_rate_key is None:
        raise UsageError(
            "--data.pass_rate_attempts is of the rates in --data.pass_rate_key; give both, or leave it out"
        )
    if args.ckpt.save_adapter and not args.ds.lora.rank:
        raise UsageError("--ckpt.save_adapter needs adapters; give --ds.lora.rank, or leave it out")
    for flag, used, why in (
        ("ckpt.max_num", args.ckpt.max_num < 2, "OpenRLHF deletes an old checkpoint before the new one is whole"),
        ("ds.use_universal_ckpt", args.ds.use_universal_ckpt, "a run resumes from its own checkpoints only"),
    ):
        if used:
            raise UsageError(f"--{flag} {attrgetter(flag)(args)} does not work: {why}; leave it out")


def _check_placement(args: SimpleNamespace) -> None:
    """OpenRLHF asserts this only when Ray has started."""
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines, parallel = args.vllm.num_engines, args.vllm.tensor_parallel_size
    if not engines:
        raise UsageError("--vllm.num_engines is missing; name the number of engines that generate the rollouts")
    if args.train.colocate_all and not args.train.async_enable and ranks != engines * parallel:
        raise UsageError(
            f"--train.colocate_all: the policy has {ranks} GPUs (--actor.num_nodes x --actor.num_gpus_per_node), vLLM "
            f"{engines} x {parallel} (--vllm.num_engines x --vllm.tensor_parallel_size); give both as many"
        )


def _check_pairs(args: SimpleNamespace) -> None:
    """Refuse flags that do not work together."""
    lora, replays, form = "ds.lora.rank", "replay.samples", attrgetter(_FORM)(args)
    alone, corrects = args.estimator == NO_ESTIMATOR, args.algo.advantage.is_correction_level != "off"
    sums_tokens = args.actor.loss_agg_mode == CONSTANT_LENGTH
    whitened = form in FORMS.available() and FORMS.get(form).whitened
    for first, second, second_is_used, why in (
        (lora, "estimator", alone, "vLLM does not know OpenRLHF's names of adapters; --estimator point sends others"),
        (lora, "ds.tensor_parallel_size", args.ds.tensor_parallel_size > 1, "adapters are not split over GPUs"),
        (lora, "ds.load_in_4bit", args.ds.load_in_4bit, "adapters are merged into whole weights for vLLM"),
        (lora, "vllm.sync_with_ray", args.vllm.sync_with_ray, "only a policy that sends its weights merges adapters"),
        (lora, "train.enable_ema", args.train.enable_ema, "the averaged model has no adapters"),
        (replays, "train.dynamic_batch_enable", args.train.dynamic_batch_enable, "it makes the micro-batches itself"),
        (replays, "algo.advantage.is_correction_level", corrects, "no log-probs of vLLM are kept"),
        (replays, "algo.kl.use_loss", args.algo.kl.use_loss, "no log-probs of the reference model are kept"),
        (replays, "data.max_images_per_prompt", args.data.max_images_per_prompt, "no images are kept"),
        (replays, _FORM, whitened, "replays are not whitened"),
        ("actor.loss_agg_mode", "actor.policy_loss_type", args.actor.policy_loss_type != "ppo", "it sums over tokens"),
    ):
        first_is_used = sums_tokens if first == "actor.loss_agg_mode" else attrgetter(first)(args)
        if first_is_used and second_is_used:
            one, other = (f"--{flag} {attrgetter(flag)(args)}" for flag in (first, second))
            raise UsageError(f"{one} does not go with {other}: {why}; leave one out")
    if args.replay.samples > args.replay.cache:
        raise UsageError(f"--replay.samples {args.replay.samples} exceeds --replay.cache {args.replay.cache}; lower it")


def _check_openrlhf_alone(args: SimpleNamespace) -> None:
    # OpenRLHF has dynamic filtering of its own, which its switch then asks for.
    strategy = "dynamic" if args.algo.dynamic_filtering_enable else "plain"
    for flag, used in (
        ("rollout.strategy", args.rollout.strategy != strategy),
        ("replay.samples", args.replay.samples),
        ("actor.loss_agg_mode", args.actor.loss_agg_mode == CONSTANT_LENGTH),
        (_FORM, attrgetter(_FORM)(args) not in upstream.choices(_FORM)),
        ("train.max_rollouts", args.train.max_rollouts),
        ("train.max_lag", args.train.max_lag is not None),
        ("eval.benchmarks", args.eval.benchmarks),
        ("eval.top_p", args.eval.top_p != args.rollout.top_p),
        ("probe.fraction", args.probe.fraction),
        ("warm_start", args.warm_start),
        ("data.pass_rate_key", args.data.pass_rate_key),
        ("data.group_key", args.data.group_key),
    ):
        if used:
            raise UsageError(
                f"--{flag} {attrgetter(flag)(args)} is not OpenRLHF's, which --estimator {NO_ESTIMATOR} leaves as it "
                "is; use --estimator point, its group mean"
            )


def _check_estimator(settings: Settings, estimator: RewardEstimator) -> None:
    args, name = settings.args, settings.estimator
    group, fewest = args.rollout.n_samples_per_prompt, estimator.min_rollouts
    if group < fewest:
        raise UsageError(
            f"--estimator {name} needs --rollout.n_samples_per_prompt {fewest} or more, got {group}; give as many, or "
            "--estimator auto, which has a mean from earlier visits"
        )
    if estimator.reads_drift and args.data.max_images_per_prompt:
        raise UsageError(
            f"--estimator {name} takes log-probs of earlier rollouts, and no images are kept; leave out "
            "--data.max_images_per_prompt, or use --estimator auto"
        )


def _check_form(settings: Settings, estimator: RewardEstimator) -> None:
    name = attrgetter(_FORM)(settings.args)
    if name not in FORMS.available():
        raise UsageError(
            f"--{_FORM} {name} has no place for an estimator; use {', '.join(FORMS.available())}, or --estimator "
            f"{NO_ESTIMATOR} for OpenRLHF's own advantages"
        )
    if FORMS.get(name).leave_one_out and not estimator.can_leave_one_out():
        raise UsageError(
            f"--{_FORM} {name} scores a rollout by the mean without it, which --estimator {settings.estimator} cannot "
            "tell (its group_weight is None); use dr_grpo, or --estimator dbb"
        )


def _check_strategy(settings: Settings, estimator: RewardEstimator) -> None:
    args, strategy, facts = settings.args, settings.strategy, strategies.facts(settings.args)
    name = args.rollout.strategy
    if facts.rollouts < strategy.min_rollouts:
        raise UsageError(
            f"--rollout.strategy {name} looks for groups with different rewards, and a group of {facts.rollouts} never "
            f"has them; give --rollout.n_samples_per_prompt {strategy.min_rollouts} or more"
        )
    if facts.score_range is not None and not strategy.reads_score_range:
        raise UsageError(f"--algo.dynamic_filtering_enable asks for another --rollout.strategy than {name}; give one")
    if strategy.draws and not estimator.belief.can_predict():
        raise UsageError(
            f"--rollout.strategy {name} draws prompts by a forecast, and {estimator.belief.name} makes none; "
            "use --estimator point with --point.memory auto, or --estimator auto or dbb"
        )


def _check_reward(settings: Settings, estimator: RewardEstimator) -> None:
    args = settings.args
    model, url = args.reward.model_name_or_path, args.reward.remote_url
    if not (model or url):
        raise UsageError(
            "--reward.remote_url is missing; give math_answer, exact_match, reasoning_gym, a FILE.py of yours, or a "
            "server's http://...; or --preset none and --reward.model_name_or_path"
        )
    if model and url:
        raise UsageError(
            f"--reward.model_name_or_path {model} is not asked where --reward.remote_url {','.join(url)} gives the "
            "rewards; give one of them, the model without a preset that has the other (--preset none)"
        )
    if model and estimator.support != "real":
        raise UsageError(
            f"--reward.model_name_or_path {model} gives any real number, --estimator {settings.estimator} takes scores "
            "of 0 to 1 only; use --estimator gaussian or point"
        )
    if model and (settings.strategy.needs_scores or args.probe.fraction):
        raise UsageError("--probe.fraction and this --rollout.strategy need rewards at generation: --reward.remote_url")


def _check_numbers(args: SimpleNamespace) -> None:
    for flag, allowed in (
        ("eval.steps", "1 or more, or -1 for never"),
        ("ckpt.save_steps", "1 or more, or -1 for never"),
        ("logger.logging_steps", "1 or more"),
        ("train.async_queue_size", "1 or more"),  # Python takes 0 as a queue without an end
        ("rollout.temperature", "more than 0"),  # otherwise the rollouts of a group are equal
    ):
        value = attrgetter(flag)(args)
        if value <= 0 and not (value == -1 and "never" in allowed):
            raise UsageError(f"--{flag} {value:g} is too low; give {allowed}")


def _check_batches(args: SimpleNamespace) -> None:
    prompts, at_a_time = args.rollout.batch_size, args.rollout.vllm_generate_batch_size
    if at_a_time < prompts:
        raise UsageError(
            f"--rollout.vllm_generate_batch_size {at_a_time} is less than --rollout.batch_size {prompts}: steps would "
            "be short of rollouts; give as many or more, or leave it out"
        )
    rollouts, ranks = prompts * args.rollout.n_samples_per_prompt, upstream.data_parallel_ranks(args)
    if args.train.max_rollouts is not None and args.train.max_rollouts < rollouts:
        raise UsageError(f"--train.max_rollouts {args.train.max_rollouts} is less than one step: {rollouts} rollouts")
    step, batch = "--rollout.batch_size x --rollout.n_samples_per_prompt", args.train.batch_size
    micro = 1 if args.train.dynamic_batch_enable else args.train.micro_batch_size
    for whole, value, part, divisor in (
        (step, rollouts, "--train.batch_size", batch),
        ("--train.batch_size", batch, "--train.micro_batch_size x ranks", micro * ranks),
        (step, rollouts, "--rollout.micro_batch_size x ranks", args.rollout.micro_batch_size * ranks),
    ):
        if value % divisor and not (args.train.dynamic_batch_enable and "--rollout.micro" in part):
            raise UsageError(
                f"{whole} = {value} is not a multiple of {part} = {divisor}, and left-over rollouts would vanish; "
                "change one of them"
            )
