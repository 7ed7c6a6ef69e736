"""The rows of the study's CSV files, and the study they make up. NaN is an empty field; accuracies are in [0, 1].

Axes: E points of a curve (0 and the epochs).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
"""Printed names of the arms that the study compares, in the order of its tables and figures."""
PAPER_ARMS = {
    "dbb-0.25": "DBB 0.25",
    "dbb-0.75": "DBB 0.75",
    "dbb-1": "DBB 1.0",
    "dbb-standard": "DBB 0.5, standard clip",
}
"""Printed names of further arms, for the paper's claims."""
FEWER_ARMS = {
    "single": "N = 1",
    "single-hidden": "N = 1, predicted",
    "drawn": "N = 1, predicted, drawn",
    "drawn-weighted": "N = 1, predicted, drawn, weights",
}
"""Printed names of arms with one rollout a prompt."""
EVERY_ARM = (*ARMS, *PAPER_ARMS, *FEWER_ARMS)
EXPERIMENTS = {"n2": "N = 2", "n4": "N = 4", "n8": "N = 8", "hard": "hard start", "long-n2": "N = 2, 16 passes"}
"""Experiments that compare arms, the primary one first."""


CONTROL_OF = "control-"
"""Stands before the name of the experiment that points of the control repeat."""


class RunRow(NamedTuple):
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


class EpochRow(NamedTuple):
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
    best: float
    loss: float


class PointRow(NamedTuple):
    """A row of points.csv: the accuracy of a policy at a step of its training, in [0, 1]; exact, or sampled.

    Step 0 is before training. Of the control, the experiment is ``control-`` and the one it repeats.
    """

    run: str
    experiment: str
    arm: str
    n: int
    seed: int
    learning_rate: float
    step: int
    rollouts: float
    accuracy: float


class GradientRow(NamedTuple):
    """A row of gradients.csv: one update direction, from one draw of rollouts for one batch of prompts.

    Attributes:
        seed: of the draws.
        n: rollouts per prompt (N).
        estimator: a name of ``gradients.ESTIMATORS`` or ``gradients.ORACLES``.
        batch, draw: from 0.
        cosine: with the gradient of the expected reward, -1 to 1; NaN if one of the two is 0. The reference's own noise
            lowers the cosines of all rows of a batch by the same factor.
        cosine_normalised: with the gradient standardized by the true standard deviation, in the form GRPO trains.
        mse: mean over prompts of (estimated mean - p)^2, corrected for the reference's noise; NaN for an oracle.
    """

    seed: int
    n: int
    estimator: str
    batch: int
    draw: int
    cosine: float
    cosine_normalised: float
    mse: float


class ErrorRow(NamedTuple):
    """A row of mse.csv: an estimator replayed on a run with probes; discount is NaN if the estimator has none."""

    run: str
    n: int
    seed: int
    estimator: str
    discount: float
    mse: float
    mse_point: float


class PriorRow(NamedTuple):
    """A row of priors.csv: DBB with a prior, replayed on a run with probes, at the discount with the smallest error."""

    run: str
    n: int
    seed: int
    prior_alpha: float
    prior_beta: float
    discount: float
    mse: float


class ControlRow(NamedTuple):
    """A row of control.csv: a training in plain PyTorch; accuracies on held-out prompts, in [0, 1].

    They are exact, or for the task with steps sampled.
    """

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


class MaskedRow(NamedTuple):
    """A row of masked.csv: a run of the pipeline where responses may (min_new_tokens 0) or may not (1) end at once."""

    arm: str
    seed: int
    min_new_tokens: int
    accuracy: float
    exact: float
    ends_at_once: float


@dataclass(frozen=True)
class Study:
    """The rows of the files, in file order; none for a missing file. Two studies can be added."""

    runs: tuple[RunRow, ...] = ()
    epochs: tuple[EpochRow, ...] = ()
    gradients: tuple[GradientRow, ...] = ()
    mse: tuple[ErrorRow, ...] = ()
    priors: tuple[PriorRow, ...] = ()
    control: tuple[ControlRow, ...] = ()
    masked: tuple[MaskedRow, ...] = ()
    points: tuple[PointRow, ...] = ()

    def __add__(self, other: Study) -> Study:
        return Study(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def arms(self, experiment: str) -> list[str]:
        """Arms with runs in the experiment, in table order."""
        present = {run.arm for run in self.runs if run.experiment == experiment}
        return [arm for arm in ARMS if arm in present]

    def arms_of(self, experiment: str, *arms: str) -> bool:
        """Whether all these arms have runs in the experiment."""
        return set(arms) <= {run.arm for run in self.runs if run.experiment == experiment}

    def of_seeds(self, seeds: Collection[int]) -> Study:
        """The study with only the runs and epochs of these seeds."""
        runs = tuple(run for run in self.runs if run.seed in seeds)
        return replace(self, runs=runs, epochs=tuple(epoch for epoch in self.epochs if epoch.seed in seeds))

    def rollouts_of_gradients(self) -> list[int]:
        """Each N with gradients."""
        return sorted({row.n for row in self.gradients})

    def rollouts_of_errors(self) -> list[int]:
        """Each N with errors of estimates."""
        return sorted({row.n for row in self.mse})

    def outcome(self, experiment: str, arm: str, name: str) -> dict[int, float]:
        """An outcome of each of an arm's runs, by seed; seeds without a value are left out.

        Args:
            experiment, arm: of the runs.
            name: a column of runs.csv, or ``mean_`` and a column of epochs.csv: its mean over the epochs after training
                that have a value in any of the experiment's runs; a run that misses one of them has no value.
        """
        runs = [run for run in self.runs if (run.experiment, run.arm) == (experiment, arm)]
        if name.startswith("mean_"):
            values = {
                (row.run, row.epoch): value
                for row in self.epochs
                if row.experiment == experiment
                and row.epoch > 0
                and not math.isnan(value := getattr(row, name.removeprefix("mean_")))
            }
            epochs = {epoch for _, epoch in values}
            found = {
                run.seed: float(np.mean([values[run.run, epoch] for epoch in epochs]))
                for run in runs
                if epochs and all((run.run, epoch) in values for epoch in epochs)
            }
        else:
            found = {run.seed: float(getattr(run, name)) for run in runs}
        return {seed: value for seed, value in sorted(found.items()) if not math.isnan(value)}

    def curves(self, experiment: str, arm: str) -> dict[int, tuple[Floats, Floats]]:
        """Cumulative rollouts and accuracy of each of an arm's runs, by seed; both (E,), the first before training."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in sorted(self.epochs, key=lambda row: row.epoch):
            if (row.experiment, row.arm) == (experiment, arm) and not math.isnan(row.accuracy):
                found[row.seed].append((row.rollouts, row.accuracy))
        return {seed: (np.array(points)[:, 0], np.array(points)[:, 1]) for seed, points in sorted(found.items())}

    def saved(self, experiment: str, arm: str) -> dict[int, tuple[Floats, Floats]]:
        """As :meth:`curves`, of the policies in points.csv; a run's learning rate is not looked at."""
        found: dict[int, dict[float, float]] = defaultdict(dict)
        for row in self.points:
            if (row.experiment, row.arm) == (experiment, arm):
                found[row.seed][row.rollouts] = row.accuracy
        return {seed: tuple(np.array(sorted(curve.items())).T) for seed, curve in sorted(found.items())}

    def at_end(self, experiment: str, arm: str) -> dict[float, list[float]]:
        """Accuracy of the last policy in points.csv of each of an arm's runs, by learning rate."""
        last: dict[str, PointRow] = {}
        for row in self.points:
            if (row.experiment, row.arm) == (experiment, arm):
                last[row.run] = max(row, last.get(row.run, row), key=lambda each: each.step)
        found: dict[float, list[float]] = defaultdict(list)
        for row in last.values():
            found[row.learning_rate].append(row.accuracy)
        return dict(sorted(found.items()))


def is_pilot(run: RunRow) -> bool:
    """Whether the run is one of those that chose the learning rate."""
    return run.experiment.startswith("pilot")
