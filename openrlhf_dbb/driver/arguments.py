"""Turns a command line into settings: layers of flag values, the later ones over the earlier ones.

The layers, from the bottom: OpenRLHF's defaults, the machine, the preset, the method, the command line. Values that
follow from other flags come last. Every value keeps its origin. Without ``--preset``, a command that names a model uses
preset ``default``, or none with ``--estimator none``. A command that names no model uses ``smollm2`` without CUDA and
``qwen3-1.7b`` with CUDA.
"""

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

from openrlhf_dbb import estimators, methods, presets, tasks, tiny, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.driver.flags import ESTIMATOR, NO_ESTIMATOR, STRATEGY, build_parser, named_class
from openrlhf_dbb.driver.settings import COMMAND_LINE, Settings
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.presets import smollm2
from openrlhf_dbb.secrets import without_secrets

MODEL_FLAG = "actor.model_name_or_path"
OUTPUTS = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")


def parse(argv: list[str], *, world_size: int = 1) -> Settings:
    """Return the settings of a command line; imports neither torch nor Ray.

    ``preflight.complete`` adds the values that follow from the store and the data.

    Args:
        argv: the arguments without the program's name.
        world_size: processes that the ``deepspeed`` launcher started: the number of DeepSpeed ranks.

    Raises:
        UsageError: an unknown flag or name, a value out of range, or a combination that OpenRLHF refuses.
        SystemExit: ``--help`` (0).
    """
    upstream.check_version()
    parser = build_parser(argv)
    values = vars(parser.parse_args([]))
    actions = {action.dest: action for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # the namespace then holds the flags that the command line names
    given = vars(parser.parse_args(argv))
    on_cpu = machine.torch_cuda() is None
    if not on_cpu:
        cuda.check_machine()
    named, preset = _choose(given, on_cpu)
    layers = _layers(given, named, preset, world_size if on_cpu else None)
    origin: dict[str, str] = {}
    for source, layer in layers:
        for flag, value in layer.items():
            if source.startswith("preset"):
                _check_preset_value(flag, value, actions, source)
            values[flag], origin[flag] = value, source
    values |= named
    if not on_cpu:
        _use_all_gpus(values, preset.gpus)
        if named["preset"] != presets.NONE:
            cuda.derive(values, origin)
    if tasks.is_spec(values["data.prompt_dataset"] or ""):
        for flag, value in (("data.label_key", "label"), ("reward.remote_url", "reasoning_gym")):
            if origin.get(flag) != COMMAND_LINE:
                values[flag], origin[flag] = value, "--data.prompt_dataset"
    _fill_placeholders(values)
    _derive(values, origin)
    settings = Settings(values, origin, on_cpu, machine.look(), _command(given))
    _ = settings.parameters, settings.strategy  # checks them
    args = upstream.finish_arguments(
        argparse.Namespace(**settings.values), group_baseline=settings.estimator == NO_ESTIMATOR
    )
    return dataclasses.replace(settings, values={flag: attrgetter(flag)(args) for flag in settings.values})


def _command(given: Mapping[str, Any]) -> str:
    """Return the command line that gives these flags, without secrets."""
    words = ["openrlhf-dbb", "train"]
    for flag, value in without_secrets(given).items():
        words.append(f"--no-{flag}" if value is False else f"--{flag}")
        words += [] if isinstance(value, bool) else map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def _choose(given: Mapping[str, Any], on_cpu: bool) -> tuple[dict[str, str], presets.Preset]:
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
    name = name or ("smollm2" if on_cpu else "qwen3-1.7b")
    preset = presets.load(name, estimator)
    estimator = estimator or preset.flags.get("estimator", NO_ESTIMATOR)
    unnamed = methods.NONE if estimator == NO_ESTIMATOR else "grpo"
    # Where the command line says which GPUs hold which model, the default preset says nothing.
    placed = any(re.match(r"[\w.]+\.num_(nodes|gpus_per_node|engines)|train\.colocate_", flag) for flag in given)
    if on_cpu or ("preset" not in given and placed):
        preset = dataclasses.replace(preset, gpus={})
    method = method or preset.flags.get("method", unnamed)
    return {"preset": name, "method": method, "estimator": str(estimator)}, preset


def _layers(
    given: Mapping[str, Any], named: Mapping[str, str], preset: presets.Preset, ranks_on_cpu: int | None
) -> list[cuda.Layer]:
    """Return the layers of values and their origins, the lowest first."""
    method, estimator = named["method"], named["estimator"]
    layers: list[cuda.Layer] = []
    if estimator != NO_ESTIMATOR:
        layers.append(("--estimator", {"algo.advantage.estimator": "group_norm"}))
    if ranks_on_cpu is None:
        machine.add_shims()
        layers += cuda.layers(machine.look().gpus, with_preset=named["preset"] != presets.NONE)
    else:
        cpu.prepare_driver()
        ranks = ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines")
        layers.append(("no CUDA", cpu.FLAG_DEFAULTS | dict.fromkeys(ranks, ranks_on_cpu)))
    flags, gpus, origin = preset.flags, preset.gpus, preset.origin
    for name in dict.fromkeys(origin.values()):
        layers.append(
            (f"preset {name}", {flag: value for flag, value in (flags | gpus).items() if origin[flag] == name})
        )
    if gpus and {**flags, **given}.get("train.async_enable"):
        layers.append(cuda.APART)
    if method != methods.NONE:
        recipe = methods.recipe(method, estimator)
        same = methods.same_rollouts(recipe, flags)
        layers.append((f"method {method}", {"method": method, "estimator": estimator} | recipe | same))
    return [*layers, (COMMAND_LINE, given)]


def _check_preset_value(flag: str, value: Any, actions: Mapping[str, argparse.Action], source: str) -> None:
    """Raise UsageError if a preset's value is not one that the flag could have on the command line."""
    if flag not in actions:
        raise UsageError(f"{source} sets --{flag}, which there is not{did_you_mean(flag, actions)}")
    action = actions[flag]
    if value == "all" and flag in ("actor.num_gpus_per_node", "vllm.num_engines"):
        return
    name = getattr(action.type, "__name__", "str")
    kind: Any = bool if action.nargs == 0 else {"int": int, "float": float, "str": str}.get(name, type(value))
    listed = action.nargs in (2, "+", "*")
    entries = value if isinstance(value, list) else [value]
    fits = all(type(entry) in ((int, float) if kind is float else (kind,)) for entry in entries)
    if not fits or listed != isinstance(value, list) or (action.choices and value not in action.choices):
        allowed = ", ".join(map(str, action.choices)) if action.choices else f"{'a list of ' * listed}{kind.__name__}"
        raise UsageError(f"{source} sets --{flag} to {without_secrets(value, flag)!r}; allowed: {allowed}")


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


def _fill_placeholders(values: dict[str, Any]) -> None:
    """Fill in the run's name, placeholders in braces, absolute output folders, and the file of a reward of ours."""
    if values["run_name"] is None:
        generic = values["preset"] in (presets.NONE, presets.DEFAULT)
        subject = Path(values[MODEL_FLAG] or "model" if generic else values["preset"].removesuffix(".toml")).name
        named = [values["method"]] if values["method"] not in (methods.NONE, "grpo") else []
        words = re.sub(r"[^\w.+-]", "_", "-".join([*named, values["estimator"].split(":")[-1], subject]))
        values["run_name"] = f"{words}-{datetime.now():%Y%m%d-%H%M%S}".lower()
    places = {"run": values["run_name"], "tiny": tiny.default_folder(), "smollm2": smollm2.default_folder()}
    for flag, value in values.items():
        for name, place in places.items():
            if isinstance(value, str):
                values[flag] = value = value.replace(f"{{{name}}}", str(place))
    for flag in OUTPUTS:
        if values[flag]:  # actors may run in another folder
            values[flag] = str(Path(values[flag]).absolute())
    url = values["reward.remote_url"]
    if url and re.fullmatch(r"\w+", url):
        path = Path(str(files("openrlhf_dbb.rewards"))) / f"{url}.py"
        if not path.exists():
            raise UsageError(
                f"--reward.remote_url {url!r} is neither a URL, a .py file nor a reward of openrlhf_dbb "
                "(math_answer, exact_match, reasoning_gym); give one of these"
            )
        values["reward.remote_url"] = str(path)


def _derive(values: dict[str, Any], origin: dict[str, str]) -> None:
    """Set the values that follow from other flags. Changes both arguments."""

    def put(flag: str, value: Any, why: str) -> None:
        values[flag], origin[flag] = value, why

    values["store.url"] = values["store.url"] or None
    values["local_rank"] = -1  # the launcher's value would select a device that an actor cannot see
    if values["estimator"] == NO_ESTIMATOR:  # OpenRLHF has neither flag
        for flag in ("eval.benchmarks", "eval.top_p"):
            if origin.get(flag) != COMMAND_LINE:
                values[flag] = None
                origin.pop(flag, None)
    if values["eval.top_p"] is None:
        put("eval.top_p", values["rollout.top_p"], "--rollout.top_p")
    if origin.get("actor.eps_clip") == COMMAND_LINE != origin.get("actor.eps_clip_low_high"):
        # The range of a preset or method would take the place of --actor.eps_clip in silence.
        put("actor.eps_clip_low_high", [values["actor.eps_clip"]] * 2, "--actor.eps_clip")
    if "logger.wandb.run_name" not in origin:
        values["logger.wandb.run_name"] = values["run_name"]
    if values["algo.dynamic_filtering_enable"] and values["rollout.strategy"] == "plain":
        put("rollout.strategy", "dynamic", "--algo.dynamic_filtering_enable")
    rollouts = values["rollout.batch_size"] * values["rollout.n_samples_per_prompt"]
    if origin.get("train.batch_size") == f"preset {presets.DEFAULT}" and rollouts % values["train.batch_size"]:
        half = rollouts // 2 if rollouts % 2 == 0 else rollouts
        put("train.batch_size", half, "half of a step's rollouts, as in the paper")
