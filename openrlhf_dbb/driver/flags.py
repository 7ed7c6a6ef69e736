"""The parser: OpenRLHF's own, with our flags and those of every estimator beside its."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import estimators
from openrlhf_dbb import methods, presets, upstream
from openrlhf_dbb.core.replay.normalization import NORMALIZERS
from openrlhf_dbb.core.replay.selection import SELECTIONS
from openrlhf_dbb.errors import UsageError

NO_ESTIMATOR = "none"

STRATEGIES = ("plain", "dynamic", "greso")
REFILLS = ("one_for_one", "batches")
NORMALIZATIONS = ("split", "mixed")

_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_OURS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--run_name", {}, "name of a new run; default: estimator, preset or model, and the time"),
    (
        "--resume",
        {"nargs": "?", "const": "", "metavar": "RUN"},
        "continue a run from its last checkpoint; without a name the newest unfinished one",
    ),
    (
        "--warm_start",
        {"metavar": "RUN"},
        "start a new run from the final posteriors of another one (name, uuid or number)",
    ),
    ("--warm_start_weight", {"type": float, "default": 1.0}, "in (0, 1]: multiplies the imported counts"),
    ("--warm_start_url", {"metavar": "URL"}, "database of that run, if another"),
    (
        "--store.url",
        {"metavar": "URL"},
        "database of the posteriors, sqlite:///FILE or postgresql://...; default: $OPENRLHF_DBB_STORE_URL "
        "(which keeps a password out of sight), else sqlite:///openrlhf_dbb.db",
    ),
    ("--store.take_over", _SWITCH, "resume a run whose owner is on another machine and known to be dead"),
    ("--data.max_prompt_len", {"type": int}, "drop prompts of more tokens than this"),
    ("--data.drop_duplicates", _SWITCH, "keep the first of prompts with equal text"),
    ("--data.cut_to_batches", _SWITCH, "drop the last prompts that do not fill a rollout batch"),
    (
        "--rollout.min_new_tokens",
        {"type": int, "default": 0, "metavar": "N"},
        "tokens before a response may end (default 0: the policy itself is sampled; OpenRLHF alone: 1)",
    ),
    ("--eval.skip_start", _SWITCH, "do not evaluate before the training; with --eval.dataset"),
    (
        "--probe.fraction",
        {"type": float, "default": 0.0},
        "in [0, 1]: part of the prompts of which extra rollouts measure the estimates; never trained on (default 0)",
    ),
    ("--probe.samples", {"type": int, "default": 128}, "extra rollouts of a probed prompt at each visit (default 128)"),
    (
        "--train.max_rollouts",
        {"type": int},
        "stop before more training rollouts than this are generated, discarded ones counted, evaluation, probes and "
        "replays not; it takes the place of --train.num_episodes",
    ),
    ("--verbose", _SWITCH, "show the output of all workers"),
)
# The pieces that a --method is made of; docs/methods.md explains them.
_PIECES: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "--rollout.strategy",
        {"choices": STRATEGIES, "default": "plain"},
        "plain: all groups are trained on; dynamic: groups that agree wholly are replaced (DAPO); greso: prompts whose "
        "groups agreed are skipped before generation",
    ),
    (
        "--dynamic.refill",
        {"choices": REFILLS, "default": "one_for_one"},
        "one_for_one: a new prompt for each rejected group; batches: further generation batches, surplus discarded",
    ),
    ("--dynamic.multiple", {"type": int, "default": 3}, "prompts of a generation batch, in rollout batches"),
    ("--dynamic.max_rounds", {"type": int, "default": 10}, "generation batches a step at most; 0: no limit"),
    ("--greso.p_easy", {"type": float, "default": 0.5}, "start of the probability base of prompts solved wholly"),
    ("--greso.p_hard", {"type": float, "default": 0.5}, "start of the probability base of prompts never solved"),
    ("--greso.target_easy", {"type": float, "default": 1 / 12}, "share of solved groups to aim at, in (0, 1)"),
    ("--greso.target_hard", {"type": float, "default": 1 / 6}, "share of failed groups to aim at, in (0, 1)"),
    ("--greso.step", {"type": float, "default": 0.01}, "change of a base after each training step"),
    ("--greso.min_p", {"type": float, "default": 0.05}, "lowest base"),
    ("--greso.max_p", {"type": float, "default": 0.95}, "highest base"),
    ("--greso.floor", {"type": float, "default": 0.01}, "lowest probability that a prompt is generated for"),
    ("--greso.batch", {"type": int}, "prompts of a step's first round; default 1.5 x --rollout.batch_size"),
    ("--greso.min_batch", {"type": int}, "prompts of a later round at least; default --rollout.batch_size / 2"),
    ("--greso.safety", {"type": float, "default": 1.25}, "factor on the prompts that a later round is thought to need"),
    ("--replay.samples", {"type": int, "default": 0}, "old rollouts of each prompt trained on beside the new; 0: none"),
    ("--replay.cache", {"type": int, "default": 16}, "newest rollouts of each prompt that are kept"),
    ("--replay.min_cache", {"type": int, "default": 16}, "a prompt is replayed once it has so many"),
    (
        "--replay.select",
        {"choices": list(SELECTIONS), "default": "reward"},
        "reward: highest rewards; recency: newest; variance: largest variance of rewards; full: all",
    ),
    (
        "--replay.normalization",
        {"choices": NORMALIZATIONS, "default": "split"},
        "split: replayed rewards are normalised by themselves; mixed: with the new ones",
    ),
    (
        "--replay.normalizer",
        {"choices": NORMALIZERS, "default": "code"},
        "code: one mean over new and replayed rollouts, as RePO's code; formula: the sum of two means, as its paper",
    ),
    ("--replay.coef", {"type": float, "default": 1.0}, "factor on the loss of replayed rollouts, > 0"),
    (
        "--actor.loss_agg_length",
        {"type": int},
        "L of seq-mean-token-sum-norm, tokens; default --rollout.max_new_tokens",
    ),
)
CONSTANT_LENGTH = "seq-mean-token-sum-norm"


def build_parser(estimator: str | None = None) -> argparse.ArgumentParser:
    """OpenRLHF's parser with our flags added; its own keep name, default, meaning and help.

    Args:
        estimator: a ``module:Class`` whose parameters become flags beside those of the known estimators.
    """
    parser = upstream.build_parser()
    parser.prog = "train_grpo"
    parser.usage = (
        "deepspeed --module openrlhf_dbb.cli.train_grpo [--estimator NAME] [--method NAME] [--preset NAME] [flags]"
    )
    parser.description = (
        "GRPO with stored reward posteriors. Bare, it trains: a small model without CUDA, "
        "the paper's Qwen3-1.7B setting with it."
    )
    parser.epilog = (
        "All other flags are OpenRLHF's own. A switch that a preset turns on is turned off by --no-NAME, "
        "as in --no-train.colocate_all."
    )
    ours = parser.add_argument_group("openrlhf_dbb")
    ours.add_argument(
        "--estimator",
        default=NO_ESTIMATOR,
        metavar="NAME",
        help=f"reward estimator: {', '.join(estimators.available())}, module:Class, "
        f"or {NO_ESTIMATOR} (OpenRLHF's own advantages)",
    )
    ours.add_argument(
        "--preset",
        metavar="NAME",
        help=f"flag values to start from: {', '.join(presets.names())}, or {presets.NONE}; by default tiny "
        "without CUDA and qwen3-1.7b with it, and none when a model is named",
    )
    ours.add_argument(
        "--method",
        metavar="NAME",
        default=methods.NONE,
        help=f"training method, a recipe of flags: {', '.join(methods.names())}, or {methods.NONE}; by default the "
        "preset's (grpo)",
    )
    for flag, options, text in _OURS:
        ours.add_argument(flag, help=text, **options)
    pieces = parser.add_argument_group("pieces of a --method", "see docs/methods.md")
    for flag, options, text in _PIECES:
        pieces.add_argument(flag, help=text, **options)
    _add_loss(parser)
    classes = dict(estimators.available())
    if estimator and ":" in estimator:
        cls = estimator_class(estimator)
        classes[cls.name] = cls
    for name, cls in classes.items():
        _add_estimator(parser, name, cls)
    # A preset can turn a switch on, and the command line must win over it.
    hidden = argparse.SUPPRESS
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(
                f"--no-{action.dest}", dest=action.dest, action="store_false", help=hidden, default=hidden
            )
    return parser


def _add_loss(parser: argparse.ArgumentParser) -> None:
    """A third aggregation beside OpenRLHF's two."""
    for action in parser._actions:
        if action.dest == "actor.loss_agg_mode":
            action.choices = [*(action.choices or ()), CONSTANT_LENGTH]
            action.help = f"{action.help} {CONSTANT_LENGTH}: token sums over a constant length (Dr.GRPO)."
            return
    raise UsageError(f"openrlhf no longer has --actor.loss_agg_mode; use {upstream.CHECKED_VERSIONS[-1]}")


def estimator_class(name: str) -> type[estimators.RewardEstimator]:
    """The class of ``--estimator name``.

    Raises:
        UsageError: no such estimator.
    """
    try:
        return estimators.get(name)
    except ValueError as error:
        raise UsageError(f"--estimator: {error}") from error


def flag_prefix(name: str) -> str:
    """What the flags of ``--estimator name`` begin with."""
    return estimator_class(name).name if ":" in name else name


def estimator_parameters(name: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The parameters of ``--estimator name`` among ``flags``, checked.

    Raises:
        UsageError: a value is outside its range.
    """
    cls, prefix = estimator_class(name), flag_prefix(name)
    parameters = {field: flags[f"{prefix}.{field}"] for field in cls.parameter_names()}
    try:
        cls(**parameters)
    except ValueError as error:
        raise UsageError(f"--{error}" if str(error).startswith(f"{prefix}.") else str(error)) from error
    return parameters


def _add_estimator(parser: argparse.ArgumentParser, name: str, cls: type[estimators.RewardEstimator]) -> None:
    """Flags for the fields of an estimator's dataclass, each of which has a default."""
    if not cls.parameter_names():
        return
    group = parser.add_argument_group(f"--estimator {name}", (cls.__doc__ or name).strip().splitlines()[0])
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        flag, text = f"--{name}.{field.name}", field.metadata.get("help", "")
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            text = f"{text} (default {field.default})"
            group.add_argument(flag, type=type(field.default), default=field.default, help=text)
