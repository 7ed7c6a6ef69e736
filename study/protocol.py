"""What the study trains, as data: experiments of arms over seeds, one TOML file per protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb import presets
from openrlhf_dbb.errors import UsageError
from study.tasks import STARTS, TASKS, kind

FOLDER = Path(__file__).parent / "protocols"
LEARNING_RATE = "actor.adam.lr"
_KEYS = {"like", "n", "arms", "seeds", "more_seeds", "start", "preset", "learning_rates", "flags"}


@dataclass(frozen=True)
class PlannedRun:
    """A training of the protocol.

    Attributes:
        name: in the store; ``EXPERIMENT-ARM-sSEED``, with ``-lrRATE`` before the seed if learning rates are tried.
        n: rollouts per group.
        start: which warm start of the seed's task; "" if the preset names the model and the data.
        flags: of the training command, overriding the preset.
    """

    name: str
    experiment: str
    arm: str
    n: int
    seed: int
    start: str
    flags: dict[str, Any]


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Attributes:
        task: "tiny", "steps", or "" if the preset names the model and the data; experiments may have starts of others.
        evaluation: flags of ``openrlhf-dbb evaluate`` for each trained model; none if the training's own serve.
        runs: in training order, seed by seed, so that the finished ones can be paired at any time.
    """

    name: str
    description: str
    preset: str
    task: str
    evaluation: dict[str, str]
    runs: list[PlannedRun]

    def choose(self, experiments: Sequence[str], seeds: int | None = None) -> list[PlannedRun]:
        """The runs of the given experiments, or of all; only the first ``seeds`` seeds of each.

        Raises:
            UsageError: there is no such experiment.
        """
        known = list(dict.fromkeys(run.experiment for run in self.runs))
        unknown = [name for name in experiments if name not in known]
        if unknown:
            raise UsageError(f"protocol {self.name} has no experiment {unknown[0]!r}; available: {', '.join(known)}")
        chosen = []
        for experiment in experiments or known:
            runs = [run for run in self.runs if run.experiment == experiment]
            first = sorted({run.seed for run in runs})[:seeds]
            chosen += [run for run in runs if run.seed in first]
        return chosen


def names() -> list[str]:
    """The protocols that have a name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Protocol:
    """A protocol by name, or from a TOML file.

    Raises:
        UsageError: it does not exist, or is not well-formed.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise UsageError(f"--protocol {name}: no such protocol; available: {', '.join(names())}, or a .toml file")
    table = presets.read_toml(path)
    task = table.get("task", "")
    if task and task not in TASKS:
        raise UsageError(f"protocol {path.stem} has task = {task!r}; allowed: {', '.join(TASKS)}, or none")
    runs = [
        run
        for experiment, entry in _complete(path.stem, table["experiments"])
        for run in _runs(path.stem, experiment, entry, table["arms"], table.get("flags", {}), task)
    ]
    return Protocol(path.stem, table["description"], table["preset"], task, table.get("evaluate", {}), runs)


def _complete(protocol: str, entries: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each experiment with what it takes from the one it is ``like``; flags are merged."""
    for experiment, entry in entries.items():
        other = entry.get("like", experiment)
        if other not in entries:
            raise UsageError(
                f"protocol {protocol}: {experiment} is like {other!r}, which is none of its experiments: "
                f"{', '.join(entries)}"
            )
        flags = entries[other].get("flags", {}) | entry.get("flags", {})
        yield experiment, entries[other] | entry | {"flags": flags}


def _runs(
    protocol: str, experiment: str, entry: dict[str, Any], arms: dict[str, Any], flags: dict[str, Any], task: str
) -> Iterator[PlannedRun]:
    unknown = sorted(entry.keys() - _KEYS)
    if unknown:
        raise UsageError(
            f"protocol {protocol}: {experiment} sets {unknown[0]}; allowed: {', '.join(sorted(_KEYS))}; training flags "
            "belong in its table flags"
        )
    start = entry.get("start", TASKS[task].starts[0]) if task else ""
    if task and start not in STARTS:
        raise UsageError(f"protocol {protocol}: {experiment} has start = {start!r}; allowed: {', '.join(STARTS)}")
    if task and kind(start).mark and experiment.startswith("frozen-"):
        raise UsageError(
            f"protocol {protocol}: {experiment} is for measuring gradients, which needs a task whose answers are whole "
            f"responses, and those with start = {start!r} are not; leave it out"
        )
    more = entry.get("more_seeds", {})
    for seed in dict.fromkeys([*entry["seeds"], *(seed for seeds in more.values() for seed in seeds)]):
        arms_of_seed = [arm for arm in entry["arms"] if seed in entry["seeds"] or seed in more.get(arm, [])]
        for rate in entry.get("learning_rates", [None]):
            for arm in arms_of_seed:
                if arm not in arms:
                    raise UsageError(
                        f"protocol {protocol}: {experiment} has the unknown arm {arm!r}; available: {', '.join(arms)}"
                    )
                n = entry["n"]
                sizes = {"rollout.n_samples_per_prompt": n, "train.batch_size": _MINI_BATCH * n}
                if task:  # small enough for one pass
                    sizes |= dict.fromkeys(("train.micro_batch_size", "rollout.micro_batch_size"), _MINI_BATCH * n)
                own = dict(entry.get("flags", {})) | ({LEARNING_RATE: rate} if rate is not None else {})
                own |= {"preset": entry["preset"]} if "preset" in entry else {}
                tried = f"-lr{rate:g}" if rate is not None else ""
                values = sizes | flags | arms[arm] | own
                yield PlannedRun(f"{experiment}-{arm}{tried}-s{seed}", experiment, arm, n, seed, start, values)


_MINI_BATCH = 64  # prompts per gradient step, as in the paper


def argv(run: PlannedRun, protocol: Protocol, store_url: str, task: dict[str, str], resume: bool) -> list[str]:
    """Arguments of ``openrlhf_dbb.cli.train_grpo`` for a run.

    Args:
        task: flags that name the run's model and data, and those that its kind of task asks for.
        resume: whether the run has been started before.
    """
    values = {"preset": protocol.preset, "store.url": store_url, "train.seed": run.seed} | task | run.flags
    arguments = []
    for flag, value in values.items():
        if value is not False:
            listed = value if isinstance(value, list) else [] if value is True else [value]
            arguments += [f"--{flag}", *map(str, listed)]
    return [*arguments, "--resume" if resume else "--run_name", run.name]
