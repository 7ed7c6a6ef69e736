"""What of a method's pieces cannot work, alone or together, told before anything starts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

from openrlhf_dbb.driver.flags import CONSTANT_LENGTH, NO_ESTIMATOR
from openrlhf_dbb.errors import UsageError

if TYPE_CHECKING:
    from openrlhf_dbb.driver.arguments import Settings

_REWARDS_AT_GENERATION = "needs rewards at generation; give --reward.remote_url"


def check(settings: Settings) -> None:
    """Refuse pieces that make no sense, each with the reason.

    Raises:
        UsageError: naming the flags.
    """
    args = settings.args
    if settings.estimator == NO_ESTIMATOR:
        _check_openrlhf_alone(settings)
        return
    strategy = args.rollout.strategy
    if strategy != "plain":
        if args.rollout.n_samples_per_prompt < 2:
            raise UsageError(
                f"--rollout.strategy {strategy} looks for groups with different rewards; a group of "
                f"--rollout.n_samples_per_prompt {args.rollout.n_samples_per_prompt} never has them"
            )
        if not (args.reward.remote_url or args.train.agent_func_path):
            raise UsageError(f"--rollout.strategy {strategy} {_REWARDS_AT_GENERATION}")
    if strategy == "dynamic":
        _check_whole("dynamic.multiple", args.dynamic.multiple, 1)
        _check_whole("dynamic.max_rounds", args.dynamic.max_rounds, 0)
    if strategy == "greso":
        _check_greso(args)
    if args.replay.samples:
        _check_replay(settings)
    if args.actor.loss_agg_mode == CONSTANT_LENGTH:
        _check_constant_length(args)
    if args.train.max_rollouts is not None:
        step = args.rollout.batch_size * args.rollout.n_samples_per_prompt
        if args.train.max_rollouts < step:
            raise UsageError(
                f"--train.max_rollouts {args.train.max_rollouts} is less than one step: --rollout.batch_size "
                f"{args.rollout.batch_size} x {args.rollout.n_samples_per_prompt} = {step} rollouts; raise it"
            )


def _check_openrlhf_alone(settings: Settings) -> None:
    args = settings.args
    # OpenRLHF has dynamic filtering of its own, which is then what its switch asks for.
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


def _check_greso(args: SimpleNamespace) -> None:
    greso = args.greso
    if args.algo.dynamic_filtering_enable:
        raise UsageError("--algo.dynamic_filtering_enable asks for another --rollout.strategy than greso; give one")
    _check_whole("greso.batch", greso.batch, 1)
    _check_whole("greso.min_batch", greso.min_batch, 1)
    for name in ("p_easy", "p_hard", "min_p", "max_p", "floor"):
        if not 0 < getattr(greso, name) <= 1:
            raise UsageError(f"--greso.{name} {getattr(greso, name):g} is not in (0, 1]")
    for name in ("target_easy", "target_hard", "step"):
        if not 0 < getattr(greso, name) < 1:
            raise UsageError(f"--greso.{name} {getattr(greso, name):g} is not in (0, 1)")
    if greso.min_p > greso.max_p:
        raise UsageError(f"--greso.min_p {greso.min_p:g} is above --greso.max_p {greso.max_p:g}")
    if not greso.safety >= 1:
        raise UsageError(f"--greso.safety {greso.safety:g} is below 1: rounds would ask for fewer prompts than needed")


def _check_replay(settings: Settings) -> None:
    args, replay = settings.args, settings.args.replay
    for name in ("samples", "cache", "min_cache"):
        _check_whole(f"replay.{name}", getattr(replay, name), 1)
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


def _check_whole(flag: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"--{flag} {value} is below {least}")
