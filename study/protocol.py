"""Reads a protocol, a TOML file of experiments of arms over seeds, into runs and their command lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.toml_file import read_toml

FOLDER = Path(__file__).parent / "protocols"
LEARNING_RATE = "actor.adam.lr"
STARTS: dict[str, dict[str, Any]] = {
    "medium": {"warmup_steps": 700},
    "hard": {"warmup_steps": 500},
    "small": {"warmup_steps": 1400, "hidden": 32},
}
"""The starting models, by what differs in :class:`openrlhf_dbb.tiny.Recipe`. Over seeds 1 to 5 "medium" gets 29 to 50 %
right (mean 38 %), with 36 % of groups of 8 all wrong; "hard" 19 to 31 % (mean 28 %), with 48 % all wrong. "small" has
29,472 parameters instead of 116,160."""
_MINI_BATCH = 64  # prompts per gradient step, as in the paper
_KEYS = ("like", "n", "arms", "seeds", "more_seeds", "start", "preset", "learning_rates", "flags")


@dataclass(frozen=True)
class PlannedRun:
    """A training of the protocol."""

    name: str  # EXPERIMENT-ARM-sSEED, with -lrRATE before the seed if learning rates are tried
    experiment: str
    arm: str
    n: int  # rollouts per group
    seed: int
    start: str  # of STARTS; "" if the preset names the model and the data
    flags: dict[str, Any]  # of the training command, over the preset


@dataclass(frozen=True)
class Protocol:
    """A protocol."""

    name: str
    description: str
    preset: str
    task: str  # "tiny", or "" if the preset names the model and the data
    evaluation: dict[str, str]  # flags of ``openrlhf-dbb evaluate`` for each trained model
    forced: dict[str, str]  # tasks whose right answers' probability is measured, by name
    runs: list[PlannedRun]  # seed by seed, so that the finished ones can be paired at any time

    def choose(self, experiments: Sequence[str], seeds: int | None = None) -> list[PlannedRun]:
        """Return the runs of the given experiments, or of all, with the first ``seeds`` seeds of each."""
        known = list(dict.fromkeys(run.experiment for run in self.runs))
        unknown = [name for name in experiments if name not in known]
        if unknown:
            raise UsageError(
                f"protocol {self.name} has no experiment {unknown[0]!r}; available: {', '.join(known)}"
            )
        chosen = []
        for experiment in experiments or known:
            runs = [run for run in self.runs if run.experiment == experiment]
            first = sorted({run.seed for run in runs})[:seeds]
            chosen += [run for run in runs if run.seed in first]
        return chosen


def load(name: str) -> Protocol:
    """Read a protocol by name, or from a TOML file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
        raise UsageError(
            f"--protocol {name}: no such protocol; available: {known}, or a .toml file"
        )
    table = read_toml(path)
    task, entries = table.get("task", ""), table["experiments"]
    runs: list[PlannedRun] = []
    for experiment, own in entries.items():
        like = entries[own.get("like", experiment)]
        entry = like | own | {"flags": like.get("flags", {}) | own.get("flags", {})}
        for key, values, allowed in (
            ("a key", entry, _KEYS),
            ("the start", [entry["start"]] if "start" in entry else [], STARTS),
            ("the arm", entry["arms"], table["arms"]),
        ):
            unknown = sorted(set(values) - set(allowed))
            if unknown:
                raise UsageError(
                    f"protocol {path.stem}: {experiment} has {key} {unknown[0]!r}; allowed: {', '.join(allowed)}"
                )
        runs += _runs(experiment, entry, table["arms"], table.get("flags", {}), task)
    return Protocol(
        name=path.stem,
        description=table["description"],
        preset=table["preset"],
        task=task,
        evaluation=table.get("evaluate", {}),
        forced=table.get("forced", {}),
        runs=runs,
    )


def _runs(
    experiment: str, entry: dict[str, Any], arms: dict[str, Any], common: dict[str, Any], task: str
) -> Iterator[PlannedRun]:
    start = entry.get("start", "medium") if task else ""
    more, n = entry.get("more_seeds", {}), entry["n"]
    sizes = {"rollout.n_samples_per_prompt": n, "train.batch_size": _MINI_BATCH * n}
    if task:  # small enough for one pass
        sizes |= dict.fromkeys(
            ("train.micro_batch_size", "rollout.micro_batch_size"), _MINI_BATCH * n
        )
    own = {"preset": entry["preset"]} if "preset" in entry else {}
    for seed in dict.fromkeys(
        [*entry["seeds"], *(seed for seeds in more.values() for seed in seeds)]
    ):
        for rate in entry.get("learning_rates", [None]):
            tried = "" if rate is None else f"-lr{rate:g}"
            rates = {} if rate is None else {LEARNING_RATE: rate}
            for arm in entry["arms"]:
                if seed in entry["seeds"] or seed in more.get(arm, []):
                    flags = sizes | common | arms[arm] | entry["flags"] | rates | own
                    name, of_arm = (
                        f"{experiment}-{arm}{tried}-s{seed}",
                        flags["rollout.n_samples_per_prompt"],
                    )
                    yield PlannedRun(name, experiment, arm, of_arm, seed, start, flags)


def argv(
    run: PlannedRun, protocol: Protocol, store_url: str, task: dict[str, str], resume: bool
) -> list[str]:
    """Return the arguments of ``openrlhf_dbb.cli.train_grpo`` for a run; ``task`` names its model and data."""
    values = (
        {"preset": protocol.preset, "store.url": store_url, "train.seed": run.seed}
        | task
        | run.flags
    )
    arguments = []
    for flag, value in values.items():
        if value is not False:
            listed = value if isinstance(value, list) else [] if value is True else [value]
            arguments += [f"--{flag}", *map(str, listed)]
    return [*arguments, "--resume" if resume else "--run_name", run.name]
