"""The rows of the study's CSV files. NaN stands for an empty field; accuracies and rewards are in [0, 1].

Axes: E points of a curve (0 and the epochs).
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError

Floats = NDArray[np.float64]

ARMS = {
    "grpo": "GRPO",
    "grpo-wide": "GRPO, wide clip",
    "laplace": "Laplace",
    "dbb": "DBB 0.5",
    "auto": "auto",
    "dr_grpo": "Dr.GRPO",
    "dr_grpo-dbb": "Dr.GRPO-DBB 0.5",
    "dapo": "DAPO",
    "greso": "GRESO",
    "repo": "RePO",
}
"""Arms by name, as they are printed, in the order of all tables and figures."""
EXPERIMENTS = {"n2": "N = 2", "n4": "N = 4", "n8": "N = 8", "hard": "hard start", "long-n2": "N = 2, 16 passes"}
"""Experiments that compare arms, the primary one first."""


class Run(NamedTuple):
    """A row of runs.csv."""

    run: str
    experiment: str
    arm: str
    n: int
    seed: int
    learning_rate: float
    start_accuracy: float
    accuracy: float
    best: float
    start_ood: float
    ood: float
    reward_last: float
    exact: float
    ends_at_once: float
    rollouts: float
    trained: float
    steps: float
    seconds: float


class Epoch(NamedTuple):
    """A row of epochs.csv; epoch 0 is before training."""

    run: str
    experiment: str
    arm: str
    n: int
    seed: int
    epoch: int
    steps: float
    rollouts: float
    accuracy: float
    ood: float
    reward: float
    zero_variance: float
    rescued: float
    abs_advantage: float
    clip_fraction: float
    grad_norm: float
    entropy: float
    length: float


class Gradient(NamedTuple):
    """A row of gradients.csv: one update direction, from one draw of rollouts for one batch of prompts.

    Attributes:
        seed: of the draws.
        n: rollouts per prompt (N).
        estimator: a name of ``gradients.ESTIMATORS`` or ``gradients.ORACLES``.
        batch, draw: from 0.
        cosine: with the gradient of the expected reward, -1 to 1; NaN if one of the two is 0. The reference's own noise
            lowers the cosines of all rows of a batch by one factor.
        cosine_normalised: with the gradient that is standardized by the true deviation, in the form GRPO trains.
        mse: mean over prompts of (estimated mean - p)^2, the reference's noise taken out; NaN for an oracle.
    """

    seed: int
    n: int
    estimator: str
    batch: int
    draw: int
    cosine: float
    cosine_normalised: float
    mse: float


class Error(NamedTuple):
    """A row of mse.csv: an estimator replayed on a run with probes; discount is NaN where there is none."""

    run: str
    n: int
    seed: int
    estimator: str
    discount: float
    mse: float
    mse_point: float


class Control(NamedTuple):
    """A row of control.csv: a training in plain PyTorch; accuracies are exact, on held-out prompts, in [0, 1]."""

    experiment: str
    arm: str
    n: int
    seed: int
    learning_rate: float
    shortest: int
    start_accuracy: float
    half_accuracy: float
    accuracy: float
    ends_at_once: float


class Masked(NamedTuple):
    """A row of masked.csv: a run of the pipeline with and without responses that may end at once."""

    arm: str
    seed: int
    min_new_tokens: int
    accuracy: float
    exact: float
    ends_at_once: float


_Row = TypeVar("_Row", Run, Epoch, Gradient, Error, Control, Masked)


@dataclass(frozen=True)
class Study:
    """The rows of the files, in their order; a file that is not there has none."""

    runs: tuple[Run, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    mse: tuple[Error, ...] = ()
    control: tuple[Control, ...] = ()
    masked: tuple[Masked, ...] = ()

    def arms(self, experiment: str) -> list[str]:
        """Arms that have runs in the experiment, in the order of all tables."""
        present = {run.arm for run in self.runs if run.experiment == experiment}
        return [arm for arm in ARMS if arm in present]

    def of_seeds(self, seeds: Collection[int]) -> Study:
        """Only the trainings of these seeds."""
        runs = tuple(run for run in self.runs if run.seed in seeds)
        return replace(self, runs=runs, epochs=tuple(epoch for epoch in self.epochs if epoch.seed in seeds))

    def outcome(self, experiment: str, arm: str, name: str) -> dict[int, float]:
        """An outcome of each of an arm's runs, by seed; seeds without it are left out.

        Args:
            experiment, arm: of the runs.
            name: a column of runs.csv, or ``mean_accuracy``: held-out accuracy, mean over the epochs after which the
                experiment was evaluated. A run that lacks one of them has none.
        """
        runs = [run for run in self.runs if (run.experiment, run.arm) == (experiment, arm)]
        if name == "mean_accuracy":
            accuracy = {
                (row.run, row.epoch): row.accuracy
                for row in self.epochs
                if row.experiment == experiment and row.epoch > 0 and not math.isnan(row.accuracy)
            }
            epochs = {epoch for _, epoch in accuracy}
            found = {
                run.seed: float(np.mean([accuracy[run.run, epoch] for epoch in epochs]))
                for run in runs
                if epochs and all((run.run, epoch) in accuracy for epoch in epochs)
            }
        else:
            found = {run.seed: float(getattr(run, name)) for run in runs}
        return {seed: value for seed, value in sorted(found.items()) if not math.isnan(value)}

    def curves(self, experiment: str, arm: str) -> dict[int, tuple[Floats, Floats]]:
        """Cumulative rollouts and accuracy of each of an arm's runs, by seed, both (E,), before training first."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in sorted(self.epochs, key=lambda row: row.epoch):
            if (row.experiment, row.arm) == (experiment, arm) and not math.isnan(row.accuracy):
                found[row.seed].append((row.rollouts, row.accuracy))
        return {seed: (np.array(points)[:, 0], np.array(points)[:, 1]) for seed, points in sorted(found.items())}


def load(folder: Path) -> Study:
    """Read runs.csv, epochs.csv, gradients.csv, mse.csv, control.csv and masked.csv, as far as they are there.

    Raises:
        UsageError: none is there, a column is missing, a field is not a number, an arm is unknown, or an arm has a
            seed twice in an experiment.
    """
    kinds = {"runs": Run, "epochs": Epoch, "gradients": Gradient, "mse": Error}
    if not any((folder / f"{name}.csv").exists() for name in kinds):
        raise UsageError(f"{folder}: none of {', '.join(f'{name}.csv' for name in kinds)}; collect the study first")
    study = Study(
        runs=_read(folder / "runs.csv", Run),
        epochs=_read(folder / "epochs.csv", Epoch),
        gradients=_read(folder / "gradients.csv", Gradient),
        mse=_read(folder / "mse.csv", Error),
        control=_read(folder / "control.csv", Control),
        masked=_read(folder / "masked.csv", Masked),
    )
    named = [(run.run, run.arm) for run in study.runs] + [(epoch.run, epoch.arm) for epoch in study.epochs]
    for run, arm in named:
        if arm not in ARMS:
            raise UsageError(f"{folder}: run {run} has the arm {arm!r}; arms are {', '.join(ARMS)}")
    seeds = Counter(
        (run.experiment, run.arm, run.seed, run.learning_rate if is_pilot(run) else 0) for run in study.runs
    )
    for (experiment, arm, seed, _), times in seeds.items():
        if times > 1:
            raise UsageError(f"{folder}/runs.csv: {experiment} has seed {seed} of {arm} {times} times; keep one")
    return study


def is_pilot(run: Run) -> bool:
    """Whether the run belongs to the choice of the learning rate."""
    return run.experiment.startswith("pilot")


def _read(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    if not path.exists():
        return ()
    types = get_type_hints(kind)
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in kind._fields if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(f"{path}: no column {', '.join(missing)}; collect the study again")
        return tuple(
            kind(**{name: _value(path, types[name], name, row[name]) for name in kind._fields}) for row in reader
        )


def _value(path: Path, kind: type, name: str, text: str) -> Any:
    if kind is float and text == "":
        return math.nan
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{path}: {name} is {text!r}, not a number; collect the study again") from None
