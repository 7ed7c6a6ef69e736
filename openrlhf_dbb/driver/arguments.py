"""Turns a command line into settings: the frozen values of all flags, each with its origin.

The layers, from the bottom: OpenRLHF's defaults, the machine, the preset, the method, the command line. Values that
follow from other flags come last.
"""

import argparse
import contextlib
import copy
import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import chosen, estimators, methods, presets, upstream
from openrlhf_dbb.chosen import COMMAND_LINE, Values
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.advantages import Thinning
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.core.probing import Probing
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.driver.derived import MODEL_FLAG, OUTPUTS, derive
from openrlhf_dbb.driver.flags import ESTIMATOR, HELP_ALL, NO_ESTIMATOR, build_parser, named_class
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.registry import Owner, differing, parameter_fields
from openrlhf_dbb.integrations import hosts
from openrlhf_dbb.options import Parser
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.terminal import shown

__all__ = ["HELP_ALL", "MODEL_FLAG", "NO_ESTIMATOR", "OUTPUTS", "Settings", "build_parser", "parse"]

# OpenRLHF does not see these flags. It sends its arguments to trackers, and some of these hold passwords.
_DRIVERS = (
    "preset",
    "method",
    "estimator",
    "run_name",
    "resume",
    "warm_start",
    "warm_start_weight",
    "warm_start_url",
    "store.url",
    "store.take_over",
    "dry_run",
    "verbose",
)
_SHOWN = ("method", "estimator", "preset")
_HIDDEN = ("logger.wandb.key", "local_rank", *(flag for flag in _DRIVERS if flag not in _SHOWN))
# A command line with one of these says which GPUs hold which model.
_PLACES = r"[\w.]+\.num_(nodes|gpus_per_node|engines)|train\.colocate_"


def _named(flag: str) -> Any:
    return property(lambda settings: settings.values[flag])


@dataclass(frozen=True)
class Settings:
    """The values of all flags. Nothing changes them; :meth:`with_values` returns other settings.

    Attributes:
        values: by flag.
        origin: of each value that is not OpenRLHF's default.
        command: that was given, without secrets.
        preset_read: empty for "none".
        preset: its name, the path of its file, or "none".
        method: its name, or "none".
        estimator: its name, ``module:Class``, or "none" for OpenRLHF's own advantages.
    """

    values: Mapping[str, Any] = field(repr=False)
    origin: Mapping[str, str] = field(repr=False)
    command: str = field(repr=False)
    preset_read: presets.Preset = field(repr=False)

    preset = _named("preset")
    method = _named("method")
    estimator = _named("estimator")
    run_name = _named("run_name")

    def with_values(self, flags: Mapping[str, Any], origin: str) -> "Settings":
        """Return these settings with other values of some flags, and where those come from."""
        return dataclasses.replace(
            self,
            values={**self.values, **flags},
            origin={**self.origin, **dict.fromkeys(flags, origin)},
        )

    def given(self, flag: str) -> bool:
        """Return whether the command line names a flag."""
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
        theirs = {flag: value for flag, value in self.values.items() if flag not in _DRIVERS}
        return upstream.nested(copy.deepcopy(theirs))

    @property
    def flags(self) -> dict[str, Any]:
        """The values that are printed and stored, as JSON holds them; passwords are not among them."""
        values = {}
        for flag in (*_SHOWN, *self.values):
            value = self.values[flag]
            if isinstance(value, float) and not math.isfinite(value):
                value = str(value)
            if flag not in _HIDDEN:
                values[flag] = value
        return dict(without_secrets(values))  # tuples become lists

    @cached_property
    def built_estimator(self) -> estimators.RewardEstimator:
        """The estimator; point for ``--estimator none``. Raises UsageError if a parameter is outside its range."""
        if self.estimator == NO_ESTIMATOR:
            return estimators.build("point")
        cls = named_class(ESTIMATOR, estimators, self.estimator)
        parameters = {}
        for parameter in parameter_fields(cls):
            flag = f"{cls.name}.{parameter.name}"
            if flag in self.values:  # a parameter that a trainer fills in is no flag
                parameters[parameter.name] = self.values[flag]
        with _flag_named():
            return cls(**parameters)

    @cached_property
    def paper(self) -> dict[str, Any]:
        """The paper's values by flag; without a method those of its own method."""
        method = "grpo" if self.method == methods.NONE else self.method
        return presets.paper(self.estimator) | methods.recipe(method, self.estimator)

    @property
    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters, none for ``--estimator none``."""
        if self.estimator == NO_ESTIMATOR:
            return {}
        built = self.built_estimator
        return {field.name: getattr(built, field.name) for field in parameter_fields(type(built))}

    @property
    def strategy(self) -> strategies.RolloutStrategy:
        """The rollout strategy. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return chosen.strategy(self.args)

    @property
    def replay(self) -> Replay:
        """What is replayed. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return chosen.replay(self.args)

    @property
    def probing(self) -> Probing:
        """What is probed. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return chosen.probing(self.args)

    @property
    def plan(self) -> Plan:
        """What the rules of a training's parts read."""
        others: list[Part] = []
        if self.replay.samples:
            others.append(self.replay)
        if self.args.train.thin:
            others.append(Thinning(self.args.train.thin))
        if self.probing.fraction:
            others.append(self.probing)
        model = "reward.model_name_or_path"
        scored_by_model = ""
        if self.values[model] and not self.values["reward.remote_url"]:
            scored_by_model = self.shown(model)
        return Plan(
            self.built_estimator,
            form=self.args.algo.advantage.estimator,
            group=self.args.rollout.n_samples_per_prompt,
            estimator_name=self.estimator,
            real_rewards=scored_by_model,
            names=hosts.OPENRLHF_NAMES,
            strategy=self.strategy,
            host=hosts.OPENRLHF,
            others=others,
            strategy_name=self.args.rollout.strategy,
            late_rewards=scored_by_model,
            early_rewards="give --reward.remote_url",
            rows_bring=self._rows_bring(),
        )

    def _rows_bring(self) -> dict[str, str]:
        """Return what the loss takes of each row beside tokens and the policy's log-probs, as ``Plan`` has it."""
        asks = {}
        level = "algo.advantage.is_correction_level"
        if self.values[level] != "off":
            asks["log-probs of vLLM"] = self.shown(level)
        if self.values["algo.kl.use_loss"]:
            asks["log-probs of the reference model"] = self.shown("algo.kl.use_loss")
        if self.values["data.max_images_per_prompt"]:
            asks["images"] = self.shown("data.max_images_per_prompt")
        return asks


@contextlib.contextmanager
def _flag_named() -> Iterator[None]:
    """Turn "NAME.FIELD = VALUE is not in ..." into a UsageError that names the flag."""
    try:
        yield
    except ValueError as error:
        names_field = re.match(r"\w+\.\w+ ", str(error))
        raise UsageError(f"--{error}" if names_field else str(error)) from error


def parse(argv: list[str], *, world_size: int = 1) -> Settings:
    """Return the settings of a command line, without the program's name; imports neither torch nor Ray.

    ``prepare.prepare`` adds the values that follow from the store, the data and the model. ``world_size`` is the number
    of processes that the ``deepspeed`` launcher started.

    Raises:
        UsageError: a flag or a name is unknown, a value is out of range, or OpenRLHF refuses a combination.
        SystemExit: for ``--help``.
    """
    upstream.check_version()
    parser = build_parser(argv)
    run = Values(vars(parser.parse_args([])), {})
    for action in parser._actions:
        # The namespace then holds the flags that the command line names
        action.default = argparse.SUPPRESS
    given = vars(parser.parse_args(argv))
    if not cpu.active():
        cuda.check_machine()
    names, preset = _choose(given)
    preset = _with_fp32_read(parser, preset, f"preset {names['preset']}")
    for origin, layer in _layers(parser, given, names, preset, world_size):
        run.put(layer, origin)
    run.values.update(names)
    derive(run)
    command = shlex.join(["openrlhf-dbb", "train", *_words(without_secrets(given))])
    settings = _derived(Settings(run.values, run.origin, command, preset))
    _check_template(settings.values["data.input_template"])  # OpenRLHF drops one without {}
    return _finished(settings)


def _derived(settings: Settings) -> Settings:
    """Return the settings with the parameters that follow from others; the owner of each sets it.

    Raises:
        UsageError: a parameter is outside its range.
    """
    plan = settings.plan
    parts: list[Owner] = [settings.built_estimator, settings.strategy]
    for part in parts:
        with _flag_named():
            changed = differing(part, part.derived(plan))
        flags = {f"{part.name}.{field}": value for field, value in changed.items()}
        settings = settings.with_values(flags, f"derived by {part.name}")
    return settings


def _finished(settings: Settings) -> Settings:
    """Return the settings with what OpenRLHF makes of them."""
    flat = argparse.Namespace(**settings.values)
    is_alone = settings.estimator == NO_ESTIMATOR
    args = upstream.finish_arguments(flat, group_baseline=is_alone)
    values = {flag: attrgetter(flag)(args) for flag in settings.values}
    return dataclasses.replace(settings, values=values)


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
    """Yield the words of a command line that gives these flags."""
    for flag, value in flags.items():
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
            continue
        yield f"--{flag}"
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            yield str(part)


def _choose(given: Mapping[str, Any]) -> tuple[dict[str, str], presets.Preset]:
    """Return the names of the preset, method and estimator, and the preset without the values that are not used."""
    estimator = _given_estimator(given)
    name = given.get("preset") or _default_preset(given, estimator)
    preset = presets.load(name, estimator)
    if estimator is None:
        estimator = str(preset.flags.get("estimator", NO_ESTIMATOR))
    if cpu.active() or _places_models(given):
        preset = dataclasses.replace(preset, gpus={})
    method = given.get("method")
    if method is None:
        unnamed = methods.NONE if estimator == NO_ESTIMATOR else "grpo"
        method = preset.flags.get("method", unnamed)
    return {"preset": name, "method": method, "estimator": estimator}, preset


def _given_estimator(given: Mapping[str, Any]) -> str | None:
    """Return the estimator that the command line names, else that of its method, if it names one.

    Raises:
        UsageError: an estimator or a method is unknown.
    """
    estimator: str | None = given.get("estimator")
    if estimator not in (None, NO_ESTIMATOR):
        named_class(ESTIMATOR, estimators, estimator)
    method = given.get("method")
    if method is None:
        return estimator
    published = methods.default_estimator(method)
    return estimator or published


def _default_preset(given: Mapping[str, Any], estimator: str | None) -> str:
    if MODEL_FLAG in given:
        return presets.NONE if estimator == NO_ESTIMATOR else presets.DEFAULT
    return "smollm2" if cpu.active() else "qwen3-1.7b"


def _places_models(given: Mapping[str, Any]) -> bool:
    """Return whether the command line places the models: the default preset then says nothing about that."""
    return "preset" not in given and any(re.match(_PLACES, flag) for flag in given)


def _layers(
    parser: Parser,
    given: Mapping[str, Any],
    names: Mapping[str, str],
    preset: presets.Preset,
    world_size: int,
) -> Iterator[cuda.Layer]:
    """Yield the layers of values from the bottom, each with its origin."""
    if names["estimator"] != NO_ESTIMATOR:
        yield ESTIMATOR, {"algo.advantage.estimator": "group_norm"}
    yield from _of_machine(names, world_size)
    yield from _of_preset(parser, preset)
    if preset.gpus and {**preset.flags, **given}.get("train.async_enable"):
        yield cuda.APART
    if names["method"] != methods.NONE:
        yield _of_method(names, preset)
    yield COMMAND_LINE, given


def _of_machine(names: Mapping[str, str], world_size: int) -> Iterator[cuda.Layer]:
    if cpu.active():
        cpu.prepare_driver()
        ranks = ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines")
        yield machine.NO_CUDA, cpu.FLAG_DEFAULTS | dict.fromkeys(ranks, world_size)
        return
    machine.add_shims()
    yield from cuda.layers(machine.look().gpus, with_preset=names["preset"] != presets.NONE)


def _of_preset(parser: Parser, preset: presets.Preset) -> Iterator[cuda.Layer]:
    """Yield a layer for each flag of a preset."""
    for flag, value in (preset.flags | preset.gpus).items():
        origin = f"preset {preset.origin[flag]}"
        if value == "all" and flag in cuda.ALL_GPUS:
            yield origin, {flag: value}
            continue
        yield origin, _read(parser, origin, flag, value)


def _with_fp32_read(parser: Parser, preset: presets.Preset, origin: str) -> presets.Preset:
    read = {}
    for flag, value in preset.fp32.items():
        read.update(_read(parser, origin, flag, value))
    return dataclasses.replace(preset, fp32=read)


def _read(parser: Parser, origin: str, flag: str, value: Any) -> dict[str, Any]:
    """Return a preset's value of a flag by the flag, read as one of the command line.

    Raises:
        UsageError: the flag is unknown, or its value is none that it takes.
    """
    try:
        return vars(parser.parse_args(list(_words({flag: value}))))
    except UsageError as error:
        told = without_secrets(value, flag)
        raise UsageError(f"{origin} sets --{flag} to {told!r}: {error}") from error


def _of_method(names: Mapping[str, str], preset: presets.Preset) -> cuda.Layer:
    method = names["method"]
    estimator = names["estimator"]
    recipe = methods.recipe(method, estimator)
    chosen_by_name = {"method": method, "estimator": estimator}
    return f"method {method}", chosen_by_name | recipe | methods.same_rollouts(recipe, preset.flags)
