"""The command line: OpenRLHF's flags as they are, ours beside them, presets beneath both.

A value comes from, in this order: the command line, the method, the preset, what the machine needs or what is fast on
it, OpenRLHF's default. Without ``--preset``, a command that names a model uses preset ``default``, or with
``--estimator none`` none at all; one that names no model uses ``tiny`` without CUDA, ``qwen3-1.7b`` with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

from openrlhf_dbb import methods, presets, tiny, upstream
from openrlhf_dbb.driver.flags import (
    NO_ESTIMATOR,
    PROGRAM,
    Parser,
    build_parser,
    estimator_class,
    strategy_class,
)
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.spelling import did_you_mean

MODEL_FLAG = "actor.model_name_or_path"
OUTPUTS = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")


def parse(argv: list[str], *, world_size: int = 1) -> Settings:
    """Parse a command line; imports neither torch nor Ray.

    What follows from the command line alone is filled in; ``preflight.complete`` adds what the store and the data tell.

    Args:
        argv: arguments without the program's name.
        world_size: processes the ``deepspeed`` launcher started, taken as the number of DeepSpeed ranks.

    Raises:
        UsageError: an unknown flag, preset, estimator or strategy, a value out of range, or what OpenRLHF refuses.
        SystemExit: ``--help`` (0).
    """
    early = _early_arguments(argv)
    upstream.check_version()
    parser = build_parser(early.estimator, early.strategy)
    host = machine.look()
    on_cpu = machine.torch_cuda() is None
    devices = max(len(host.gpus), 1)  # none are refused below, behind --help
    name = early.preset or _default_preset(early, on_cpu)
    estimator = early.estimator or (methods.default_estimator(early.method) if early.method else None)
    preset = presets.load(name, estimator)
    estimator = estimator or preset.flags.get("estimator", NO_ESTIMATOR)
    unnamed = methods.NONE if estimator == NO_ESTIMATOR else "grpo"
    method = early.method or preset.flags.get("method", unnamed)
    layers = [("preset " + name, preset.flags), ("method " + method, _method_flags(method, estimator, preset.flags))]
    asynchronous = preset.flags.get("train.async_enable") if early.asynchronous is None else early.asynchronous
    if on_cpu:
        cpu.prepare_driver()
        platform = cpu.FLAG_DEFAULTS | dict.fromkeys(
            ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines"), world_size
        )
        layers = [("no CUDA", platform), *layers]
    else:
        machine.add_shims()
        if early.preset or not _places_models(argv):
            layers.append(("preset " + name, preset.gpus))
            if asynchronous and preset.gpus:
                layers.append(cuda.APART)
        layers = [*cuda.layers(host.gpus, with_preset=name != presets.NONE), *layers]
    if estimator != NO_ESTIMATOR:
        layers = [("--estimator", {"algo.advantage.estimator": "group_norm"}), *layers]
    parallel = {"vllm.tensor_parallel_size": early.tensor_parallel} if early.tensor_parallel else {}
    merged = {flag: value for _, values in [*layers, ("", parallel)] for flag, value in values.items()}
    tensor_parallel = max(merged.get("vllm.tensor_parallel_size", 1), 1)
    engines = cuda.engines(devices, tensor_parallel, apart=bool(asynchronous))
    ranks = devices - engines * tensor_parallel if asynchronous else devices
    origin = _apply(parser, layers, lambda flag: max(engines if flag == "vllm.num_engines" else ranks, 1))
    given = _given(parser, argv)
    flags = vars(parser.parse_args(argv)) | {"preset": name}
    origin |= dict.fromkeys(given, "command line")
    if not on_cpu:
        cuda.check_machine()
        if name != presets.NONE:
            cuda.derive(flags, origin)
    _check_async(flags, origin)
    _fill_placeholders(flags)
    _derive(flags, origin)
    settings = Settings.of(flags, origin, on_cpu=on_cpu)
    _ = settings.parameters  # checks them
    try:
        _ = settings.strategy
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    return dataclasses.replace(settings, values=_finished(settings.values, group_baseline=estimator == NO_ESTIMATOR))


def _early_arguments(argv: list[str]) -> argparse.Namespace:
    early = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    early.add_argument("--estimator", default=None)
    early.add_argument("--preset", default=None)
    early.add_argument("--method", default=None)
    early.add_argument("--rollout.strategy", dest="strategy", default=None)
    early.add_argument("--train.async_enable", dest="asynchronous", action="store_true", default=None)
    early.add_argument("--no-train.async_enable", dest="asynchronous", action="store_false")
    early.add_argument("--vllm.tensor_parallel_size", dest="tensor_parallel", type=int)
    early.add_argument(f"--{MODEL_FLAG}", dest="model", default=None)
    known = early.parse_known_args(argv)[0]
    if known.estimator not in (None, NO_ESTIMATOR):
        estimator_class(known.estimator)
    if known.strategy is not None:
        strategy_class(known.strategy)
    if known.method is not None:
        methods.check_name(known.method)
    return known


def _method_flags(method: str, estimator: str, preset: Mapping[str, Any]) -> dict[str, Any]:
    if method == methods.NONE:
        return {}
    values = {flag: entry.value for flag, entry in methods.recipe(method, estimator).items()}
    return {"method": method, "estimator": estimator} | values | methods.same_rollouts(values, preset)


def _default_preset(early: argparse.Namespace, on_cpu: bool) -> str:
    if early.model is not None:
        return presets.NONE if early.estimator == NO_ESTIMATOR else presets.DEFAULT
    return "tiny" if on_cpu else "qwen3-1.7b"


def _places_models(argv: list[str]) -> bool:
    """Whether the command line says which GPUs hold what; the default preset then has no say in it."""
    return any(re.match(r"--(no-)?([\w.]+\.num_(nodes|gpus_per_node|engines)|train\.colocate_)", word) for word in argv)


def _apply(
    parser: argparse.ArgumentParser, layers: list[tuple[str, dict[str, Any]]], everything: Callable[[str], int]
) -> dict[str, str]:
    """Make the layers' values the parser's defaults, later ones over earlier ones; where each comes from.

    Args:
        everything: what "all" means for a flag.
    """
    actions = {action.dest: action for action in parser._actions if action.default is not argparse.SUPPRESS}
    origin: dict[str, str] = {}
    for source, values in layers:
        for flag, value in values.items():
            if flag not in actions:
                raise UsageError(f"{source} sets --{flag}, which there is not{did_you_mean(flag, actions)}")
            values = values | {flag: everything(flag) if value == "all" else _checked(actions[flag], value, source)}
        parser.set_defaults(**values)
        origin |= dict.fromkeys(values, source)
    return origin


def _checked(action: argparse.Action, value: Any, source: str) -> Any:
    """A value from a file, if the flag could have it on the command line."""
    kind: Any = bool if action.nargs == 0 else action.type or str
    listed = action.nargs in (2, "+", "*")
    each = value if isinstance(value, list) else [value]
    fits = all(type(one) in ((int, float) if kind is float else (kind,)) for one in each)
    if not fits or listed != isinstance(value, list) or (action.choices and value not in action.choices):
        allowed = ", ".join(map(str, action.choices)) if action.choices else f"{'a list of ' * listed}{kind.__name__}"
        raise UsageError(f"{source} sets --{action.dest} to {value!r}; allowed: {allowed}")
    return value


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


def _check_async(flags: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    """Refuse what OpenRLHF asserts about asynchronous training, or takes in silence.

    Raises:
        UsageError: naming the flags, the values, and what to do.
    """
    batch, generated = flags["rollout.batch_size"], flags["rollout.vllm_generate_batch_size"]
    if generated is not None and generated < batch:
        raise UsageError(
            f"--rollout.vllm_generate_batch_size {generated} is less than --rollout.batch_size {batch}, so that steps "
            f"would be short of rollouts; give {batch} or more, or leave it out"
        )
    if flags["train.async_enable"]:
        if flags["train.async_queue_size"] < 1:
            raise UsageError(
                f"--train.async_queue_size {flags['train.async_queue_size']} is below 1; it says how many batches may "
                "be generated ahead of the training"
            )
        if flags["vllm.enable_sleep"]:
            raise UsageError(
                f"--vllm.enable_sleep [{origin['vllm.enable_sleep']}] does not go with --train.async_enable: the "
                "engines generate while the policy trains; give --no-vllm.enable_sleep"
            )
        return
    for flag, asked, why in (
        ("train.partial_rollout_enable", flags["train.partial_rollout_enable"], "generation goes on over weight syncs"),
        (
            "train.async_queue_size",
            origin.get("train.async_queue_size") == "command line",
            "batches are generated ahead of the training",
        ),
        (
            "rollout.vllm_generate_batch_size",
            generated is not None and generated > batch,
            f"more than --rollout.batch_size {batch} are generated for at once",
        ),
    ):
        if asked:
            shown = "" if flags[flag] is True else f" {flags[flag]}"
            raise UsageError(f"--{flag}{shown}: {why} with --train.async_enable only; give both, or neither")


def _fill_placeholders(flags: dict[str, Any]) -> None:
    """The run's name, and what texts stand for: ``{run}``, ``{tiny}``, a relative folder, a reward of this package."""
    if flags["run_name"] is None:
        generic = flags["preset"] in (presets.NONE, presets.DEFAULT)
        subject = (
            Path(flags[MODEL_FLAG] or "model").name if generic else Path(flags["preset"]).name.removesuffix(".toml")
        )
        named = [flags["method"]] if flags["method"] not in (methods.NONE, "grpo") else []
        named += [flags["estimator"].split(":")[-1], subject]
        words = re.sub(r"[^\w.+-]", "_", "-".join(named))
        flags["run_name"] = f"{words}-{datetime.now():%Y%m%d-%H%M%S}".lower()
    for name, value in flags.items():
        if isinstance(value, str):
            flags[name] = value.replace("{run}", flags["run_name"]).replace("{tiny}", str(tiny.default_folder()))
    for name in OUTPUTS:
        if flags[name]:  # actors may run in another folder
            flags[name] = str(Path(flags[name]).absolute())
    url = flags["reward.remote_url"]
    if url and re.fullmatch(r"\w+", url):
        path = Path(str(files("openrlhf_dbb.rewards"))) / f"{url}.py"
        if not path.exists():
            raise UsageError(
                f"--reward.remote_url {url!r} is neither a URL, a .py file nor a reward of openrlhf_dbb "
                "(math_answer, exact_match, last_result); give one of these"
            )
        flags["reward.remote_url"] = str(path)


def _derive(flags: dict[str, Any], origin: dict[str, str]) -> None:
    """Values that follow from other flags, among them OpenRLHF's own switch for dynamic sampling."""
    flags["store.url"] = flags["store.url"] or None
    flags["local_rank"] = -1  # the launcher's; in an actor it would select a device the actor cannot see
    if flags["estimator"] == NO_ESTIMATOR:  # OpenRLHF has neither
        for flag in ("eval.benchmarks", "eval.top_p"):
            if origin.get(flag) != "command line":
                flags[flag] = None
                origin.pop(flag, None)
    if flags["eval.top_p"] is None:
        flags["eval.top_p"], origin["eval.top_p"] = flags["rollout.top_p"], "--rollout.top_p"
    if "logger.wandb.run_name" not in origin:
        flags["logger.wandb.run_name"] = flags["run_name"]
    if flags["algo.dynamic_filtering_enable"] and flags["rollout.strategy"] == "plain":
        flags["rollout.strategy"] = "dynamic"
        origin["rollout.strategy"] = "--algo.dynamic_filtering_enable"
    rollouts = flags["rollout.batch_size"] * flags["rollout.n_samples_per_prompt"]
    if origin.get("train.batch_size") == f"preset {presets.DEFAULT}" and rollouts % flags["train.batch_size"]:
        flags["train.batch_size"] = rollouts // 2 if rollouts % 2 == 0 else rollouts
        origin["train.batch_size"] = "half of a step's rollouts, as in the paper"


def _finished(values: Mapping[str, Any], *, group_baseline: bool) -> dict[str, Any]:
    """The values after OpenRLHF's own checks and adjustments."""
    args = upstream.finish_arguments(argparse.Namespace(**values), group_baseline=group_baseline)
    return {flag: attrgetter(flag)(args) for flag in values}
