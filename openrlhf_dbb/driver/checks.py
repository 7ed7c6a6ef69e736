"""What the arguments alone tell: values and combinations that cannot work, each refused with the reason.

What a single estimator or rollout strategy allows is checked in its own file, when the command line is parsed.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import estimators
from estimators import FORMS
from openrlhf_dbb import cpu, upstream
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.methods import CONSTANT_LENGTH


def check(settings: Settings) -> None:
    """Refuse what cannot work.

    Raises:
        UsageError: naming the flags, the values, and what to do.
    """
    args = settings.args
    if settings.on_cpu:
        cpu.check_flags(args)
    _check_start(settings)
    _check_probes(settings)
    if settings.estimator == NO_ESTIMATOR:
        _check_openrlhf_alone(settings)
        return
    _check_strategy(settings)
    if args.replay.samples:
        _check_replay(settings)
    if args.actor.loss_agg_mode == CONSTANT_LENGTH:
        _check_constant_length(args)
    _check_estimator(settings)
    _check_models(args)
    _check_rollouts(args)
    _check_batches(args)
    _check_checkpoints(args)


def _check_start(settings: Settings) -> None:
    for flag, value in (
        ("actor.model_name_or_path", settings.args.actor.model_name_or_path),
        ("data.prompt_dataset", settings.args.data.prompt_dataset),
    ):
        if not value:
            raise UsageError(f"--{flag} is missing; name one, or leave out --preset none to start from a preset")
    if not re.fullmatch(r"[\w.+-]+", settings.run_name):
        raise UsageError(f"--run_name {settings.run_name!r}: use letters, digits and . _ + - only (it names folders)")
    if settings.resume is not None and settings.warm_start is not None:
        raise UsageError("--resume continues a run, --warm_start begins a new one; give one of them")
    if not 0 < settings.warm_start_weight <= 1:
        raise UsageError(f"--warm_start_weight {settings.warm_start_weight} is not in (0, 1]")


def _check_probes(settings: Settings) -> None:
    args = settings.args
    fraction, samples = args.probe.fraction, args.probe.samples
    if not 0 <= fraction <= 1:
        raise UsageError(f"--probe.fraction {fraction} is not in [0, 1]; 0.1 probes a tenth of the prompts")
    if samples < 2:
        raise UsageError(f"--probe.samples {samples} is below 2: the noise of a single response is unknown")
    if fraction and settings.estimator == NO_ESTIMATOR:
        raise UsageError(f"--probe.fraction {fraction} measures an estimator; --estimator is {NO_ESTIMATOR}, name one")
    if fraction and not _rewards_at_generation(args):
        raise UsageError("--probe.fraction needs rewards at generation; give --reward.remote_url")


def _rewards_at_generation(args: SimpleNamespace) -> bool:
    return bool(args.reward.remote_url or args.train.agent_func_path)


def _check_openrlhf_alone(settings: Settings) -> None:
    args = settings.args
    # OpenRLHF has dynamic filtering of its own, which its switch then asks for.
    known = "dynamic" if args.algo.dynamic_filtering_enable else "plain"
    for flag, used in (
        (f"--rollout.strategy {args.rollout.strategy}", args.rollout.strategy != known),
        (f"--replay.samples {args.replay.samples}", args.replay.samples),
        (f"--actor.loss_agg_mode {CONSTANT_LENGTH}", args.actor.loss_agg_mode == CONSTANT_LENGTH),
        (f"--train.max_rollouts {args.train.max_rollouts}", args.train.max_rollouts is not None),
    ):
        if used:
            raise UsageError(
                f"{flag} is not OpenRLHF's, which --estimator {NO_ESTIMATOR} leaves as it is; "
                "use --estimator point, its group mean"
            )
    if settings.warm_start is not None:
        raise UsageError(f"--warm_start needs an estimator with a history; --estimator is {NO_ESTIMATOR}")


def _check_strategy(settings: Settings) -> None:
    args, strategy, facts = settings.args, settings.strategy, settings.facts
    name = args.rollout.strategy
    if facts.rollouts < strategy.min_rollouts:
        raise UsageError(
            f"--rollout.strategy {name} looks for groups with different rewards; a group of "
            f"--rollout.n_samples_per_prompt {facts.rollouts} never has them"
        )
    if strategy.needs_scores and not _rewards_at_generation(args):
        raise UsageError(f"--rollout.strategy {name} needs rewards at generation; give --reward.remote_url")
    if facts.score_range is not None and not strategy.reads_score_range:
        raise UsageError(f"--algo.dynamic_filtering_enable asks for another --rollout.strategy than {name}; give one")


def _check_replay(settings: Settings) -> None:
    args, replay = settings.args, settings.args.replay
    for name in ("samples", "cache", "min_cache"):
        value = getattr(replay, name)
        if value < 1:
            raise UsageError(f"--replay.{name} {value} is below 1")
    if max(replay.samples, replay.min_cache) > replay.cache:
        raise UsageError(
            f"--replay.samples {replay.samples} and --replay.min_cache {replay.min_cache} cannot exceed "
            f"--replay.cache {replay.cache}, the rollouts that are kept of a prompt"
        )
    if not 0 < replay.coef < math.inf:
        raise UsageError(f"--replay.coef {replay.coef:g} is not above 0; --replay.samples 0 turns replay off")
    if replay.normalization == "mixed" and settings.estimator != "point":
        raise UsageError(
            f"--replay.normalization mixed takes mean and deviation from new and replayed rewards together, where "
            f"--estimator {settings.estimator} has its own; use split, or --estimator point"
        )
    if replay.normalizer == "formula" and args.actor.loss_agg_mode == "token-mean":
        raise UsageError(
            "--replay.normalizer formula weighs rollouts, --actor.loss_agg_mode token-mean weighs tokens; "
            "use seq-mean-token-mean, or --replay.normalizer code"
        )
    for flag, used, why in (
        ("train.dynamic_batch_enable", args.train.dynamic_batch_enable, "it makes the micro-batches itself"),
        (
            "algo.advantage.is_correction_level",
            args.algo.advantage.is_correction_level != "off",
            "no log-probs of vLLM are kept",
        ),
        ("algo.kl.use_loss", args.algo.kl.use_loss, "no log-probs of the reference model are kept"),
        ("data.max_images_per_prompt", args.data.max_images_per_prompt, "no images are kept"),
    ):
        if used:
            raise UsageError(f"--{flag} does not go with --replay.samples {replay.samples}: {why}; leave one out")


def _check_constant_length(args: SimpleNamespace) -> None:
    mode, length = args.actor.loss_agg_mode, args.actor.loss_agg_length
    if length is None or length < 1:
        raise UsageError(
            f"--actor.loss_agg_mode {mode} divides by a length; give --actor.loss_agg_length or "
            "--rollout.max_new_tokens"
        )
    if args.actor.policy_loss_type != "ppo":
        raise UsageError(
            f"--actor.loss_agg_mode {mode} sums over tokens, --actor.policy_loss_type {args.actor.policy_loss_type} "
            "has one ratio a sequence; use ppo"
        )


def _check_estimator(settings: Settings) -> None:
    args = settings.args
    if args.train.async_enable:
        raise UsageError("--train.async_enable is not supported with --estimator yet; leave it out")
    form = args.algo.advantage.estimator
    if form not in FORMS:
        raise UsageError(
            f"--algo.advantage.estimator {form} cannot be used with --estimator {settings.estimator}; "
            f"use {' or '.join(FORMS)}, or --estimator {NO_ESTIMATOR} for OpenRLHF's own advantages"
        )
    estimator = estimators.build(settings.estimator, **settings.parameters)
    group, fewest = args.rollout.n_samples_per_prompt, estimator.min_rollouts
    if group < fewest:
        raise UsageError(
            f"--estimator {settings.estimator} needs --rollout.n_samples_per_prompt {fewest} or more, "
            f"got {group}: one rollout alone has no deviation from its mean"
        )
    if settings.warm_start is not None and not estimator.state_fields + estimator.shared_fields:
        raise UsageError(f"--warm_start: --estimator {settings.estimator} keeps no history that it could start from")


def _check_models(args: SimpleNamespace) -> None:
    if args.critic.model_name_or_path:
        raise UsageError(
            f"--critic.model_name_or_path {args.critic.model_name_or_path}: an estimator takes the critic's place; "
            f"leave it out, or train with --estimator {NO_ESTIMATOR}"
        )
    if args.ds.lora.rank > 0:
        raise UsageError(
            f"--ds.lora.rank {args.ds.lora.rank}: OpenRLHF's weight sync sends adapters under names that vLLM does not "
            "know; train all weights, leave it out"
        )


def _check_rollouts(args: SimpleNamespace) -> None:
    if not args.vllm.num_engines:
        raise UsageError("--vllm.num_engines is missing; name the number of engines that generate the rollouts")
    shortest, longest = args.rollout.min_new_tokens, args.rollout.max_new_tokens
    if not 0 <= shortest <= (shortest if longest is None else longest):
        raise UsageError(f"--rollout.min_new_tokens {shortest} is out of range; give 0 to --rollout.max_new_tokens")
    step = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if args.train.max_rollouts is not None and args.train.max_rollouts < step:
        raise UsageError(
            f"--train.max_rollouts {args.train.max_rollouts} is less than one step: --rollout.batch_size "
            f"{args.rollout.batch_size} x {args.rollout.n_samples_per_prompt} = {step} rollouts; raise it"
        )


def _check_batches(args: SimpleNamespace) -> None:
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if rollouts % args.train.batch_size:
        raise UsageError(
            f"a rollout batch of {args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} samples = "
            f"{rollouts} is not a multiple of --train.batch_size {args.train.batch_size} (samples); "
            "left-over rollouts would vanish"
        )
    ranks = upstream.data_parallel_ranks(args)
    if args.train.batch_size % (args.train.micro_batch_size * ranks):
        raise UsageError(
            f"--train.batch_size {args.train.batch_size} is not a multiple of --train.micro_batch_size "
            f"{args.train.micro_batch_size} x {ranks} ranks"
        )
    if not args.train.dynamic_batch_enable and rollouts % (args.rollout.micro_batch_size * ranks):
        raise UsageError(
            f"{rollouts} rollouts a step are not a multiple of --rollout.micro_batch_size "
            f"{args.rollout.micro_batch_size} x {ranks} ranks, so that ranks would get unequal shares"
        )


def _check_checkpoints(args: SimpleNamespace) -> None:
    if args.ckpt.best_metric_key not in ("", "none") and not (args.eval.dataset and args.eval.steps > 0):
        raise UsageError(
            f"--ckpt.best_metric_key {args.ckpt.best_metric_key} needs evaluations; give --eval.dataset and "
            "--eval.steps, or leave it out"
        )
    if args.ckpt.max_num < 2:
        raise UsageError(
            f"--ckpt.max_num {args.ckpt.max_num}: the old checkpoint is deleted before the new one is whole; "
            "use 2 or more"
        )
