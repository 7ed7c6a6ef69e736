"""The command line: OpenRLHF's flags as they are, ours beside them, presets beneath both.

A value comes from, in this order: the command line, the preset, what the platform needs (no CUDA),
OpenRLHF's default. A preset is used when asked for, or by default when no model is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import cpu, methods, presets, upstream
from openrlhf_dbb.driver.flags import (
    CONSTANT_LENGTH,
    NO_ESTIMATOR,
    build_parser,
    estimator_class,
    estimator_parameters,
)
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.tiny import model as tiny_model

MODEL_FLAG = "actor.model_name_or_path"
# Never printed, stored or sent to a tracker.
SECRET_FLAGS = ("store.url", "warm_start_url", "logger.wandb.key")


@dataclass
class Settings:
    """A parsed command line.

    Attributes:
        args: OpenRLHF's nested namespace (``args.actor.adam.lr``) without the fields below.
        preset: name of the preset, or "none".
        method: name of the training method, or "none".
        estimator: registered name or ``module:Class``, or "none" for OpenRLHF's own advantages.
        parameters: the estimator's parameters.
        run_name: name of a new run.
        resume: run to continue, "" for the newest unfinished one, None to start a new run.
        warm_start, warm_start_weight, warm_start_url: see the flags.
        store_url: the database, None for the default.
        take_over: continue a run that another machine owns.
        verbose: show the output of all workers.
        flags: every flag's effective value by name, without the secret ones.
        origin: where each value that is not OpenRLHF's default comes from.
    """

    args: SimpleNamespace
    preset: str
    method: str
    estimator: str
    parameters: dict[str, Any]
    run_name: str
    resume: str | None
    warm_start: str | None
    warm_start_weight: float
    warm_start_url: str | None = dataclasses.field(repr=False)
    store_url: str | None = dataclasses.field(repr=False)
    take_over: bool
    verbose: bool
    flags: dict[str, Any]
    origin: dict[str, str]


def parse(argv: list[str], *, world_size: int = 1) -> Settings:
    """Parse a command line.

    Args:
        argv: arguments without the program's name.
        world_size: processes the ``deepspeed`` launcher started, taken as the number of DeepSpeed ranks.

    Raises:
        UsageError: an unknown preset or estimator, a parameter out of range, or what OpenRLHF refuses.
        SystemExit: argparse's own errors (2) and ``--help`` (0).
    """
    early = _early_arguments(argv)
    upstream.check_version()
    parser = build_parser(early.estimator)
    on_cpu = cpu.active()
    preset = early.preset or _default_preset(early.model, on_cpu)
    method = early.method or presets.method_of(preset) or methods.NONE
    estimator = early.estimator or (methods.default_estimator(early.method) if early.method else None)
    flags = presets.load(preset, estimator)
    estimator = estimator or flags.get("estimator", NO_ESTIMATOR)
    layers = [("preset " + preset, flags), ("method " + method, _method_flags(method, estimator))]
    if on_cpu:
        cpu.prepare_driver()
        platform = cpu.FLAG_DEFAULTS | dict.fromkeys(
            ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines"), world_size
        )
        layers = [("no CUDA", platform), *layers]
    if estimator != NO_ESTIMATOR:
        layers = [("--estimator", {"algo.advantage.estimator": "group_norm"}), *layers]
    origin = _apply(parser, layers)
    given = _given(parser, argv)
    flat = parser.parse_args(argv)
    origin |= dict.fromkeys(given, "command line")
    return _settle(flat, preset, origin)


def lookup(args: SimpleNamespace, flag: str) -> Any:
    """The value of ``flag`` in OpenRLHF's nested namespace, after its own adjustments."""
    return functools.reduce(getattr, flag.split("."), args)


def fill_in(settings: Settings, flag: str, value: Any, origin: str) -> None:
    """Give ``flag`` a value that is known only after parsing."""
    *sections, name = flag.split(".")
    setattr(lookup(settings.args, ".".join(sections)), name, value)
    settings.flags[flag] = value
    settings.origin[flag] = origin


def _early_arguments(argv: list[str]) -> argparse.Namespace:
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--estimator", default=None)
    early.add_argument("--preset", default=None)
    early.add_argument("--method", default=None)
    early.add_argument(f"--{MODEL_FLAG}", dest="model", default=None)
    known = early.parse_known_args(argv)[0]
    if known.estimator not in (None, NO_ESTIMATOR):
        estimator_class(known.estimator)
    if known.method is not None:
        methods.check_name(known.method)
    return known


def _method_flags(method: str, estimator: str) -> dict[str, Any]:
    if method == methods.NONE:
        return {}
    values = {flag: entry.value for flag, entry in methods.recipe(method, estimator).items()}
    return {"method": method, "estimator": estimator} | values


def _default_preset(model: str | None, on_cpu: bool) -> str:
    if model is not None:
        return presets.NONE
    return "tiny" if on_cpu else "qwen3-1.7b"


def _apply(parser: argparse.ArgumentParser, layers: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    known = {action.dest for action in parser._actions}
    origin: dict[str, str] = {}
    for source, values in layers:
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"{source} sets --{unknown[0]}, which this OpenRLHF does not have")
        values = {flag: _gpu_count() if value == "all" else value for flag, value in values.items()}
        parser.set_defaults(**values)
        origin |= dict.fromkeys(values, source)
    return origin


def _gpu_count() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def _given(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Names of the flags on the command line."""
    defaults = [(action, action.default) for action in parser._actions]
    stored, parser._defaults = parser._defaults, {}
    for action, _ in defaults:
        action.default = argparse.SUPPRESS
    try:
        return list(vars(parser.parse_args(argv)))
    finally:
        parser._defaults = stored
        for action, default in defaults:
            action.default = default


def _settle(flat: argparse.Namespace, preset: str, origin: dict[str, str]) -> Settings:
    flags = vars(flat)
    if not flags["store.url"]:
        flags["store.url"] = None
    estimator = flags["estimator"]
    parameters = {} if estimator == NO_ESTIMATOR else estimator_parameters(estimator, flags)
    _fill_placeholders(flags, preset)
    ours = {
        name: flags.pop(name)
        for name in (
            "preset",
            "method",
            "run_name",
            "resume",
            "warm_start",
            "warm_start_weight",
            "warm_start_url",
            "store.url",
            "store.take_over",
            "verbose",
            "estimator",
        )
    }
    if ours["resume"] is not None and ours["warm_start"] is not None:
        raise UsageError("--resume continues a run, --warm_start begins a new one; give one of them")
    if not 0 < ours["warm_start_weight"] <= 1:
        raise UsageError(f"--warm_start_weight {ours['warm_start_weight']} is not in (0, 1]")
    _check_probes(flags, estimator)
    _fill_pieces(flags, origin)
    flags["local_rank"] = -1  # the launcher's; in an actor it would select a device the actor cannot see
    flags["logger.wandb.run_name"] = (
        flags["logger.wandb.run_name"] if "logger.wandb.run_name" in origin else ours["run_name"]
    )
    args = upstream.finish_arguments(argparse.Namespace(**flags), group_baseline=estimator == NO_ESTIMATOR)
    shown = {name: lookup(args, name) for name in flags if name not in SECRET_FLAGS and name != "local_rank"}
    return Settings(
        args=args,
        preset=preset,
        method=ours["method"],
        estimator=estimator,
        parameters=parameters,
        run_name=ours["run_name"],
        resume=ours["resume"],
        warm_start=ours["warm_start"],
        warm_start_weight=ours["warm_start_weight"],
        warm_start_url=ours["warm_start_url"],
        store_url=ours["store.url"],
        take_over=ours["store.take_over"],
        verbose=ours["verbose"],
        flags={"method": ours["method"], "estimator": estimator, "preset": preset} | shown,
        origin=origin,
    )


def _check_probes(flags: dict[str, Any], estimator: str) -> None:
    fraction, samples = flags["probe.fraction"], flags["probe.samples"]
    if not 0 <= fraction <= 1:
        raise UsageError(f"--probe.fraction {fraction} is not in [0, 1]; 0.1 probes a tenth of the prompts")
    if samples < 2:
        raise UsageError(f"--probe.samples {samples} is below 2: a single response does not tell its noise")
    if fraction and estimator == NO_ESTIMATOR:
        raise UsageError(f"--probe.fraction {fraction} measures an estimator; --estimator is {NO_ESTIMATOR}, name one")


def _fill_pieces(flags: dict[str, Any], origin: dict[str, str]) -> None:
    """Values that follow from other flags: OpenRLHF's own switch for dynamic sampling, and lengths."""
    if flags["algo.dynamic_filtering_enable"] and flags["rollout.strategy"] == "plain":
        flags["rollout.strategy"] = "dynamic"
        origin["rollout.strategy"] = "--algo.dynamic_filtering_enable"
    batch = flags["rollout.batch_size"]
    for flag, used, value, source in (
        ("greso.batch", flags["rollout.strategy"] == "greso", batch * 3 // 2, "1.5 x --rollout.batch_size"),
        ("greso.min_batch", flags["rollout.strategy"] == "greso", -(-batch // 2), "--rollout.batch_size / 2"),
        (
            "actor.loss_agg_length",
            flags["actor.loss_agg_mode"] == CONSTANT_LENGTH,
            flags["rollout.max_new_tokens"],
            "--rollout.max_new_tokens",
        ),
    ):
        if used and flags[flag] is None:
            flags[flag] = value
            origin[flag] = source


def _fill_placeholders(flags: dict[str, Any], preset: str) -> None:
    if flags["run_name"] is None:
        subject = preset if preset != presets.NONE else Path(flags[MODEL_FLAG] or "model").name
        named = [flags["method"]] if flags["method"] not in (methods.NONE, "grpo") else []
        named += [flags["estimator"].split(":")[-1], subject]
        flags["run_name"] = f"{'-'.join(named)}-{datetime.now():%Y%m%d-%H%M%S}".lower()
    if not re.fullmatch(r"[\w.+-]+", flags["run_name"]):
        raise UsageError(f"--run_name {flags['run_name']!r}: use letters, digits and . _ + - only (it names folders)")
    for name, value in flags.items():
        if isinstance(value, str):
            flags[name] = value.replace("{run}", flags["run_name"]).replace("{tiny}", str(tiny_model.default_folder()))
    url = flags["reward.remote_url"]
    if url and re.fullmatch(r"\w+", url):
        path = Path(str(files("openrlhf_dbb.rewards"))) / f"{url}.py"
        if not path.exists():
            raise UsageError(
                f"--reward.remote_url {url!r} is neither a URL, a .py file nor a reward of openrlhf_dbb "
                "(math_answer, exact_match); give one of these"
            )
        flags["reward.remote_url"] = str(path)
