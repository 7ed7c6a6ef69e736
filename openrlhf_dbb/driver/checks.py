"""Refuses settings that would train wrongly in silence, or fail after an expensive start, in one pass over rules.

A rule yields a line for each thing that it refuses: the flags, the values, what is allowed. OpenRLHF's own checks have
passed. The range of an estimator's or a strategy's parameter stands beside the parameter.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from openrlhf_dbb import estimators, presets, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.driver.arguments import OUTPUTS, Settings
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.methods import CONSTANT_LENGTH
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.presets.made import cache
from openrlhf_dbb.storage.url import choose_url

_FORM = "algo.advantage.estimator"
_AGGREGATION = "actor.loss_agg_mode"
_LONGEST_NAME = 200  # bytes; a file's name may have 255, and trackers add to it


def check(settings: Settings) -> None:
    """Raise UsageError for the first thing that a rule refuses."""
    for rule in (*RULES, *(RULES_WITHOUT_ESTIMATOR if settings.estimator == NO_ESTIMATOR else RULES_WITH_ESTIMATOR)):
        for refusal in rule(settings):
            raise UsageError(refusal)


def _platform(settings: Settings) -> Iterator[str]:
    if not cpu.active():
        yield from cuda.refusals(settings.args, machine.look().gpus)
    elif presets.load(settings.preset).needs_cuda:
        yield f"--preset {settings.preset} needs CUDA, and there is none here; use --preset tiny"
    else:
        yield from cpu.refusals(settings.args)


def _run(settings: Settings) -> Iterator[str]:
    args, values = settings.args, settings.values
    for flag in ("actor.model_name_or_path", "data.prompt_dataset"):
        if not values[flag]:
            yield f"--{flag} is missing; name one, or leave out --preset none to start from a preset"
    model = args.actor.model_name_or_path
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and not model.startswith(str(cache(""))) and not Path(model).is_dir():
        yield f"--actor.model_name_or_path {model}: there is no such folder"
    name = settings.run_name
    if not re.fullmatch(r"(?!\.+$)[\w.+][\w.+-]*", name) or len(name.encode(errors="replace")) > _LONGEST_NAME:
        yield (
            f"--run_name {name!r:.300} names folders: use letters, digits and . _ + - only, not only dots, no - at the "
            f"start, and at most {_LONGEST_NAME} bytes"
        )
    if args.resume is not None and args.warm_start is not None:
        yield "--resume continues a run, --warm_start begins a new one; give one of them"
    if args.data.pass_rate_key is not None and args.warm_start is not None:
        yield "--data.pass_rate_key and --warm_start both say what a run begins with; give one of them"
    if args.data.pass_rate_attempts is not None and args.data.pass_rate_key is None:
        yield "--data.pass_rate_attempts is of the rates in --data.pass_rate_key; give both, or leave it out"
    if args.ckpt.save_adapter and not args.ds.lora.rank:
        yield "--ckpt.save_adapter needs adapters; give --ds.lora.rank, or leave it out"
    for flag, used, why in (
        ("ckpt.max_num", args.ckpt.max_num < 2, "OpenRLHF deletes an old checkpoint before the new one is whole"),
        ("ds.use_universal_ckpt", args.ds.use_universal_ckpt, "a run resumes from its own checkpoints only"),
    ):
        if used:
            yield f"--{flag} {values[flag]} does not work: {why}; leave it out"
    known, read = {*estimators.available(), *strategies.available()}, {settings.strategy.name}
    if settings.estimator != NO_ESTIMATOR:
        read.add(estimators.get(settings.estimator).name)
    for flag in filter(settings.given, settings.values):
        if flag.partition(".")[0] in known - read:
            yield f"--{flag} is not read by this run's {' and '.join(sorted(read))}; leave it out"


def _placement(settings: Settings) -> Iterator[str]:
    """OpenRLHF asserts this only when Ray has started."""
    args = settings.args
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines, parallel = args.vllm.num_engines, args.vllm.tensor_parallel_size
    if not engines:
        yield "--vllm.num_engines is missing; name the number of engines that generate the rollouts"
    if args.train.colocate_all and not args.train.async_enable and ranks != engines * parallel:
        yield (
            f"--train.colocate_all: the policy has {ranks} GPUs (--actor.num_nodes x --actor.num_gpus_per_node), vLLM "
            f"{engines} x {parallel} (--vllm.num_engines x --vllm.tensor_parallel_size); give both as many"
        )


def _pairs(settings: Settings) -> Iterator[str]:
    args, values = settings.args, settings.values
    lora, replays, form = "ds.lora.rank", "replay.samples", values[_FORM]
    alone, corrects = args.estimator == NO_ESTIMATOR, args.algo.advantage.is_correction_level != "off"
    whitened = form in FORMS.available() and FORMS.get(form).whitened
    used = {lora: args.ds.lora.rank, replays: args.replay.samples}
    used[_AGGREGATION] = args.actor.loss_agg_mode == CONSTANT_LENGTH
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
        (_AGGREGATION, "actor.policy_loss_type", args.actor.policy_loss_type != "ppo", "it sums over tokens"),
    ):
        if used[first] and second_is_used:
            one, other = (f"--{flag} {values[flag]}" for flag in (first, second))
            yield f"{one} does not go with {other}: {why}; leave one out"
    if args.replay.samples > args.replay.cache:
        yield f"--replay.samples {args.replay.samples} exceeds --replay.cache {args.replay.cache}; lower it"


def _openrlhf_alone(settings: Settings) -> Iterator[str]:
    args, values = settings.args, settings.values
    # OpenRLHF has dynamic filtering of its own, which its switch then asks for.
    strategy = "dynamic" if args.algo.dynamic_filtering_enable else "plain"
    truthy = (
        "replay.samples", "train.max_rollouts", "eval.benchmarks", "probe.fraction", "warm_start",
        "data.pass_rate_key", "data.group_key",
    )  # fmt: skip
    for flag, used in (
        ("rollout.strategy", args.rollout.strategy != strategy),
        (_AGGREGATION, args.actor.loss_agg_mode == CONSTANT_LENGTH),
        (_FORM, values[_FORM] not in upstream.choices(_FORM)),
        ("train.max_lag", args.train.max_lag is not None),
        ("eval.top_p", args.eval.top_p != args.rollout.top_p),
        *((flag, values[flag]) for flag in truthy),
    ):
        if used:
            yield (
                f"--{flag} {values[flag]} is not OpenRLHF's, which --estimator {NO_ESTIMATOR} leaves as it is; use "
                "--estimator point, its group mean"
            )


def _estimator(settings: Settings) -> Iterator[str]:
    args, name, estimator = settings.args, settings.estimator, settings.built_estimator
    group, fewest = args.rollout.n_samples_per_prompt, estimator.min_rollouts
    if group < fewest:
        yield (
            f"--estimator {name} needs --rollout.n_samples_per_prompt {fewest} or more, got {group}; give as many, or "
            "--estimator auto, which has a mean from earlier visits"
        )
    if estimator.reads_drift and args.data.max_images_per_prompt:
        yield (
            f"--estimator {name} takes log-probs of earlier rollouts, and no images are kept; leave out "
            "--data.max_images_per_prompt, or use --estimator auto"
        )
    form = settings.values[_FORM]
    if form not in FORMS.available():
        yield (
            f"--{_FORM} {form} has no place for an estimator; use {', '.join(FORMS.available())}, or --estimator "
            f"{NO_ESTIMATOR} for OpenRLHF's own advantages"
        )
    if FORMS.get(form).leave_one_out and not estimator.can_leave_one_out():
        yield (
            f"--{_FORM} {form} scores a rollout by the mean without it, which --estimator {name} cannot "
            "tell (its group_weight is None); use dr_grpo, or --estimator dbb"
        )


def _strategy(settings: Settings) -> Iterator[str]:
    strategy, facts, belief = settings.strategy, strategies.facts(settings.args), settings.built_estimator.belief
    name = settings.args.rollout.strategy
    if facts.rollouts < strategy.min_rollouts:
        yield (
            f"--rollout.strategy {name} looks for groups with different rewards, and a group of {facts.rollouts} never "
            f"has them; give --rollout.n_samples_per_prompt {strategy.min_rollouts} or more"
        )
    if facts.score_range is not None and not strategy.reads_score_range:
        yield f"--algo.dynamic_filtering_enable asks for another --rollout.strategy than {name}; give one"
    if strategy.draws and not belief.can_predict():
        yield (
            f"--rollout.strategy {name} draws prompts by a forecast, and {belief.name} makes none; "
            "use --estimator point with --point.memory auto, or --estimator auto or dbb"
        )


def _reward(settings: Settings) -> Iterator[str]:
    args = settings.args
    model, url = args.reward.model_name_or_path, args.reward.remote_url
    if not (model or url):
        yield (
            "--reward.remote_url is missing; give math_answer, exact_match, reasoning_gym, a FILE.py of yours, or a "
            "server's http://...; or --preset none and --reward.model_name_or_path"
        )
    if model and url:
        yield (
            f"--reward.model_name_or_path {model} is not asked where --reward.remote_url {','.join(url)} gives the "
            "rewards; give one of them, the model without a preset that has the other (--preset none)"
        )
    if model and settings.built_estimator.support != "real":
        yield (
            f"--reward.model_name_or_path {model} gives any real number, --estimator {settings.estimator} takes scores "
            "of 0 to 1 only; use --estimator gaussian or point"
        )
    if model and (settings.strategy.needs_scores or args.probe.fraction):
        yield "--probe.fraction and this --rollout.strategy need rewards at generation: --reward.remote_url"


def _numbers(settings: Settings) -> Iterator[str]:
    for flag, allowed in (
        ("eval.steps", "1 or more, or -1 for never"),
        ("ckpt.save_steps", "1 or more, or -1 for never"),
        ("logger.logging_steps", "1 or more"),
        ("train.async_queue_size", "1 or more"),  # Python takes 0 as a queue without an end
        ("rollout.temperature", "more than 0"),  # otherwise the rollouts of a group are equal
    ):
        value = settings.values[flag]
        if value <= 0 and not (value == -1 and "never" in allowed):
            yield f"--{flag} {value:g} is too low; give {allowed}"
    if settings.given("data.input_template") and settings.args.data.input_template is None:  # OpenRLHF has emptied it
        yield "--data.input_template has no {} where the prompt goes; put it in"


def _batches(settings: Settings) -> Iterator[str]:
    args = settings.args
    prompts, at_a_time = args.rollout.batch_size, args.rollout.vllm_generate_batch_size
    if at_a_time < prompts:
        yield (
            f"--rollout.vllm_generate_batch_size {at_a_time} is less than --rollout.batch_size {prompts}: steps would "
            "be short of rollouts; give as many or more, or leave it out"
        )
    rollouts, ranks = prompts * args.rollout.n_samples_per_prompt, upstream.data_parallel_ranks(args)
    if args.train.max_rollouts is not None and args.train.max_rollouts < rollouts:
        yield f"--train.max_rollouts {args.train.max_rollouts} is less than one step: {rollouts} rollouts"
    step, batch = "--rollout.batch_size x --rollout.n_samples_per_prompt", args.train.batch_size
    dynamic = args.train.dynamic_batch_enable
    micro = 1 if dynamic else args.train.micro_batch_size
    for whole, value, part, divisor in (
        (step, rollouts, "--train.batch_size", batch),
        ("--train.batch_size", batch, "--train.micro_batch_size x ranks", micro * ranks),
        (step, rollouts, "--rollout.micro_batch_size x ranks", 1 if dynamic else args.rollout.micro_batch_size * ranks),
    ):
        if value % divisor:
            yield (
                f"{whole} = {value} is not a multiple of {part} = {divisor}, and left-over rollouts would vanish; "
                "change one of them"
            )


def _gpus(settings: Settings) -> Iterator[str]:
    """OpenRLHF would wait forever for GPUs. Those of other hosts are counted when Ray has started."""
    if not cpu.active() and machine.ray_cluster() is None:
        yield from too_few_gpus(settings.args, len(machine.look().gpus))


def too_few_gpus(args: SimpleNamespace, there: int) -> Iterator[str]:
    """Yield an error line if the flags need more GPUs than there are."""
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


def _places(settings: Settings) -> Iterator[str]:
    """``ray job submit`` copies the working folder, and deletes the copy."""
    places = {flag: settings.values[flag] for flag in OUTPUTS}
    url = choose_url(settings.args.store.url)
    if url.startswith("sqlite:///"):
        places["store.url"] = str(Path(url.removeprefix("sqlite:///")).absolute())
    for flag, place in places.items():
        if place and "/_ray_pkg_" in place:
            yield (
                f"--{flag} {place} is in Ray's temporary copy of the working directory; give an absolute path on a "
                "shared file system"
            )


RULES = (_platform, _run, _placement, _pairs, _gpus, _places)
RULES_WITHOUT_ESTIMATOR = (_openrlhf_alone,)
RULES_WITH_ESTIMATOR = (_estimator, _strategy, _reward, _numbers, _batches)
