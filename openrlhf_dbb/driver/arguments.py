"""Turns a command line into settings: the frozen values of all flags, each with its origin.

The layers, from the bottom: OpenRLHF's defaults, the machine, the preset, the method, the command line. Values that
follow from other flags come last.
"""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import chosen, estimators, methods, presets, tasks, tiny, upstream
from openrlhf_dbb.core import ALL, KEEP, strategies
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.estimators.registry import parameter_fields
from openrlhf_dbb.options import Parser, add_trust, number, template_arguments
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.terminal import shown

COMMAND_LINE = "command line"
MODEL_FLAG = "actor.model_name_or_path"
OUTPUTS = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
# OpenRLHF does not see these flags. It sends its arguments to trackers, and some of these hold passwords.
_DRIVERS = (
    "preset", "method", "estimator", "run_name", "resume", "warm_start", "warm_start_weight", "warm_start_url",
    "store.url", "store.take_over", "dry_run", "verbose",
)  # fmt: skip
_SHOWN = ("method", "estimator", "preset")
_HIDDEN = ("logger.wandb.key", "local_rank", *(flag for flag in _DRIVERS if flag not in _SHOWN))

NO_ESTIMATOR = "none"
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
    "ckpt.save_steps": "steps between checkpoints, -1: none; with preset default a tenth of the run, 10 or more",
    "logger.wandb.key": "key of Weights & Biases, which then logs the run",
}


def _count_or_all(text: str) -> int | str:
    return ALL if text == ALL else number(int, 0)(text)


_SHARE = {"type": number(float, 0, 1, above=True)}
_COUNT = {"type": number(int, 1), "metavar": "N"}
_JSON = {"type": template_arguments, "metavar": "JSON"}
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
    ("--data.chat_template_kwargs", _JSON, "arguments of the chat template: '{\"enable_thinking\": false}'"),
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
    ("--train.thin", {"type": number(float, 0, 100), "default": 0.0}, "keep |A| < C with probability |A| / C, as C"),
    ("--train.vllm_log_probs", _SWITCH, "old log-probs are vLLM's: no pass for them, a bias by rounding"),
    ("--ckpt.save_adapter", _SWITCH, "with --ds.lora.rank: save the best and the last model as adapters, not merged"),
    ("--verbose", _SWITCH, "show the output of all workers"),
)

Derived = Iterator[tuple[str, Any, str]]
"""Flags with values that follow from other flags, and the reasons; each is set before the next one is asked for."""


def _named(flag: str) -> Any:
    return property(lambda settings: settings.values[flag])


@dataclass(frozen=True)
class Settings:
    """The values of all flags. Nothing changes them; :meth:`with_values` returns other settings."""

    values: Mapping[str, Any] = field(repr=False)  # by flag
    origin: Mapping[str, str] = field(repr=False)  # of each value that is not OpenRLHF's default
    command: str = field(repr=False)  # that was given, without secrets
    preset_read: presets.Preset = field(repr=False)  # empty for "none"

    preset = _named("preset")  # or the path of its file, or "none"
    method = _named("method")  # or "none"
    estimator = _named("estimator")  # or ``module:Class``, or "none" for OpenRLHF's own advantages
    run_name = _named("run_name")

    def with_values(self, flags: Mapping[str, Any], origin: str) -> "Settings":
        """Return these settings with other values of some flags, and where those come from."""
        values, origins = {**self.values, **flags}, {**self.origin, **dict.fromkeys(flags, origin)}
        return dataclasses.replace(self, values=values, origin=origins)

    def given(self, flag: str) -> bool:
        return self.origin.get(flag) == COMMAND_LINE

    def shown(self, *flags: str) -> str:
        """Return flags with their values, for an error line: ``--data.max_len 512 with --train.async_enable``."""
        words = []
        for flag in flags:
            value = self.values[flag]
            if isinstance(value, list):
                value = ",".join(value)
            has_value = value is not True and value not in (None, "")
            words.append(f"--{flag} {shown(value, 300)}" if has_value else f"--{flag}")
        return " with ".join(words)

    @cached_property
    def args(self) -> SimpleNamespace:
        """All values as OpenRLHF's code reads them (``args.actor.adam.lr``)."""
        return upstream.nested(self.values)

    def openrlhf_args(self) -> SimpleNamespace:
        """Return a copy of the arguments for OpenRLHF, which changes it, without the flags of the driver."""
        return upstream.nested(copy.deepcopy({k: value for k, value in self.values.items() if k not in _DRIVERS}))

    @property
    def flags(self) -> dict[str, Any]:
        """The values that are printed and stored, as JSON holds them; passwords are not among them."""
        shown = {flag: self.values[flag] for flag in (*_SHOWN, *self.values) if flag not in _HIDDEN}
        endless = {flag: str(v) for flag, v in shown.items() if isinstance(v, float) and not math.isfinite(v)}
        return dict(without_secrets(shown | endless))  # tuples become lists

    @cached_property
    def built_estimator(self) -> estimators.RewardEstimator:
        """The estimator; point for ``--estimator none``. Raises UsageError if a parameter is outside its range."""
        if self.estimator == NO_ESTIMATOR:
            return estimators.build("point")
        cls = named_class(ESTIMATOR, estimators, self.estimator)
        # A parameter that a trainer fills in is no flag.
        names = {field.name: f"{cls.name}.{field.name}" for field in parameter_fields(cls)}
        with _flag_named():
            return cls(**{name: self.values[flag] for name, flag in names.items() if flag in self.values})

    @cached_property
    def paper(self) -> dict[str, Any]:
        """The paper's values by flag; without a method those of its own method."""
        method = "grpo" if self.method == methods.NONE else self.method
        return presets.paper(self.estimator) | methods.recipe(method, self.estimator)

    @property
    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters, none for ``--estimator none``."""
        fields = parameter_fields(type(self.built_estimator)) if self.estimator != NO_ESTIMATOR else ()
        return {field.name: getattr(self.built_estimator, field.name) for field in fields}

    @property
    def strategy(self) -> strategies.RolloutStrategy:
        """The rollout strategy. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return chosen.strategy(self.args)

    @property
    def replay(self) -> Replay:
        """What is replayed. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return Replay(self.args.replay.samples, self.args.replay.cache)


@contextlib.contextmanager
def _flag_named() -> Iterator[None]:
    """Turn "NAME.FIELD = VALUE is not in ..." into a UsageError that names the flag."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"--{error}" if re.match(r"\w+\.\w+ ", str(error)) else str(error)) from error


def parse(argv: list[str], *, world_size: int = 1) -> Settings:
    """Return the settings of a command line, without the program's name; imports neither torch nor Ray.

    ``prepare.complete`` adds the values that follow from the store and the data. ``world_size`` is the number of
    processes that the ``deepspeed`` launcher started. Raises UsageError for an unknown flag or name, a value out of
    range, and a combination that OpenRLHF refuses; SystemExit for ``--help``.
    """
    upstream.check_version()
    parser = build_parser(argv)
    values = vars(parser.parse_args([]))
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # the namespace then holds the flags that the command line names
    given = vars(parser.parse_args(argv))
    if not cpu.active():
        cuda.check_machine()
    named, preset = _choose(given)
    origin: dict[str, str] = {}
    for source, layer in _layers(parser, given, named, preset, world_size):
        values |= layer
        origin |= dict.fromkeys(layer, source)
    values |= named
    of_cuda = [cuda.derived] * (named["preset"] != presets.NONE and not cpu.active())
    for derive in (_all_gpus, _reward, _others, *of_cuda):
        for flag, value, why in derive(values, origin):
            values[flag], origin[flag] = value, why
    _fill_in(values, origin)
    command = shlex.join(["openrlhf-dbb", "train", *_words(without_secrets(given))])
    settings = Settings(values, origin, command, preset)
    _ = settings.built_estimator, settings.strategy, settings.replay  # checks them
    _check_template(values["data.input_template"])  # OpenRLHF drops one without {}
    args = upstream.finish_arguments(argparse.Namespace(**values), group_baseline=settings.estimator == NO_ESTIMATOR)
    return dataclasses.replace(settings, values={flag: attrgetter(flag)(args) for flag in settings.values})


def _check_template(template: str | None) -> None:
    """Raise UsageError if a template has no place for the prompt, or another one beside it."""
    prompt = "the prompt"
    try:
        if not template or prompt in template.format(prompt):
            return
        problem = "it has no {} where the prompt goes; put it in"
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        problem = f"{error!r}; only {{}} may stand in it, and other braces are doubled"
    raise UsageError(f"--data.input_template {template!r:.80}: {problem}")


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    for flag, value in flags.items():
        yield f"--no-{flag}" if value is False else f"--{flag}"
        yield from [] if isinstance(value, bool) else map(str, value if isinstance(value, list) else [value])


def _choose(given: Mapping[str, Any]) -> tuple[dict[str, str], presets.Preset]:
    """Return the names of the preset, method and estimator, and the preset without the values that are not used."""
    method, estimator, name = given.get("method"), given.get("estimator"), given.get("preset")
    if estimator not in (None, NO_ESTIMATOR):
        named_class(ESTIMATOR, estimators, estimator)
    if method is not None:
        published = methods.default_estimator(method)
        estimator = estimator or published
    if name is None and MODEL_FLAG in given:
        name = presets.NONE if estimator == NO_ESTIMATOR else presets.DEFAULT
    name = name or ("smollm2" if cpu.active() else "qwen3-1.7b")
    preset = presets.load(name, estimator)
    estimator = estimator or preset.flags.get("estimator", NO_ESTIMATOR)
    unnamed = methods.NONE if estimator == NO_ESTIMATOR else "grpo"
    # Where the command line says which GPUs hold which model, the default preset says nothing.
    placed = any(re.match(r"[\w.]+\.num_(nodes|gpus_per_node|engines)|train\.colocate_", flag) for flag in given)
    if cpu.active() or ("preset" not in given and placed):
        preset = dataclasses.replace(preset, gpus={})
    method = method or preset.flags.get("method", unnamed)
    return {"preset": name, "method": method, "estimator": str(estimator)}, preset


def _layers(
    parser: Parser, given: Mapping[str, Any], named: Mapping[str, str], preset: presets.Preset, world_size: int
) -> Iterator[cuda.Layer]:
    method, estimator = named["method"], named["estimator"]
    if estimator != NO_ESTIMATOR:
        yield "--estimator", {"algo.advantage.estimator": "group_norm"}
    if cpu.active():
        cpu.prepare_driver()
        ranks = ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines")
        yield "no CUDA", cpu.FLAG_DEFAULTS | dict.fromkeys(ranks, world_size)
    else:
        machine.add_shims()
        yield from cuda.layers(machine.look().gpus, with_preset=named["preset"] != presets.NONE)
    for flag, value in (preset.flags | preset.gpus).items():
        source, every_gpu = f"preset {preset.origin[flag]}", value == "all" and flag in cuda.ALL_GPUS
        try:
            parsed = {flag: value} if every_gpu else vars(parser.parse_args(list(_words({flag: value}))))
        except UsageError as error:
            raise UsageError(f"{source} sets --{flag} to {without_secrets(value, flag)!r}: {error}") from error
        yield source, parsed
    if preset.gpus and {**preset.flags, **given}.get("train.async_enable"):
        yield cuda.APART
    if method != methods.NONE:
        recipe = methods.recipe(method, estimator)
        same = methods.same_rollouts(recipe, preset.flags)
        yield f"method {method}", {"method": method, "estimator": estimator} | recipe | same
    yield COMMAND_LINE, given


def _all_gpus(values: Mapping[str, Any], origin: Mapping[str, str]) -> Derived:
    """Yield numbers in place of a preset's "all"; engines of their own GPUs get half."""
    hosts = values["actor.num_nodes"]
    tensor_parallel, devices = max(values["vllm.tensor_parallel_size"], 1), hosts * len(machine.look().gpus)
    apart = bool(values["train.async_enable"])
    engines = max((devices - devices // 2 * apart) // tensor_parallel, 1)
    ranks = (devices - engines * tensor_parallel * apart) // hosts
    for flag in cuda.ALL_GPUS:
        if values[flag] == "all":
            yield flag, max(engines if flag == "vllm.num_engines" else ranks, 1), origin[flag]


def _fill_in(values: dict[str, Any], origin: Mapping[str, str]) -> None:
    values["local_rank"] = -1  # the launcher's value would select a device that an actor cannot see
    values["store.url"] = values["store.url"] or None
    if values["run_name"] is None:
        generic = values["preset"] in (presets.NONE, presets.DEFAULT)
        subject = Path(values[MODEL_FLAG] or "model" if generic else values["preset"].removesuffix(".toml")).name
        named = [values["method"]] if values["method"] not in (methods.NONE, "grpo") else []
        words = re.sub(r"[^\w.+-]", "_", "-".join([*named, values["estimator"].split(":")[-1], subject]))
        values["run_name"] = f"{words}-{datetime.now():%Y%m%d-%H%M%S}".lower()
    if "logger.wandb.run_name" not in origin:
        values["logger.wandb.run_name"] = values["run_name"]
    places = {"run": values["run_name"], "tiny": tiny.default_folder(), "smollm2": smollm2.default_folder()}
    for flag, value in values.items():
        for name, place in places.items():
            if isinstance(value, str):
                values[flag] = value = value.replace(f"{{{name}}}", str(place))
    for flag in OUTPUTS:
        if values[flag]:  # actors may run in another folder
            values[flag] = str(Path(values[flag]).absolute())


def _reward(values: Mapping[str, Any], origin: Mapping[str, str]) -> Derived:
    if tasks.is_spec(values["data.prompt_dataset"] or ""):
        for flag, value in (("data.label_key", "label"), ("reward.remote_url", "reasoning_gym")):
            if origin.get(flag) != COMMAND_LINE:
                yield flag, value, "--data.prompt_dataset"
    url = values["reward.remote_url"]
    if url and re.fullmatch(r"\w+", url):
        path = Path(str(files("openrlhf_dbb.rewards"))) / f"{url}.py"
        if not path.exists():
            raise UsageError(
                f"--reward.remote_url {url!r} is neither a URL, a .py file nor a reward of openrlhf_dbb "
                "(math_answer, exact_match, reasoning_gym); give one of these"
            )
        yield "reward.remote_url", str(path), origin["reward.remote_url"]


def _others(values: Mapping[str, Any], origin: Mapping[str, str]) -> Derived:
    if values["estimator"] == NO_ESTIMATOR:  # OpenRLHF has neither flag
        for flag in ("eval.benchmarks", "eval.top_p"):
            if origin.get(flag) not in (None, COMMAND_LINE):
                yield flag, None, "--estimator none"
    if values["eval.top_p"] is None:
        yield "eval.top_p", values["rollout.top_p"], "--rollout.top_p"
    if origin.get("actor.eps_clip") == COMMAND_LINE != origin.get("actor.eps_clip_low_high"):
        # The range of a preset or method would take the place of --actor.eps_clip in silence.
        yield "actor.eps_clip_low_high", [values["actor.eps_clip"]] * 2, "--actor.eps_clip"
    if values["algo.dynamic_filtering_enable"] and values["rollout.strategy"] == "plain":
        yield "rollout.strategy", "dynamic", "--algo.dynamic_filtering_enable"
    if values["train.partial_rollout_enable"] and origin.get("vllm.enable_prefix_caching") in ("no CUDA", cuda.FAST):
        # It is not known whether the cache forgets the blocks of requests that wait for new weights.
        yield "vllm.enable_prefix_caching", False, "--train.partial_rollout_enable"
    rollouts = chosen.rollouts_of_a_step(upstream.nested(values))
    if origin.get("train.batch_size") == f"preset {presets.DEFAULT}" and rollouts % values["train.batch_size"]:
        half = rollouts // 2 if rollouts % 2 == 0 else rollouts
        yield "train.batch_size", half, "half of a step's rollouts, as in the paper"


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
    _add_ours(parser)
    _add_pieces(parser)
    _add_fields(parser.add_argument_group("replay", _first_line(Replay)), Replay, Replay.name)
    _add_parameters(parser, STRATEGY, strategies, argv)
    _add_parameters(parser, ESTIMATOR, estimators, argv)
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


def named_class(flag: str, registry: Any, name: str) -> Any:
    """Return the class of ``registry`` that the value of a flag names, or raise UsageError."""
    try:
        return registry.get(name)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}{did_you_mean(name, registry.available())}") from error


def _add_parameters(parser: argparse.ArgumentParser, chosen_by: str, registry: Any, argv: Sequence[str]) -> None:
    """Add a flag ``--NAME.FIELD`` for every parameter of the known classes, and of a ``module:Class`` that is named."""
    named = [word.partition("=")[2] for word in argv if word.startswith(f"{chosen_by}=")]
    named += [value for word, value in itertools.pairwise(argv) if word == chosen_by]
    plug_ins = [named_class(chosen_by, registry, name) for name in named[-1:] if ":" in name]
    for name, cls in (registry.available() | {cls.name: cls for cls in plug_ins}).items():
        if parameter_fields(cls):
            _add_fields(parser.add_argument_group(f"{chosen_by} {name}", _first_line(cls)), cls, name)


def _add_fields(group: Any, cls: Any, name: str) -> None:
    """Add a flag ``--NAME.FIELD`` for every parameter of a class to a group of the help."""
    for each in parameter_fields(cls):
        options: dict[str, Any] = {"default": each.default, "help": each.metadata.get("help", "")}
        if isinstance(each.default, bool):
            options["action"] = "store_true"
        else:
            options["help"] += f" (default {each.default})"
            options |= {"type": type(each.default), "choices": each.metadata.get("choices") or None}
        group.add_argument(f"--{name}.{each.name}", **options)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]
