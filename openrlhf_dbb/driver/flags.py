"""Builds the parser of the training command: OpenRLHF's parser with our flags added."""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from openrlhf_dbb import estimators, methods, presets, tasks, upstream
from openrlhf_dbb.core import ALL, KEEP, strategies
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.estimators.parameters import parameter_fields
from openrlhf_dbb.options import Parser, add_trust, number
from openrlhf_dbb.platform import machine

NO_ESTIMATOR = "none"
PROGRAM = "openrlhf-dbb train"
HELP_ALL = "--help-all"
ESTIMATOR, STRATEGY = "--estimator", "--rollout.strategy"

# --help shows these flags of OpenRLHF beside ours, with our texts; --help-all shows all of them.
_MOST_USED = {
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
    "eval.n_samples_per_prompt": "responses to each held-out prompt",
    "ckpt.save_steps": "steps between checkpoints, -1: none; with preset default a tenth of the run, 10 or more",
    "actor.num_gpus_per_node": "GPUs of a host that train the policy",
    "vllm.num_engines": "vLLM engines, which generate",
    "train.colocate_all": "all models share the same GPUs",
    "logger.wandb.key": "key of Weights & Biases, which then logs the run; trackio: trackio logs it here",
}


def _count_or_all(text: str) -> int | str:
    return ALL if text == ALL else number(int, 0)(text)


_SHARE = {"type": number(float, 0, 1, above=True)}
_COUNT = {"type": number(int, 1), "metavar": "N"}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
_OURS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--run_name", {}, "name of a new run; default: method, estimator, preset or model, and the time"),
    ("--resume", {"nargs": "?", "const": "", "metavar": "RUN"}, "continue a run; without a name the newest unfinished"),
    ("--warm_start", {"metavar": "RUN"}, "start a new run from the posteriors of another run (name, number or uuid)"),
    ("--warm_start_weight", _SHARE | {"default": 1.0, "metavar": "W"}, "in (0, 1]: multiplies the imported counts"),
    ("--warm_start_url", {"metavar": "URL"}, "the database of that run, if it is another one"),
    ("--store.url", {"metavar": "URL"}, "FILE or postgresql://...; default: $OPENRLHF_DBB_STORE_URL, openrlhf_dbb.db"),
    ("--store.take_over", _SWITCH, "resume a run whose owner is on another machine and is known to have ended"),
    ("--data.leave_out", {"metavar": "FILE"}, "rows to leave out, which openrlhf-dbb prompts --leave_out FILE writes"),
    ("--data.drop_duplicates", _SWITCH, "of prompts with equal text, keep the first"),
    ("--data.task_instruction", {"default": tasks.INSTRUCTION}, f"follows the question of a {tasks.PREFIX} task"),
    ("--data.pass_rate_key", {"metavar": "COLUMN"}, "known pass rates, which the posteriors begin with: 0.625, or 5/8"),
    ("--data.pass_rate_attempts", _COUNT, "rollouts that a known rate counts for; default: the 8 of 5/8"),
    ("--data.group_key", {"metavar": "COLUMN"}, "source of a prompt: share right, mixed groups and draws by source"),
    ("--eval.benchmarks", {"metavar": "NAME,..."}, "evaluate these every --eval.steps; evaluate --help lists them"),
    ("--eval.top_p", _SHARE | {"metavar": "P"}, "of evaluations, in (0, 1]; default: --rollout.top_p"),
    ("--probe.fraction", {"type": number(float, 0, 1), "default": 0.0}, "share of prompts whose estimate is measured"),
    ("--probe.samples", {"type": number(int, 2), "default": 128}, "rollouts that measure it, and are not trained on"),
    ("--rollouts.keep", {"type": _count_or_all, "default": KEEP}, f"rollouts kept of a step, a number or {ALL}"),
    ("--train.max_rollouts", {"type": number(int, 1)}, "most rollouts to generate, instead of --train.num_episodes"),
    ("--train.max_lag", {"type": number(int, 0)}, "most steps of lag, async alone; default: --train.async_queue_size"),
    ("--ckpt.save_adapter", _SWITCH, "with --ds.lora.rank: save the best and the last model as adapters, not merged"),
    ("--verbose", _SWITCH, "show the output of all workers"),
)


def build_parser(argv: Sequence[str] = ()) -> Parser:
    """Return OpenRLHF's parser with our flags added. Its own flags keep name, default and meaning.

    If ``argv`` names a ``module:Class``, the parameters of that class become flags too; with ``--help-all`` the help
    shows all flags of OpenRLHF.
    """
    parser: Parser = upstream.build_parser(Parser)
    for action in parser._actions:
        action.help = _MOST_USED.get(action.dest, action.help if HELP_ALL in argv else argparse.SUPPRESS)
    theirs = list(parser._action_groups)
    parser._optionals.title = "OpenRLHF's" if HELP_ALL in argv else "most used of OpenRLHF's"
    parser.prog = PROGRAM
    parser.usage = "openrlhf-dbb train [--preset NAME] [--estimator NAME] [--method NAME] [flags]"
    parser.description = (
        "GRPO with stored reward posteriors. Without flags it trains SmolLM2-135M on sums if there is no CUDA, else "
        "Qwen3-1.7B in the paper's setting. A model of yours trains by GRPO; --estimator dbb or auto adds history."
    )
    parser.epilog = (
        f"{HELP_ALL} shows every flag of OpenRLHF; all of them keep their names and meanings. Turn off a switch that a "
        "preset turns on with --no-NAME, as in --no-train.colocate_all."
    )
    _add_ours(parser)
    _add_pieces(parser)
    _add_parameters(parser, STRATEGY, strategies, _named(argv, STRATEGY))
    _add_parameters(parser, ESTIMATOR, estimators, _named(argv, ESTIMATOR))
    parser._action_groups = [group for group in parser._action_groups if group not in theirs] + theirs
    # A preset can turn a switch on, and the command line must win over it.
    off: dict[str, Any] = {"action": "store_false", "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(f"--no-{action.dest}", dest=action.dest, **off)
    return parser


def _add_ours(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("openrlhf_dbb")
    group.add_argument(HELP_ALL, action="help", help="show all flags of OpenRLHF as well, and exit")
    known = [", ".join(names) for names in (estimators.available(), presets.names(), methods.names())]
    for flag, none, text in (
        (ESTIMATOR, NO_ESTIMATOR, f"reward estimator: {known[0]}, module:Class, or {NO_ESTIMATOR} for OpenRLHF's own "
         "baseline; default: the method's, else the preset's (point; tiny and qwen3: dbb)"),
        ("--preset", presets.NONE, f"flag values to start from: {known[1]}, a .toml file of yours, or {presets.NONE}; "
         "default: 'default' with a model of yours, else smollm2 without CUDA and qwen3-1.7b with it"),
        ("--method", methods.NONE, f"training method, a recipe of flags: {known[2]}, or {methods.NONE}; default: the "
         "preset's (grpo)"),
    ):  # fmt: skip
        group.add_argument(flag, metavar="NAME", default=none, help=text)
    for flag, options, text in _OURS:
        default = f" (default {options['default']})" if "default" in options and "action" not in options else ""
        group.add_argument(flag, help=text + default, **options)
    add_trust(group)
    text = "check everything, print the effective configuration, and start nothing"
    group.add_argument("--dry_run", "--dry-run", help=text, **_SWITCH)


def _add_pieces(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pieces of a --method", "see docs/methods.md")
    known = "; ".join(f"{name}: {_first_line(cls).rstrip('.')}" for name, cls in strategies.available().items())
    text = f"{known}; or module:Class (default plain)".replace("%", "%%")
    group.add_argument(STRATEGY, default="plain", metavar="NAME", help=text)
    text = "earlier rollouts of a prompt to train on (default 0)"
    group.add_argument("--replay.samples", type=number(int, 0), default=0, help=text)
    text = "newest rollouts kept of each prompt; full, it is replayed from (default 16)"
    group.add_argument("--replay.cache", type=int, default=16, help=text)
    _add_choice(parser, "actor.loss_agg_mode", methods.CONSTANT_LENGTH, "token sums over a constant length (Dr.GRPO).")
    for name, form in estimators.FORMS.available().items():
        _add_choice(parser, "algo.advantage.estimator", name, f"{form.formula}.")
    if machine.torch_cuda() is None:
        _add_choice(parser, "ds.param_dtype", "fp32", "32 bits, the default without CUDA.")


def _add_choice(parser: argparse.ArgumentParser, flag: str, choice: str, text: str) -> None:
    action = next(action for action in parser._actions if action.dest == flag)
    action.choices = list(dict.fromkeys([*(action.choices or ()), choice]))
    if action.help != argparse.SUPPRESS:
        action.help = f"{action.help} {choice}: {text}"


def _named(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag on a command line that is not parsed yet."""
    values = [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]
    values += [value for word, value in itertools.pairwise(argv) if word == flag]
    return values[-1] if values else None


def named_class(flag: str, registry: Any, name: str) -> Any:
    """Return the class of ``registry`` that the value of a flag names, or raise UsageError."""
    try:
        return registry.get(name)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}{did_you_mean(name, registry.available())}") from error


def _add_parameters(parser: argparse.ArgumentParser, chosen_by: str, registry: Any, named: str | None) -> None:
    """Add a flag ``--NAME.FIELD`` for every parameter of the known classes, and of a ``module:Class`` that is named."""
    plug_ins = [named_class(chosen_by, registry, named)] if named and ":" in named else []
    for name, cls in (registry.available() | {cls.name: cls for cls in plug_ins}).items():
        fields = parameter_fields(cls)
        if not fields:
            continue
        group = parser.add_argument_group(f"{chosen_by} {name}", _first_line(cls))
        for field in fields:
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
