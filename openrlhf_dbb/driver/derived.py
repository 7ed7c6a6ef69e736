"""Values that follow from other flags. Each function sets some of them and says why, in ``origin``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from openrlhf_dbb import chosen, methods, presets, tasks, tiny, upstream
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.presets import smollm2

COMMAND_LINE = "command line"
MODEL_FLAG = "actor.model_name_or_path"
OUTPUTS = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
_REWARD = "reward.remote_url"


@dataclass
class Values:
    """The values of all flags while the layers are put on one another, and where each comes from."""

    values: dict[str, Any]  # by flag
    origin: dict[str, str]  # of each value that is not OpenRLHF's default

    def put(self, layer: Mapping[str, Any], origin: str) -> None:
        """Replace values of some flags."""
        self.values.update(layer)
        for flag in layer:
            self.origin[flag] = origin

    def is_given(self, flag: str) -> bool:
        """Return whether the command line names a flag."""
        return self.origin.get(flag) == COMMAND_LINE


def derive(run: Values) -> None:
    """Set the values that follow from others; each function reads what those before it have set."""
    numbers_of_gpus(run)
    recorded_rollouts(run)
    task(run)
    reward(run)
    for_openrlhf_alone(run)
    evaluation_sampling(run)
    clip_range(run)
    strategy(run)
    prefix_cache(run)
    batch(run)
    if run.values["preset"] != presets.NONE and not cpu.active():
        for flag, value, why in cuda.derived(run.values, run.origin):
            run.put({flag: value}, why)
    names(run)
    folders(run)


def numbers_of_gpus(run: Values) -> None:
    """Put numbers in place of a preset's "all"; engines of their own GPUs get half."""
    values = run.values
    hosts = values["actor.num_nodes"]
    tensor_parallel = max(values["vllm.tensor_parallel_size"], 1)
    gpus = hosts * len(machine.look().gpus)
    if values["train.async_enable"]:
        engines = max((gpus - gpus // 2) // tensor_parallel, 1)
        ranks = (gpus - engines * tensor_parallel) // hosts
    else:
        engines = max(gpus // tensor_parallel, 1)
        ranks = gpus // hosts
    all_of = {"actor.num_gpus_per_node": ranks, "vllm.num_engines": engines}
    for flag in cuda.ALL_GPUS:
        if values[flag] == "all":
            values[flag] = max(all_of[flag], 1)


def recorded_rollouts(run: Values) -> None:
    """Recorded rollouts need no engine, and without one nothing is evaluated."""
    if run.values["rollouts.of_run"]:
        run.put({"vllm.num_engines": 0, "eval.steps": -1}, "--rollouts.of_run")


def task(run: Values) -> None:
    """A task brings its label and its verifier along."""
    if not tasks.is_spec(run.values["data.prompt_dataset"] or ""):
        return
    for flag, value in (("data.label_key", "label"), (_REWARD, "reasoning_gym")):
        if not run.is_given(flag):
            run.put({flag: value}, "--data.prompt_dataset")


def reward(run: Values) -> None:
    """Put the path of a verifier of ours in place of its name.

    Raises:
        UsageError: there is none of that name.
    """
    url = run.values[_REWARD]
    if not url or not re.fullmatch(r"\w+", url):
        return
    path = Path(str(files("openrlhf_dbb.rewards"))) / f"{url}.py"
    if not path.exists():
        raise UsageError(
            f"--{_REWARD} {url!r} is neither a URL, a .py file nor a reward of openrlhf_dbb "
            "(math_answer, exact_match, reasoning_gym); give one of these"
        )
    run.values[_REWARD] = str(path)


def for_openrlhf_alone(run: Values) -> None:
    """Take back flags of a preset that OpenRLHF does not have."""
    if run.values["estimator"] != NO_ESTIMATOR:
        return
    for flag in ("eval.benchmarks", "eval.top_p"):
        if flag in run.origin and not run.is_given(flag):
            run.put({flag: None}, "--estimator none")


def evaluation_sampling(run: Values) -> None:
    """Evaluations sample as the training does, unless somebody says otherwise."""
    if run.values["eval.top_p"] is None:
        run.put({"eval.top_p": run.values["rollout.top_p"]}, "--rollout.top_p")


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


def prefix_cache(run: Values) -> None:
    """It is not known whether the cache forgets the blocks of requests that wait for new weights."""
    flag = "vllm.enable_prefix_caching"
    if run.values["train.partial_rollout_enable"] and run.origin.get(flag) in (
        "no CUDA",
        cuda.FAST,
    ):
        run.put({flag: False}, "--train.partial_rollout_enable")


def batch(run: Values) -> None:
    """The default preset's batch becomes half of a step where it does not divide the step."""
    flag = "train.batch_size"
    rollouts = chosen.rollouts_of_a_step(upstream.nested(run.values))
    is_default = run.origin.get(flag) == f"preset {presets.DEFAULT}"
    if is_default and rollouts % run.values[flag]:
        size = rollouts if rollouts % 2 else rollouts // 2
        run.put({flag: size}, "half of a step's rollouts, as in the paper")


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
