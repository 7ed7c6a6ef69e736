"""Turns a command line into settings: the frozen values of all flags, each with its origin.

The layers, from the bottom: OpenRLHF's defaults, the machine, the preset, the method, the command line. Values that
follow from other flags come last.
"""

import argparse
import contextlib
import copy
import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import estimators, methods, presets, tasks, tiny, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.driver.capacity import Shape
from openrlhf_dbb.driver.flags import ESTIMATOR, NO_ESTIMATOR, STRATEGY, build_parser, named_class
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.parameters import parameter_fields
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.secrets import without_secrets

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
    shape: Shape | None = None  # of a dense model; known once its configuration has been read

    preset = _named("preset")  # or the path of its file, or "none"
    method = _named("method")  # or "none"
    estimator = _named("estimator")  # or ``module:Class``, or "none" for OpenRLHF's own advantages
    run_name = _named("run_name")

    def with_values(self, flags: Mapping[str, Any], origin: str) -> "Settings":
        """Return these settings with other values of some flags, and where those come from."""
        return dataclasses.replace(
            self, values={**self.values, **flags}, origin={**self.origin, **dict.fromkeys(flags, origin)}
        )

    def given(self, flag: str) -> bool:
        return self.origin.get(flag) == COMMAND_LINE

    @cached_property
    def args(self) -> SimpleNamespace:
        """All values as OpenRLHF's code reads them (``args.actor.adam.lr``)."""
        return upstream.nested(self.values)

    def openrlhf_args(self) -> SimpleNamespace:
        """Return a copy of the arguments for OpenRLHF, which changes it, without the flags of the driver."""
        return upstream.nested(copy.deepcopy({k: value for k, value in self.values.items() if k not in _DRIVERS}))

    @property
    def flags(self) -> dict[str, Any]:
        """The values that are printed and stored; passwords are not among them."""
        first = {flag: self.values[flag] for flag in _SHOWN}
        return dict(without_secrets(first | {k: value for k, value in self.values.items() if k not in _HIDDEN}))

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

    @property
    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters, none for ``--estimator none``."""
        fields = parameter_fields(type(self.built_estimator)) if self.estimator != NO_ESTIMATOR else ()
        return {field.name: getattr(self.built_estimator, field.name) for field in fields}

    @property
    def strategy(self) -> strategies.RolloutStrategy:
        """The rollout strategy. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return strategies.of(self.args)


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
    if not cpu.active():
        _use_all_gpus(values, preset.gpus)
    for derive in (_reward, _others, *[cuda.derived] * (not cpu.active() and named["preset"] != presets.NONE)):
        for flag, value, why in derive(values, origin):
            values[flag], origin[flag] = value, why
    _fill_in(values, origin)
    command = shlex.join(["openrlhf-dbb", "train", *_words(without_secrets(given))])
    settings = Settings(values, origin, command)
    _ = settings.built_estimator, settings.strategy  # checks them
    args = upstream.finish_arguments(
        argparse.Namespace(**settings.values), group_baseline=settings.estimator == NO_ESTIMATOR
    )
    return dataclasses.replace(settings, values={flag: attrgetter(flag)(args) for flag in settings.values})


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    for flag, value in flags.items():
        yield f"--no-{flag}" if value is False else f"--{flag}"
        yield from [] if isinstance(value, bool) else map(str, value if isinstance(value, list) else [value])


def _choose(given: Mapping[str, Any]) -> tuple[dict[str, str], presets.Preset]:
    """Return the names of the preset, method and estimator, and the preset without the values that are not used."""
    method, estimator, name = given.get("method"), given.get("estimator"), given.get("preset")
    if estimator not in (None, NO_ESTIMATOR):
        named_class(ESTIMATOR, estimators, estimator)
    if "rollout.strategy" in given:
        named_class(STRATEGY, strategies, given["rollout.strategy"])
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
    parser: argparse.ArgumentParser,
    given: Mapping[str, Any],
    named: Mapping[str, str],
    preset: presets.Preset,
    world_size: int,
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
    both = preset.flags | preset.gpus
    for name in dict.fromkeys(preset.origin.values()):
        own = {flag: value for flag, value in both.items() if preset.origin[flag] == name}
        yield f"preset {name}", _parsed(parser, own, f"preset {name}")
    if preset.gpus and {**preset.flags, **given}.get("train.async_enable"):
        yield cuda.APART
    if method != methods.NONE:
        recipe = methods.recipe(method, estimator)
        same = methods.same_rollouts(recipe, preset.flags)
        yield f"method {method}", {"method": method, "estimator": estimator} | recipe | same
    yield COMMAND_LINE, given


def _parsed(parser: argparse.ArgumentParser, flags: Mapping[str, Any], source: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for flag, value in flags.items():
        try:
            every_gpu = value == "all" and flag in cuda.ALL_GPUS
            parsed |= {flag: value} if every_gpu else vars(parser.parse_args(list(_words({flag: value}))))
        except UsageError as error:
            raise UsageError(f"{source} sets --{flag} to {without_secrets(value, flag)!r}: {error}") from error
    return parsed


def _use_all_gpus(values: dict[str, Any], gpus: Mapping[str, Any]) -> None:
    """Replace "all" in the values that a preset's ``[gpus]`` sets; engines of their own GPUs get half."""
    hosts = values["actor.num_nodes"]
    tensor_parallel, devices = max(values["vllm.tensor_parallel_size"], 1), hosts * len(machine.look().gpus)
    apart = bool(values["train.async_enable"])
    engines = max((devices - devices // 2 * apart) // tensor_parallel, 1)
    ranks = (devices - engines * tensor_parallel * apart) // hosts
    for flag in gpus:
        if values[flag] == "all":
            values[flag] = max(engines if flag == "vllm.num_engines" else ranks, 1)


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
    rollouts = values["rollout.batch_size"] * values["rollout.n_samples_per_prompt"]
    if origin.get("train.batch_size") == f"preset {presets.DEFAULT}" and rollouts % values["train.batch_size"]:
        half = rollouts // 2 if rollouts % 2 == 0 else rollouts
        yield "train.batch_size", half, "half of a step's rollouts, as in the paper"
