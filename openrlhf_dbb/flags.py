"""The parser: OpenRLHF's own, with our flags and those of every estimator beside its."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import estimators
from openrlhf_dbb import presets, upstream
from openrlhf_dbb.errors import UsageError

NO_ESTIMATOR = "none"

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
        "--probe.fraction",
        {"type": float, "default": 0.0},
        "in [0, 1]: part of the prompts of which extra rollouts measure the estimates; never trained on (default 0)",
    ),
    ("--probe.samples", {"type": int, "default": 128}, "extra rollouts of a probed prompt at each visit (default 128)"),
    ("--verbose", _SWITCH, "show the output of all workers"),
)


def build_parser(estimator: str | None = None) -> argparse.ArgumentParser:
    """OpenRLHF's parser with our flags added; its own keep name, default, meaning and help.

    Args:
        estimator: a ``module:Class`` whose parameters become flags beside those of the known estimators.
    """
    parser = upstream.build_parser()
    parser.prog = "train_grpo"
    parser.usage = "deepspeed --module openrlhf_dbb.cli.train_grpo [--estimator NAME] [--preset NAME] [flags]"
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
    for flag, options, text in _OURS:
        ours.add_argument(flag, help=text, **options)
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
