"""Builds the parser of the training command: OpenRLHF's parser with our flags added."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openrlhf_dbb import estimators, methods, presets, tasks, upstream
from openrlhf_dbb.core import ALL, KEEP, strategies
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.estimators.parameters import parameter_fields
from openrlhf_dbb.options import Parser, add_trust
from openrlhf_dbb.platform import machine

NO_ESTIMATOR = "none"
PROGRAM = "openrlhf-dbb train"
HELP_ALL = "--help-all"
ESTIMATOR, STRATEGY = "--estimator", "--rollout.strategy"

# --help shows these flags of OpenRLHF beside ours; --help-all shows all of them.
_MOST_USED = (
    "actor.model_name_or_path", "data.prompt_dataset", "data.input_key", "data.label_key", "data.apply_chat_template",
    "reward.remote_url", "rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.max_new_tokens",
    "train.batch_size", "train.micro_batch_size", "train.num_episodes", "actor.adam.lr", "eval.dataset", "eval.steps",
    "ckpt.save_steps", "actor.num_gpus_per_node", "vllm.num_engines", "train.colocate_all", "logger.wandb.key",
)  # fmt: skip


def number(kind: type, least: float, most: float | None = None, *, above: bool = False) -> Callable[[str], Any]:
    """Return an argparse type: an int or a float from ``least`` to ``most``; ``above``: ``least`` is not allowed."""
    allowed = f"{least:g} or more" if most is None else f"in {'(' if above else '['}{least:g}, {most:g}]"

    def convert(text: str) -> Any:
        value = kind(text)
        fits = (value > least if above else value >= least) and (most is None or value <= most)
        if not fits:
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
        return value

    convert.__name__ = kind.__name__  # argparse names the type in "invalid int value"
    return convert


def _count_or_all(text: str) -> int | str:
    return ALL if text == ALL else number(int, 0)(text)


_SHARE = {"type": number(float, 0, 1, above=True)}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_OURS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--run_name", {}, "name of a new run; default: method, estimator, preset or model, and the time"),
    ("--resume", {"nargs": "?", "const": "", "metavar": "RUN"}, "continue a run; without a name the newest unfinished"),
    ("--warm_start", {"metavar": "RUN"}, "start a new run from the final posteriors of another run (name, uuid or id)"),
    ("--warm_start_weight", _SHARE | {"default": 1.0, "metavar": "W"}, "in (0, 1]: multiplies the imported counts"),
    ("--warm_start_url", {"metavar": "URL"}, "the database of that run, if it is another one"),
    (
        "--store.url",
        {"metavar": "URL"},
        "database of the posteriors, a file name or postgresql://...; default: $OPENRLHF_DBB_STORE_URL "
        "(which keeps a password off the command line), else openrlhf_dbb.db",
    ),
    ("--store.take_over", _SWITCH, "resume a run whose owner is on another machine and is known to have ended"),
    ("--data.drop_duplicates", _SWITCH, "of prompts with equal text, keep the first"),
    (
        "--data.task_instruction",
        {"metavar": "TEXT", "default": tasks.INSTRUCTION},
        f"follows the question of a {tasks.PREFIX} task (default {tasks.INSTRUCTION!r})",
    ),
    (
        "--eval.benchmarks",
        {"metavar": "NAME,..."},
        "evaluate these every --eval.steps: names, NAME=FILE, or .toml files",
    ),
    ("--eval.top_p", _SHARE | {"metavar": "P"}, "of evaluations, in (0, 1]; default: --rollout.top_p"),
    (
        "--probe.fraction",
        {"type": number(float, 0, 1), "default": 0.0, "metavar": "F"},
        "in [0, 1]: share of the prompts for which extra rollouts measure the estimates; never trained on (default 0)",
    ),
    (
        "--probe.samples",
        {"type": number(int, 2), "default": 128, "metavar": "M"},
        "extra rollouts of a probed prompt at each visit (default 128)",
    ),
    (
        "--rollouts.keep",
        {"type": _count_or_all, "default": KEEP, "metavar": f"N|{ALL}"},
        f"rollouts of each step that are stored with their texts: a number or {ALL} (default {KEEP})",
    ),
    (
        "--train.max_rollouts",
        {"type": number(int, 1), "metavar": "R"},
        "stop before more training rollouts are generated, discarded ones included; replaces --train.num_episodes",
    ),
    (
        "--train.max_lag",
        {"type": number(int, 0), "metavar": "STEPS"},
        "with --train.async_enable: leave out groups that an older policy generated; default: --train.async_queue_size",
    ),
    ("--ckpt.save_adapter", _SWITCH, "with --ds.lora.rank: save the best and the last model as adapters, not merged"),
    ("--verbose", _SWITCH, "show the output of all workers"),
)
# The pieces that a --method is made of; docs/methods.md explains them.
_PIECES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--replay.samples", {"type": number(int, 0), "default": 0}, "earlier rollouts of a prompt to train on; 0: none"),
    ("--replay.cache", {"type": int, "default": 16}, "newest rollouts kept of each prompt; full, it is replayed from"),
)


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """Return OpenRLHF's parser with our flags added. Its own flags keep name, default and meaning.

    Args:
        argv: a command line. If it names a ``module:Class``, the parameters of that class become flags too; with
            ``--help-all`` the help shows all flags of OpenRLHF.

    Raises:
        UsageError: there is no such class, or its flags have the names of other flags.
    """
    parser: Parser = upstream.build_parser(Parser)
    if HELP_ALL not in argv:
        for action in parser._actions:
            action.help = action.help if action.dest in _MOST_USED else argparse.SUPPRESS
    theirs = list(parser._action_groups)
    parser._optionals.title = "OpenRLHF's" if HELP_ALL in argv else "most used of OpenRLHF's"
    parser.prog = PROGRAM
    parser.usage = "openrlhf-dbb train [--preset NAME] [--estimator NAME] [--method NAME] [flags]"
    parser.description = (
        "GRPO with stored reward posteriors. Without further flags it trains a small model if there is no CUDA, "
        "else the paper's Qwen3-1.7B setting. With a model and data of yours it trains them by the paper's method."
    )
    parser.epilog = (
        f"{HELP_ALL} shows every flag of OpenRLHF; all of them keep their names and meanings. Turn off a switch that a "
        "preset turns on with --no-NAME, as in --no-train.colocate_all."
    )
    _add_ours(parser)
    _add_pieces(parser)
    _add_parameters(parser, STRATEGY, _classes(strategies.available(), strategy_class, _named(argv, STRATEGY)))
    _add_parameters(parser, ESTIMATOR, _classes(estimators.available(), estimator_class, _named(argv, ESTIMATOR)))
    parser._action_groups = [group for group in parser._action_groups if group not in theirs] + theirs
    # A preset can turn a switch on, and the command line must win over it.
    hidden = argparse.SUPPRESS
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(
                f"--no-{action.dest}", dest=action.dest, action="store_false", help=hidden, default=hidden
            )
    return parser


def _add_ours(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("openrlhf_dbb")
    group.add_argument(HELP_ALL, action="help", help="show all flags of OpenRLHF as well, and exit")
    group.add_argument(
        ESTIMATOR,
        metavar="NAME",
        default=NO_ESTIMATOR,
        help=f"reward estimator: {', '.join(estimators.available())}, module:Class, or {NO_ESTIMATOR} for OpenRLHF's "
        "own baseline; default: the method's, else the preset's (dbb)",
    )
    group.add_argument(
        "--preset",
        metavar="NAME",
        default=presets.NONE,
        help=f"flag values to start from: {', '.join(presets.names())}, a .toml file of yours, or {presets.NONE}; "
        "default: 'default' with a model of yours, else tiny without CUDA and qwen3-1.7b with it",
    )
    group.add_argument(
        "--method",
        metavar="NAME",
        default=methods.NONE,
        help=f"training method, a recipe of flags: {', '.join(methods.names())}, or {methods.NONE}; default: the "
        "preset's (grpo)",
    )
    for flag, options, text in _OURS:
        group.add_argument(flag, help=text, **options)
    add_trust(group)
    text = "check everything, print the effective configuration, and start nothing"
    group.add_argument("--dry_run", "--dry-run", help=text, **_SWITCH)


def _add_pieces(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pieces of a --method", "see docs/methods.md")
    known = "; ".join(f"{name}: {_first_line(cls).rstrip('.')}" for name, cls in strategies.available().items())
    text = f"{known}; or module:Class (default plain)".replace("%", "%%")
    group.add_argument(STRATEGY, default="plain", metavar="NAME", help=text)
    for flag, options, text in _PIECES:
        group.add_argument(flag, help=text, **options)
    _add_choice(parser, "actor.loss_agg_mode", methods.CONSTANT_LENGTH, "token sums over a constant length (Dr.GRPO).")
    for name, form in estimators.FORMS.available().items():
        _add_choice(parser, "algo.advantage.estimator", name, f"{form.formula}.")
    if machine.torch_cuda() is None:
        _add_choice(parser, "ds.param_dtype", "fp32", "32 bits, the default without CUDA.")


def _add_choice(parser: argparse.ArgumentParser, flag: str, choice: str, text: str) -> None:
    """Allow one more value for a flag of OpenRLHF."""
    action = next(action for action in parser._actions if action.dest == flag)
    if choice not in (action.choices or ()):
        action.choices = [*(action.choices or ()), choice]
        if action.help != argparse.SUPPRESS:
            action.help = f"{action.help} {choice}: {text}"


def _named(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag on a command line that is not parsed yet."""
    values = [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]
    values += [value for word, value in itertools.pairwise(argv) if word == flag]
    return values[-1] if values else None


def estimator_class(name: str) -> type[estimators.RewardEstimator]:
    """Return the class of ``--estimator name``, or raise UsageError."""
    return _class(ESTIMATOR, estimators, name)


def strategy_class(name: str) -> type[strategies.RolloutStrategy]:
    """Return the class of ``--rollout.strategy name``, or raise UsageError."""
    return _class(STRATEGY, strategies, name)


def _class(flag: str, registry: Any, name: str) -> Any:
    try:
        return registry.get(name)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}{did_you_mean(name, registry.available())}") from error


def _classes(known: Mapping[str, type], find: Callable[[str], type], name: str | None) -> dict[str, type]:
    """Return the registered classes, and the ``module:Class`` that the command line names."""
    plug_in: Any = find(name) if name and ":" in name else None
    return {**known, plug_in.name: plug_in} if plug_in is not None else dict(known)


def _add_parameters(parser: argparse.ArgumentParser, chosen_by: str, classes: Mapping[str, type]) -> None:
    """Add a flag ``--NAME.FIELD`` for every parameter of the classes."""
    for name, cls in classes.items():
        fields = parameter_fields(cls)
        if not fields:
            continue
        group = parser.add_argument_group(f"{chosen_by} {name}", _first_line(cls))
        for field in fields:
            if not field.metadata.get("flag", True):  # a trainer fills it in
                continue
            options: dict[str, Any] = {"default": field.default, "help": field.metadata.get("help", "")}
            if isinstance(field.default, bool):
                options["action"] = "store_true"
            else:
                options["help"] += f" (default {field.default})"
                options |= {"type": type(field.default), "choices": field.metadata.get("choices") or None}
            try:
                group.add_argument(f"--{name}.{field.name}", **options)
            except argparse.ArgumentError as error:
                raise UsageError(f"{chosen_by} {name}: {error}; give the class another name") from error


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]
