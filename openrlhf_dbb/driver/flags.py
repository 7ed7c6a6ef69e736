"""The parser: OpenRLHF's own, with our flags and those of every estimator and rollout strategy added."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

import estimators
from estimators.registry import parameter_fields
from openrlhf_dbb import methods, presets, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.replay.normalization import NORMALIZERS
from openrlhf_dbb.core.replay.selection import SELECTIONS
from openrlhf_dbb.cpu.detection import cuda_devices
from openrlhf_dbb.errors import UsageError

NO_ESTIMATOR = "none"

NORMALIZATIONS = ("split", "mixed")

_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_OURS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--run_name", {}, "name of a new run; default: method, estimator, preset or model, and the time"),
    (
        "--resume",
        {"nargs": "?", "const": "", "metavar": "RUN"},
        "continue a run from its last checkpoint; without a name the newest unfinished one",
    ),
    (
        "--warm_start",
        {"metavar": "RUN"},
        "start a new run from the final posteriors of another one (name, uuid or id)",
    ),
    ("--warm_start_weight", {"type": float, "default": 1.0}, "in (0, 1]: multiplies the imported counts"),
    ("--warm_start_url", {"metavar": "URL"}, "database of that run, if it is another one"),
    (
        "--store.url",
        {"metavar": "URL"},
        "database of the posteriors, sqlite:///FILE or postgresql://...; default: $OPENRLHF_DBB_STORE_URL "
        "(which keeps a password off the command line), else sqlite:///openrlhf_dbb.db",
    ),
    ("--store.take_over", _SWITCH, "resume a run whose owner is on another machine and is known to have ended"),
    ("--data.max_prompt_len", {"type": int}, "drop prompts with more tokens than this"),
    ("--data.drop_duplicates", _SWITCH, "of prompts with equal text, keep the first"),
    ("--data.cut_to_batches", _SWITCH, "drop the last prompts if they do not fill a rollout batch"),
    (
        "--rollout.min_new_tokens",
        {"type": int, "default": 0, "metavar": "N"},
        "tokens before a response may end (default 0: rollouts come from the policy itself; OpenRLHF alone: 1)",
    ),
    ("--eval.skip_start", _SWITCH, "do not evaluate before training; with --eval.dataset"),
    (
        "--probe.fraction",
        {"type": float, "default": 0.0},
        "in [0, 1]: share of the prompts for which extra rollouts measure the estimates; never trained on (default 0)",
    ),
    ("--probe.samples", {"type": int, "default": 128}, "extra rollouts of a probed prompt at each visit (default 128)"),
    (
        "--train.max_rollouts",
        {"type": int},
        "stop before more training rollouts than this are generated, including discarded ones, excluding evaluation, "
        "probes and replays; replaces --train.num_episodes",
    ),
    (
        "--wait_for_gpus",
        {"type": float, "default": 10.0, "metavar": "MINUTES"},
        "how long to wait until the Ray cluster that is joined has enough free GPUs (default 10)",
    ),
    ("--verbose", _SWITCH, "show the output of all workers"),
)
# The pieces that a --method is made of; docs/methods.md explains them.
_PIECES: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "--replay.samples",
        {"type": int, "default": 0},
        "earlier rollouts of each prompt that are trained on beside the new ones; 0: none",
    ),
    ("--replay.cache", {"type": int, "default": 16}, "newest rollouts of each prompt that are kept"),
    ("--replay.min_cache", {"type": int, "default": 16}, "a prompt is replayed once it has this many"),
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


def build_parser(estimator: str | None = None, strategy: str | None = None) -> argparse.ArgumentParser:
    """OpenRLHF's parser with our flags added; its own keep name, default, meaning and help.

    Args:
        estimator, strategy: a ``module:Class`` whose parameters become flags beside those of the known ones.

    Raises:
        UsageError: the name of such a class is that of other flags.
    """
    parser = upstream.build_parser()
    parser.prog = "train_grpo"
    parser.usage = "python -m openrlhf_dbb.cli.train_grpo [--estimator NAME] [--method NAME] [--preset NAME] [flags]"
    parser.description = (
        "GRPO with stored reward posteriors. Without further flags it trains a small model if there is no CUDA, "
        "else the paper's Qwen3-1.7B setting."
    )
    parser.epilog = (
        "All other flags are OpenRLHF's own. Turn off a switch that a preset turns on with --no-NAME, "
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
    pieces.add_argument(
        "--rollout.strategy",
        default="plain",
        metavar="NAME",
        help="; ".join(
            f"{name}: {_first_line(cls).rstrip('.')}".replace("%", "%%") for name, cls in strategies.available().items()
        )
        + "; or module:Class (default plain)",
    )
    for flag, options, text in _PIECES:
        pieces.add_argument(flag, help=text, **options)
    _add_choice(parser, "actor.loss_agg_mode", methods.CONSTANT_LENGTH, "token sums over a constant length (Dr.GRPO).")
    if not cuda_devices():
        _add_choice(parser, "ds.param_dtype", "fp32", "32 bits, the default without CUDA.")
    _add_parameters(parser, "--rollout.strategy", _with_named(strategies.available(), strategy, strategy_class))
    _add_parameters(parser, "--estimator", _with_named(estimators.available(), estimator, estimator_class))
    # A preset can turn a switch on, and the command line must win over it.
    hidden = argparse.SUPPRESS
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(
                f"--no-{action.dest}", dest=action.dest, action="store_false", help=hidden, default=hidden
            )
    return parser


def _add_choice(parser: argparse.ArgumentParser, flag: str, choice: str, text: str) -> None:
    """A value for a flag of OpenRLHF beside its own."""
    for action in parser._actions:
        if action.dest == flag:
            action.choices = [*(action.choices or ()), choice]
            action.help = f"{action.help} {choice}: {text}"
            return
    raise UsageError(f"openrlhf no longer has --{flag}; use {upstream.CHECKED_VERSIONS[-1]}")


def estimator_class(name: str) -> type[estimators.RewardEstimator]:
    """The class of ``--estimator name``.

    Raises:
        UsageError: no such estimator.
    """
    try:
        return estimators.get(name)
    except ValueError as error:
        raise UsageError(f"--estimator: {error}") from error


def strategy_class(name: str) -> type[strategies.RolloutStrategy]:
    """The class of ``--rollout.strategy name``.

    Raises:
        UsageError: no such strategy.
    """
    try:
        return strategies.get(name)
    except ValueError as error:
        raise UsageError(f"--rollout.strategy: {error}") from error


def estimator_parameters(name: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of ``--estimator name`` among ``flags``, checked.

    Raises:
        UsageError: a value is outside its range.
    """
    cls = estimator_class(name)
    parameters = {field: flags[f"{cls.name}.{field}"] for field in cls.parameter_names()}
    try:
        cls(**parameters)
    except ValueError as error:
        raise UsageError(f"--{error}" if str(error).startswith(f"{cls.name}.") else str(error)) from error
    return parameters


def _with_named(known: Mapping[str, type], name: str | None, find: Callable[[str], type]) -> dict[str, type]:
    """Classes by the name that their flags begin with, among them that of a ``module:Class``."""
    classes = dict(known)
    if name and ":" in name:
        cls: Any = find(name)
        classes[cls.name] = cls
    return classes


def _add_parameters(parser: argparse.ArgumentParser, chosen_by: str, classes: Mapping[str, type]) -> None:
    """Flags ``--NAME.FIELD`` for the fields of dataclasses, each of which has a default."""
    for name, cls in classes.items():
        fields = parameter_fields(cls)
        if not fields:
            continue
        group = parser.add_argument_group(f"{chosen_by} {name}", _first_line(cls))
        for field in fields:
            options: dict[str, Any] = {"default": field.default}
            if isinstance(field.default, bool):
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = _type_of(cls, field)
                options["choices"] = field.metadata.get("choices") or None
            text = field.metadata.get("help", "")
            if not isinstance(field.default, bool):
                text = f"{text} (default {field.metadata.get('default_text') or field.default})"
            try:
                group.add_argument(f"--{name}.{field.name}", help=text, **options)
            except argparse.ArgumentError as error:
                raise UsageError(f"{chosen_by} {name}: {error}; give the class another name") from error


def _type_of(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The type of a field's default; where that is None, of its annotation (``int | None``)."""
    if field.default is not None:
        return type(field.default)
    return next(kind for kind in typing.get_args(typing.get_type_hints(cls)[field.name]) if kind is not type(None))


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]
