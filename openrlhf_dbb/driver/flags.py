"""The parser of the training command: OpenRLHF's with our flags added. Its own flags keep name, default and meaning."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf_dbb import estimators, methods, presets, tasks, upstream
from openrlhf_dbb.core import ALL, KEEP, strategies
from openrlhf_dbb.core.probing import Probing
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.estimators.registry import parameter_fields
from openrlhf_dbb.evaluation import training
from openrlhf_dbb.options import Parser, add_trust, number, template_arguments
from openrlhf_dbb.platform import machine

NO_ESTIMATOR = "none"
HELP_ALL = "--help-all"
ESTIMATOR = "--estimator"
STRATEGY = "--rollout.strategy"

# --help shows these flags of OpenRLHF beside ours, with our texts; --help-all shows all of them.
MOST_USED = {
    "actor.model_name_or_path": "model to train: a folder, or a name on the hub",
    "data.prompt_dataset": f"prompts: JSON, JSON lines, CSV or Parquet file, a data set of the hub, {tasks.PREFIX}TASK",
    "data.input_key": "column of the prompt",
    "data.label_key": "column of the right answer",
    "data.apply_chat_template": "use the model's chat template; presets do if it has one and they do not say",
    "data.input_template": "text around each prompt, which takes the place of {}; instead of a chat template",
    "reward.remote_url": "math_answer, exact_match, reasoning_gym, FILE.py with a reward_func, or the URL of a server",
    "rollout.batch_size": "prompts of a step",
    "rollout.n_samples_per_prompt": "rollouts of a prompt in a step: N",
    "rollout.max_new_tokens": "longest response in tokens; without it as long as --data.max_len allows",
    "train.batch_size": "rollouts of an optimizer step",
    "train.micro_batch_size": "rollouts that a GPU trains on at a time",
    "train.num_episodes": "passes over the prompts",
    "actor.adam.lr": "learning rate",
    "algo.advantage.estimator": "advantage form (default: the method's); without a formula here: for --estimator none.",
    "eval.dataset": "held-out prompts, in the same columns",
    "eval.steps": "steps between evaluations, -1: none; with preset default a tenth of the run",
    "ckpt.save_steps": "steps between checkpoints, -1: none; with preset default a tenth of the run, 10 or more",
    "logger.wandb.key": "key of Weights & Biases, which then logs the run",
}


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """Return OpenRLHF's parser with our flags.

    If ``argv`` names a ``module:Class``, the parameters of that class become flags too; with ``--help-all`` the help
    shows all flags of OpenRLHF.

    Raises:
        UsageError: ``argv`` names a class that cannot be imported.
    """
    parser: Parser = upstream.build_parser(Parser)
    shows_all = HELP_ALL in argv
    for action in parser._actions:
        theirs = action.help if shows_all else argparse.SUPPRESS
        action.help = MOST_USED.get(action.dest, theirs)
    groups = list(parser._action_groups)
    _describe(parser, shows_all=shows_all)
    _add_ours(parser)
    _add_pieces(parser)
    add_fields(parser.add_argument_group("replay", _first_line(Replay)), Replay, Replay.name)
    _add_parameters(parser, STRATEGY, strategies, argv)
    _add_parameters(parser, ESTIMATOR, estimators, argv)
    ours = [group for group in parser._action_groups if group not in groups]
    parser._action_groups = ours + groups
    _add_opposites(parser)
    return parser


def _describe(parser: Parser, *, shows_all: bool) -> None:
    parser._optionals.title = "OpenRLHF's" if shows_all else "most used of OpenRLHF's"
    parser.prog = "openrlhf-dbb train"
    parser.usage = "openrlhf-dbb train [--preset NAME] [--estimator NAME] [--method NAME] [flags]"
    parser.description = (
        "GRPO with stored reward posteriors. Without flags it trains SmolLM2-135M on sums if there is no CUDA, else "
        "Qwen3-1.7B in the paper's setting. A model of yours trains by GRPO; --estimator dbb or auto adds history."
    )
    parser.epilog = (
        f"{HELP_ALL} shows every flag of OpenRLHF; all of them keep their names and meanings. Turn off a switch that a "
        "preset turns on with --no-NAME, as in --no-train.colocate_all."
    )


def _add_opposites(parser: argparse.ArgumentParser) -> None:
    """Add ``--no-NAME`` for each switch: a preset can turn it on, and the command line must win."""
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(
                f"--no-{action.dest}",
                dest=action.dest,
                action="store_false",
                help=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
            )


def _add_ours(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("openrlhf_dbb")
    group.add_argument(HELP_ALL, action="help", help="show all flags of OpenRLHF as well, and exit")
    _add_names(group)
    _add_run(group)
    _add_data(group)
    _add_training(group)
    add_trust(group)
    text = "check everything, print the effective configuration, and start nothing"
    group.add_argument("--dry_run", "--dry-run", help=text, action="store_true")


def _add_names(group: argparse._ActionsContainer) -> None:
    """Add the flags that choose by name."""
    known = ", ".join(estimators.available())
    text = (
        f"reward estimator: {known}, module:Class, or {NO_ESTIMATOR} for OpenRLHF's own baseline; "
        "default: the method's, else the preset's (point; tiny and qwen3: dbb)"
    )
    group.add_argument(ESTIMATOR, metavar="NAME", default=NO_ESTIMATOR, help=text)
    known = ", ".join(presets.names())
    text = (
        f"flag values to start from: {known}, a .toml file of yours, or {presets.NONE}; "
        "default: 'default' with a model of yours, else smollm2 without CUDA and qwen3-1.7b with it"
    )
    group.add_argument("--preset", metavar="NAME", default=presets.NONE, help=text)
    known = ", ".join(methods.names())
    text = f"training method, a recipe of flags: {known}, or {methods.NONE}; default: the preset's (grpo)"
    group.add_argument("--method", metavar="NAME", default=methods.NONE, help=text)


def _add_run(group: argparse._ActionsContainer) -> None:
    """Add the flags of the run and its store."""
    group.add_argument(
        "--run_name",
        help="name of a new run; default: method, estimator, preset or model, and the time",
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue a run; without a name the newest unfinished",
    )
    group.add_argument(
        "--warm_start",
        metavar="RUN",
        help="start a new run from the posteriors of another run (name, number or uuid)",
    )
    group.add_argument(
        "--warm_start_weight",
        type=number(float, 0, 1, above=True),
        default=1.0,
        metavar="W",
        help="in (0, 1]: multiplies the imported counts (default 1.0)",
    )
    group.add_argument(
        "--warm_start_url",
        metavar="URL",
        help="the database of that run, if it is another one",
    )
    group.add_argument(
        "--store.url",
        metavar="URL",
        help="FILE or postgresql://...; default: $OPENRLHF_DBB_STORE_URL, openrlhf_dbb.db",
    )
    group.add_argument(
        "--store.take_over",
        action="store_true",
        help="resume a run whose owner is on another machine and is known to have ended",
    )
    group.add_argument(
        "--rollouts.keep",
        type=_count_or_all,
        default=KEEP,
        help=f"rollouts kept of a step, a number or {ALL} (default {KEEP})",
    )
    group.add_argument(
        "--rollouts.record",
        action="store_true",
        help="record every rollout in CKPT.PATH/rollouts: 9 bytes a generated token, 5 of a prompt",
    )
    group.add_argument(
        "--rollouts.of_run",
        metavar="RUN",
        help="train on what a run has recorded, by name or folder; nothing is generated",
    )
    group.add_argument(
        "--ckpt.save_adapter",
        action="store_true",
        help="with --ds.lora.rank: save the best and the last model as adapters, not merged",
    )
    group.add_argument("--verbose", action="store_true", help="show the output of all workers")


def _add_data(group: argparse._ActionsContainer) -> None:
    """Add the flags of prompts and evaluations."""
    group.add_argument(
        "--data.leave_out",
        metavar="FILE",
        help="rows to leave out, which openrlhf-dbb prompts --leave_out FILE writes",
    )
    group.add_argument(
        "--data.drop_duplicates",
        action="store_true",
        help="of prompts with equal text, keep the first",
    )
    group.add_argument(
        "--data.chat_template_kwargs",
        type=template_arguments,
        metavar="JSON",
        help="arguments of the chat template: '{\"enable_thinking\": false}'",
    )
    group.add_argument(
        "--data.task_instruction",
        default=tasks.INSTRUCTION,
        help=f"follows the question of a {tasks.PREFIX} task (default {tasks.INSTRUCTION})",
    )
    group.add_argument(
        "--data.pass_rate_key",
        metavar="COLUMN",
        help="known pass rates, which the posteriors begin with: 0.625, or 5/8",
    )
    group.add_argument(
        "--data.pass_rate_attempts",
        type=number(int, 1),
        metavar="N",
        help="rollouts that a known rate counts for; default: the 8 of 5/8",
    )
    group.add_argument(
        "--data.group_key",
        metavar="COLUMN",
        help="source of a prompt: share right, mixed groups and draws by source",
    )
    training.add_flags(group)
    add_fields(group, Probing, Probing.name)


def _add_training(group: argparse._ActionsContainer) -> None:
    """Add the flags of the training pass."""
    group.add_argument(
        "--train.max_rollouts",
        type=number(int, 1),
        help="most rollouts to generate, instead of --train.num_episodes",
    )
    group.add_argument(
        "--train.max_lag",
        type=number(int, 0),
        help="most steps of lag, async alone; default: --train.async_queue_size",
    )
    group.add_argument(
        "--train.thin",
        type=number(float, 0, 100),
        default=0.0,
        help="keep |A| < C with probability |A| / C, as C (default 0.0)",
    )
    group.add_argument(
        "--train.vllm_log_probs",
        action="store_true",
        help="old log-probs are vLLM's: no pass for them, a bias by rounding",
    )


def _count_or_all(text: str) -> int | str:
    return ALL if text == ALL else number(int, 0)(text)


def _add_pieces(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pieces of a --method", "see docs/methods.md")
    known = []
    for name, cls in strategies.available().items():
        known.append(f"{name}: {_first_line(cls).rstrip('.')}")
    text = f"{'; '.join(known)}; or module:Class (default plain)".replace("%", "%%")
    group.add_argument(STRATEGY, default="plain", metavar="NAME", help=text)
    constant = "token sums over a constant length (Dr.GRPO)."
    _add_choice(parser, "actor.loss_agg_mode", methods.CONSTANT_LENGTH, constant)
    for name, form in estimators.FORMS.available().items():
        _add_choice(parser, "algo.advantage.estimator", name, f"{form.formula}.")
    if machine.torch_cuda() is None:
        _add_choice(parser, "ds.param_dtype", "fp32", "32 bits, the default without CUDA.")


def _add_choice(parser: argparse.ArgumentParser, flag: str, choice: str, text: str) -> None:
    """Let a flag of OpenRLHF have one more value."""
    action = next(action for action in parser._actions if action.dest == flag)
    action.choices = list(dict.fromkeys([*(action.choices or ()), choice]))
    if action.help != argparse.SUPPRESS:
        action.help = f"{action.help} {choice}: {text}"


def named_class(flag: str, registry: Any, name: str) -> Any:
    """Return the class of ``registry`` that the value of a flag names, or raise UsageError."""
    try:
        return registry.get(name)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}{did_you_mean(name, registry.available())}") from error


def _add_parameters(
    parser: argparse.ArgumentParser, chosen_by: str, registry: Any, argv: Sequence[str]
) -> None:
    """Add a flag ``--NAME.FIELD`` for each parameter of the known classes, and of a ``module:Class`` that is named."""
    classes = dict(registry.available())
    for name in list(_values_of(chosen_by, argv))[-1:]:
        if ":" in name:
            cls = named_class(chosen_by, registry, name)
            classes[cls.name] = cls
    for name, cls in classes.items():
        if parameter_fields(cls):
            add_fields(
                parser.add_argument_group(f"{chosen_by} {name}", _first_line(cls)), cls, name
            )


def _values_of(flag: str, argv: Sequence[str]) -> Iterator[str]:
    """Yield the values that a command line gives a flag."""
    for word in argv:
        if word.startswith(f"{flag}="):
            yield word.partition("=")[2]
    for word, value in itertools.pairwise(argv):
        if word == flag:
            yield value


def add_fields(group: argparse._ActionsContainer, cls: type, name: str) -> None:
    """Add a flag ``--NAME.FIELD`` for each parameter of a class to a group of the help."""
    for field in parameter_fields(cls):
        flag = f"--{name}.{field.name}"
        text = field.metadata.get("help", "")
        if isinstance(field.default, bool):
            group.add_argument(flag, action="store_true", default=field.default, help=text)
            continue
        group.add_argument(
            flag,
            type=type(field.default),
            default=field.default,
            choices=field.metadata.get("choices") or None,
            help=f"{text} (default {field.default})",
        )


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]
