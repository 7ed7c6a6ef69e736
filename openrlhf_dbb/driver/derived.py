"""Values that follow from other flags. Each function sets some of them and says why, in ``origin``.

Functions of a flag's owner stand with the owner; here are those of OpenRLHF's flags, the names and the folders.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from openrlhf_dbb import chosen, methods, presets, rewards, tasks, tiny, upstream
from openrlhf_dbb.chosen import Values
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.evaluation import training
from openrlhf_dbb.platform import cpu, cuda
from openrlhf_dbb.presets import smollm2

MODEL_FLAG = "actor.model_name_or_path"
OUTPUTS = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")


def derive(run: Values) -> None:
    """Set the values that follow from others; each function reads what those before it have set."""
    cuda.numbers_of_gpus(run)
    recorded_rollouts(run)
    tasks.label_and_verifier(run)
    rewards.path_of_verifier(run)
    for_openrlhf_alone(run)
    training.sampling(run)
    clip_range(run)
    strategy(run)
    cuda.prefix_cache(run)
    presets.batch(run, chosen.rollouts_of_a_step(upstream.nested(run.values)))
    if run.values["preset"] != presets.NONE and not cpu.active():
        cuda.beside_policy(run)
        cuda.token_limits(run)
    names(run)
    folders(run)


def recorded_rollouts(run: Values) -> None:
    """Recorded rollouts need no engine, and without one nothing is evaluated."""
    if run.values["rollouts.of_run"]:
        run.put({"vllm.num_engines": 0, "eval.steps": -1}, "--rollouts.of_run")


def for_openrlhf_alone(run: Values) -> None:
    """Take back flags of a preset that OpenRLHF does not have."""
    if run.values["estimator"] != NO_ESTIMATOR:
        return
    for flag in ("eval.benchmarks", "eval.top_p"):
        if flag in run.origin and not run.is_given(flag):
            run.put({flag: None}, "--estimator none")


def clip_range(run: Values) -> None:
    """The range of a preset or a method would take the place of --actor.eps_clip in silence."""
    if run.is_given("actor.eps_clip") and not run.is_given("actor.eps_clip_low_high"):
        clip = run.values["actor.eps_clip"]
        run.put({"actor.eps_clip_low_high": [clip, clip]}, "--actor.eps_clip")


def strategy(run: Values) -> None:
    """OpenRLHF's switch of dynamic filtering chooses our strategy for it."""
    filters = run.values["algo.dynamic_filtering_enable"]
    if filters and run.values["rollout.strategy"] == "plain":
        run.put({"rollout.strategy": "dynamic"}, "--algo.dynamic_filtering_enable")


def names(run: Values) -> None:
    """Name the run, here and at its tracker."""
    values = run.values
    values["local_rank"] = -1  # the launcher's value would select a device that an actor cannot see
    values["store.url"] = values["store.url"] or None
    if values["run_name"] is None:
        values["run_name"] = _default_name(values)
    if "logger.wandb.run_name" not in run.origin:
        values["logger.wandb.run_name"] = values["run_name"]


def _default_name(values: Mapping[str, Any]) -> str:
    """Return method, estimator, preset or model, and the time."""
    words = []
    if values["method"] not in (methods.NONE, "grpo"):
        words.append(values["method"])
    words.append(values["estimator"].split(":")[-1])
    subject = values["preset"].removesuffix(".toml")
    if values["preset"] in (presets.NONE, presets.DEFAULT):
        subject = values[MODEL_FLAG] or "model"
    words.append(Path(subject).name)
    name = re.sub(r"[^\w.+-]", "_", "-".join(words))
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}".lower()


def folders(run: Values) -> None:
    """Fill in ``{run}``, ``{tiny}`` and ``{smollm2}``; actors may run in another folder, so paths are whole."""
    places = {
        "{run}": run.values["run_name"],
        "{tiny}": str(tiny.default_folder()),
        "{smollm2}": str(smollm2.default_folder()),
    }
    for flag, value in run.values.items():
        if isinstance(value, str):
            for name, place in places.items():
                value = value.replace(name, place)
            run.values[flag] = value
    for flag in OUTPUTS:
        if run.values[flag]:
            run.values[flag] = str(Path(run.values[flag]).absolute())
