"""The parser: OpenRLHF's own, with our flags and those of every estimator and rollout strategy added."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Mapping
from typing import Any

import estimators
from estimators.parameters import parameter_fields
from openrlhf_dbb import methods, presets, upstream
from openrlhf_dbb.core import ALL, KEEP, strategies
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import machine
from openrlhf_dbb.spelling import did_you_mean

NO_ESTIMATOR = "none"
PROGRAM = "openrlhf-dbb train"

# OpenRLHF's flags that --help shows beside ours; --help-all shows all of them.
_MOST_USED = (
    "actor.model_name_or_path", "data.prompt_dataset", "data.input_key", "data.label_key", "data.apply_chat_template",
    "reward.remote_url", "rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.max_new_tokens",
    "train.batch_size", "train.micro_batch_size", "train.num_episodes", "actor.adam.lr", "eval.dataset", "eval.steps",
    "ckpt.save_steps", "actor.num_gpus_per_node", "vllm.num_engines", "train.colocate_all", "logger.wandb.key",
)  # fmt: skip


def _count_or_all(text: str) -> int | str:
    if text == ALL:
        return ALL
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of rollouts, 0 or more, nor {ALL}")
    return count


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
        "database of the posteriors, a file name or postgresql://...; default: $OPENRLHF_DBB_STORE_URL "
        "(which keeps a password off the command line), else openrlhf_dbb.db",
    ),
    ("--store.take_over", _SWITCH, "resume a run whose owner is on another machine and is known to have ended"),
    ("--data.drop_duplicates", _SWITCH, "of prompts with equal text, keep the first"),
    (
        "--vllm.max_num_seqs",
        {"type": int, "metavar": "N"},
        "sequences that an engine runs at a time; default, with CUDA and a preset: a step's rollouts for each engine",
    ),
    (
        "--vllm.max_num_batched_tokens",
        {"type": int, "metavar": "N"},
        "tokens in a step of an engine; default, with CUDA and a preset: 8192",
    ),
    (
        "--eval.benchmarks",
        {"metavar": "NAME,..."},
        "evaluated every --eval.steps, as by openrlhf-dbb evaluate: benchmarks by name, NAME=FILE, or a .toml file",
    ),
    ("--eval.top_p", {"type": float, "metavar": "P"}, "of evaluations, in (0, 1]; default: --rollout.top_p"),
    (
        "--probe.fraction",
        {"type": float, "default": 0.0},
        "in [0, 1]: share of the prompts for which extra rollouts measure the estimates; never trained on (default 0)",
    ),
    ("--probe.samples", {"type": int, "default": 128}, "extra rollouts of a probed prompt at each visit (default 128)"),
    (
        "--rollouts.keep",
        {"type": _count_or_all, "default": KEEP, "metavar": f"N|{ALL}"},
        f"rollouts of each step that are stored with their texts, for serve, report and SQL: a number, 0 for none, "
        f"{ALL} (default {KEEP}); changes nothing of the training",
    ),
    (
        "--train.max_rollouts",
        {"type": int},
        "stop before more training rollouts than this are generated, including discarded ones, excluding evaluation, "
        "probes and replays; replaces --train.num_episodes",
    ),
    (
        "--train.max_lag",
        {"type": int, "metavar": "STEPS"},
        "with --train.async_enable: groups that an older policy generated are not trained on, and generation waits "
        "rather than make them; default: as late as --train.async_queue_size allows",
    ),
    ("--dry_run", _SWITCH, "check everything, print the effective configuration, and start nothing"),
    ("--verbose", _SWITCH, "show the output of all workers"),
)
# The pieces that a --method is made of; docs/methods.md explains them.
_PIECES: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "--replay.samples",
        {"type": int, "default": 0},
        "earlier rollouts of each prompt that are trained on beside the new ones; 0: none",
    ),
    ("--replay.cache", {"type": int, "default": 16}, "newest rollouts kept of each prompt; full, it is replayed from"),
)


class Parser(argparse.ArgumentParser):
    """OpenRLHF's parser, once it is made: errors in one line, and a help that begins with our flags."""

    theirs: list[argparse.Action]

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} ({self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            raise UsageError(f"unknown flag {flag}{did_you_mean(flag, known)} ({self.prog} --help-all lists all)")
        return found

    def format_help(self, *, everything: bool = False) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        sections = [(group.title, group.description, group._group_actions) for group in self._action_groups[2:]]
        if everything:
            sections.append(("OpenRLHF's", None, self.theirs))
        else:
            used = [action for flag in _MOST_USED for action in self.theirs if action.dest == flag]
            sections.insert(1, ("most used of OpenRLHF's", None, used))
        for title, text, actions in sections:
            formatter.start_section(title)
            formatter.add_text(text)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_help(everything=True))
        parser.exit()


def build_parser(estimator: str | None = None, strategy: str | None = None) -> argparse.ArgumentParser:
    """OpenRLHF's parser with our flags added; its own keep name, default, meaning and help.

    Args:
        estimator, strategy: a ``module:Class`` whose parameters become flags beside those of the known ones.

    Raises:
        UsageError: the name of such a class is that of other flags.
    """
    parser = upstream.build_parser()
    parser.__class__ = Parser
    parser = typing.cast(Parser, parser)
    parser.theirs = list(parser._actions)
    parser.prog = PROGRAM
    parser.usage = (
        "openrlhf-dbb train [--preset NAME] [--estimator NAME] [--method NAME] [flags]\n       "
        "openrlhf-dbb train --actor.model_name_or_path MODEL --data.prompt_dataset DATA --data.label_key COLUMN "
        "--reward.remote_url REWARD [flags]"
    )
    parser.description = (
        "GRPO with stored reward posteriors. Without further flags it trains a small model if there is no CUDA, "
        "else the paper's Qwen3-1.7B setting. With a model and data of yours it trains them by the paper's method."
    )
    parser.epilog = (
        "--help-all shows every flag of OpenRLHF; all of them keep their names and meanings. Turn off a switch that a "
        "preset turns on with --no-NAME, as in --no-train.colocate_all."
    )
    ours = parser.add_argument_group("openrlhf_dbb")
    ours.add_argument("--help-all", action=_HelpAll, nargs=0, help="show OpenRLHF's flags as well, and exit")
    ours.add_argument(
        "--estimator",
        default=NO_ESTIMATOR,
        metavar="NAME",
        help=f"reward estimator: {', '.join(estimators.available())}, module:Class, "
        f"or {NO_ESTIMATOR} (plain OpenRLHF); by default the preset's (dbb)",
    )
    ours.add_argument(
        "--preset",
        metavar="NAME",
        help=f"flag values to start from: {', '.join(presets.names())}, {presets.NONE}, or a .toml file; where it "
        f"is not given, {presets.DEFAULT} if a model is named, else tiny without CUDA and qwen3-1.7b with it",
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
    for name, form in estimators.FORMS.available().items():
        _add_choice(parser, "algo.advantage.estimator", name, f"{form.formula}.")
    if machine.torch_cuda() is None:
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
    """A value for a flag of OpenRLHF beside its own, unless it is one of these."""
    for action in parser._actions:
        if action.dest == flag:
            if choice not in (action.choices or ()):
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
        raise UsageError(f"--estimator: {error}{did_you_mean(name, estimators.available())}") from error


def strategy_class(name: str) -> type[strategies.RolloutStrategy]:
    """The class of ``--rollout.strategy name``.

    Raises:
        UsageError: no such strategy.
    """
    try:
        return strategies.get(name)
    except ValueError as error:
        raise UsageError(f"--rollout.strategy: {error}{did_you_mean(name, strategies.available())}") from error


def estimator_parameters(name: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of ``--estimator name`` among ``flags``, checked.

    Raises:
        UsageError: a value is outside its range.
    """
    cls = estimator_class(name)
    parameters = {field.name: flags.get(f"{cls.name}.{field.name}", field.default) for field in parameter_fields(cls)}
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
            if not field.metadata.get("flag", True):
                continue
            options: dict[str, Any] = {"default": field.default}
            if isinstance(field.default, bool):
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = type(field.default)
                options["choices"] = field.metadata.get("choices") or None
            text = field.metadata.get("help", "")
            if not isinstance(field.default, bool):
                text = f"{text} (default {field.default})"
            try:
                group.add_argument(f"--{name}.{field.name}", help=text, **options)
            except argparse.ArgumentError as error:
                raise UsageError(f"{chosen_by} {name}: {error}; give the class another name") from error


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]
