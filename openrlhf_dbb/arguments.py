"""The command line: OpenRLHF's flags as they are, ours beside them, presets beneath both.

A value comes from, in this order: the command line, the preset, what the platform needs (no CUDA),
OpenRLHF's default. A preset is used when asked for, or by default when no model is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import estimators
from openrlhf_dbb import cpu, presets, upstream
from openrlhf_dbb.errors import UsageError

NO_ESTIMATOR = "none"
MODEL_FLAG = "actor.model_name_or_path"
# Never printed, stored or sent to a tracker.
SECRET_FLAGS = ("store.url", "warm_start_url", "logger.wandb.key")


@dataclass
class Settings:
    """A parsed command line.

    Attributes:
        args: OpenRLHF's nested namespace (``args.actor.adam.lr``) without the fields below.
        preset: name of the preset, or "none".
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
    layers = [("preset " + preset, presets.load(preset, early.estimator))]
    if on_cpu:
        cpu.prepare_driver()
        platform = cpu.FLAG_DEFAULTS | dict.fromkeys(
            ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines"), world_size
        )
        layers = [("no CUDA", platform), *layers]
    origin = _apply(parser, layers)
    given = _given(parser, argv)
    if early.estimator and early.estimator != NO_ESTIMATOR and not (preset != presets.NONE or "algo.advantage.estimator" in given):
        parser.set_defaults(**{"algo.advantage.estimator": "group_norm"})
        origin["algo.advantage.estimator"] = "--estimator"
    flat = parser.parse_args(argv)
    origin |= dict.fromkeys(given, "command line")
    return _settle(flat, preset, origin)


def build_parser(estimator: str | None = None) -> argparse.ArgumentParser:
    """OpenRLHF's parser with our flags added.

    Args:
        estimator: a ``module:Class`` whose parameters become flags beside those of the known estimators.
    """
    parser = upstream.build_parser()
    parser.prog = "train_grpo"
    parser.usage = "deepspeed --module openrlhf_dbb.cli.train_grpo [--estimator NAME] [--preset NAME] [flags]"
    parser.description = "GRPO with stored reward posteriors. Bare, it trains: a small model without CUDA, the paper's Qwen3-1.7B setting with it."
    parser.epilog = "All other flags are OpenRLHF's own. A switch that a preset turns on is turned off by --no-NAME, as in --no-train.colocate_all."
    ours = parser.add_argument_group("openrlhf_dbb")
    add = ours.add_argument
    add("--estimator", default=NO_ESTIMATOR, metavar="NAME", help=f"reward estimator: {', '.join(estimators.available())}, module:Class, or {NO_ESTIMATOR} (OpenRLHF's own advantages)")
    add("--preset", default=None, metavar="NAME", help=f"flag values to start from: {', '.join(presets.names())}, or {presets.NONE}; by default tiny without CUDA and qwen3-1.7b with it, and none when a model is named")
    add("--run_name", default=None, help="name of the run in the store; default: estimator, preset or model, and the time")
    add("--resume", nargs="?", const="", default=None, metavar="RUN", help="continue a run from its last checkpoint; without a name the newest unfinished one")
    add("--warm_start", default=None, metavar="RUN", help="start from the final posteriors of another run (name, uuid or number)")
    add("--warm_start_weight", type=float, default=1.0, help="in (0, 1]: multiplies the imported counts")
    add("--warm_start_url", default=None, metavar="URL", help="database of that run, if another")
    add("--store.url", default=None, metavar="URL", help="SQLAlchemy URL of the posterior store; better set $OPENRLHF_DBB_STORE_URL when it holds a password; default sqlite:///openrlhf_dbb.db")
    add("--store.take_over", action="store_true", default=False, help="continue a run owned by a process on another machine that is known to be dead")
    add("--data.max_prompt_len", type=int, default=None, help="drop prompts of more tokens than this")
    add("--data.drop_duplicates", action="store_true", default=False, help="keep the first of prompts with equal text")
    add("--data.cut_to_batches", action="store_true", default=False, help="drop the last prompts that do not fill a rollout batch")
    add("--verbose", action="store_true", default=False, help="show the output of all workers")
    for name, cls in _estimator_classes(estimator).items():
        _add_estimator_flags(parser, name, cls)
    # A preset can turn a switch on, and the command line must win over it.
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(f"--no-{action.dest}", dest=action.dest, action="store_false", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    return parser


def lookup(args: SimpleNamespace, flag: str) -> Any:
    """The value of ``flag`` in OpenRLHF's nested namespace, after its own adjustments."""
    return functools.reduce(getattr, flag.split("."), args)


def tiny_folder() -> Path:
    """Where the tiny preset's model and data are made once and kept: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "openrlhf_dbb" / "tiny"


def parameters_of(estimator: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The estimator's parameters among ``flags``."""
    cls = _get(estimator)
    return {field.name: flags[f"{_prefix(estimator, cls)}.{field.name}"] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def _early_arguments(argv: list[str]) -> argparse.Namespace:
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--estimator", default=None)
    early.add_argument("--preset", default=None)
    early.add_argument(f"--{MODEL_FLAG}", dest="model", default=None)
    known = early.parse_known_args(argv)[0]
    if known.estimator not in (None, NO_ESTIMATOR):
        _get(known.estimator)
    return known


def _get(name: str) -> type[estimators.RewardEstimator]:
    try:
        return estimators.get(name)
    except ValueError as error:
        raise UsageError(f"--estimator: {error}") from error


def _default_preset(model: str | None, on_cpu: bool) -> str:
    if model is not None:
        return presets.NONE
    return "tiny" if on_cpu else "qwen3-1.7b"


def _estimator_classes(extra: str | None) -> dict[str, type[estimators.RewardEstimator]]:
    classes = dict(estimators.available())
    if extra and ":" in extra:
        cls = _get(extra)
        classes[_prefix(extra, cls)] = cls
    return classes


def _prefix(name: str, cls: type[estimators.RewardEstimator]) -> str:
    return cls.name if ":" in name else name


def _add_estimator_flags(parser: argparse.ArgumentParser, name: str, cls: type[estimators.RewardEstimator]) -> None:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    if not fields:
        return
    summary = (cls.__doc__ or name).strip().splitlines()[0]
    group = parser.add_argument_group(f"--estimator {name}", summary)
    for field in fields:
        text = field.metadata.get("help", "")
        flag = f"--{name}.{field.name}"
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            group.add_argument(flag, type=type(field.default), default=field.default, help=f"{text} (default {field.default})")


def _apply(parser: argparse.ArgumentParser, layers: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    known = {action.dest for action in parser._actions}
    origin = {}
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
    parameters: dict[str, Any] = {}
    if estimator != NO_ESTIMATOR:
        parameters = parameters_of(estimator, flags)
        try:
            estimators.build(estimator, **parameters)
        except ValueError as error:
            raise UsageError(f"--{error}" if "." in str(error).split(" ")[0] else str(error)) from error
    _fill_placeholders(flags, preset)
    ours = {name: flags.pop(name) for name in ("preset", "run_name", "resume", "warm_start", "warm_start_weight", "warm_start_url", "store.url", "store.take_over", "verbose", "estimator")}
    if ours["resume"] is not None and ours["warm_start"] is not None:
        raise UsageError("--resume continues a run, --warm_start begins a new one; give one of them")
    if not 0 < ours["warm_start_weight"] <= 1:
        raise UsageError(f"--warm_start_weight {ours['warm_start_weight']} is not in (0, 1]")
    flags["local_rank"] = -1  # the launcher's; in an actor it would select a device the actor cannot see
    flags["logger.wandb.run_name"] = flags["logger.wandb.run_name"] if "logger.wandb.run_name" in origin else ours["run_name"]
    args = upstream.finish_arguments(argparse.Namespace(**flags))
    shown = {name: lookup(args, name) for name in flags if name not in SECRET_FLAGS and name != "local_rank"}
    return Settings(
        args=args,
        preset=preset,
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
        flags={"estimator": estimator, "preset": preset} | shown,
        origin=origin,
    )


def _fill_placeholders(flags: dict[str, Any], preset: str) -> None:
    if flags["run_name"] is None:
        subject = preset if preset != presets.NONE else Path(flags[MODEL_FLAG] or "model").name
        flags["run_name"] = f"{flags['estimator'].split(':')[-1]}-{subject}-{datetime.now():%Y%m%d-%H%M%S}".lower()
    if not re.fullmatch(r"[\w.+-]+", flags["run_name"]):
        raise UsageError(f"--run_name {flags['run_name']!r}: use letters, digits and . _ + - only (it names folders)")
    for name, value in flags.items():
        if isinstance(value, str):
            flags[name] = value.replace("{run}", flags["run_name"]).replace("{tiny}", str(tiny_folder()))
    url = flags["reward.remote_url"]
    if url and re.fullmatch(r"\w+", url):
        path = Path(str(files("openrlhf_dbb.rewards"))) / f"{url}.py"
        if not path.exists():
            raise UsageError(f"--reward.remote_url {url!r} is neither a URL, a .py file nor a reward of openrlhf_dbb (math_answer)")
        flags["reward.remote_url"] = str(path)
