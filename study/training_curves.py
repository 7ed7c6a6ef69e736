"""Curves of a run over its training, read from the store.

Axes: T points of a curve.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import storage
from storage.evaluations import TRAINING

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TrainingCurve:
    """One measure over training.

    Attributes:
        x: (T,) training steps, or rollouts generated; ascending.
        y: (T,) its values.
    """

    x: Floats
    y: Floats


@dataclass(frozen=True)
class ValidationCurves:
    """The evaluations of a run during its training, over steps.

    Attributes:
        samples: of each prompt, N.
        accuracy, best: Acc@N and Best@N by benchmark.
    """

    samples: int
    accuracy: dict[str, TrainingCurve]
    best: dict[str, TrainingCurve]


@dataclass(frozen=True)
class StepCurves:
    """What a run trained on, over steps.

    Attributes:
        reward: mean reward of the rollouts of each step, including filtered ones.
        length: their mean response length in tokens; None if rollout usage was not recorded.
        rollouts: rollouts generated up to each step.
    """

    reward: TrainingCurve
    length: TrainingCurve | None
    rollouts: TrainingCurve


def training(store: storage.PosteriorStore, run: storage.RunRecord) -> StepCurves:
    """Reward, response length and rollouts of a run, over steps."""
    query = """SELECT step, rollouts, successes, generated, generated_tokens, generated_total FROM steps
               WHERE run_id = :run ORDER BY step"""
    rows = np.array([tuple(row) for row in store.query(query, run=run.run_id)], dtype=np.float64).reshape(-1, 6)
    step, rollouts, successes, generated, tokens, total = rows.T
    seen, counted = rollouts > 0, generated > 0  # false where NULL, which is NaN
    return StepCurves(
        reward=TrainingCurve(step[seen], successes[seen] / rollouts[seen]),
        length=TrainingCurve(step[counted], tokens[counted] / generated[counted]) if counted.any() else None,
        rollouts=TrainingCurve(step, np.cumsum(rollouts) if np.isnan(total).any() else total),
    )


def metrics(store: storage.PosteriorStore, run: storage.RunRecord, names: Sequence[str]) -> dict[str, TrainingCurve]:
    """What the trainer logged under these names, over the steps that have it; names that no step has are left out."""
    query = "SELECT step, metrics FROM steps WHERE run_id = :run AND metrics IS NOT NULL ORDER BY step"
    rows = [(row.step, json.loads(row.metrics)) for row in store.query(query, run=run.run_id)]
    found = {}
    for name in names:
        points = [(step, logged[name]) for step, logged in rows if logged.get(name) is not None]
        if points:
            found[name] = TrainingCurve(*np.array(points, dtype=np.float64).T)
    return found


def validation(store: storage.PosteriorStore, run: storage.RunRecord) -> ValidationCurves | None:
    """The evaluations made during a run's training, over steps; None without any."""
    query = """SELECT step, benchmark, samples, accuracy, best FROM evaluations
               WHERE run_id = :run AND name = :name AND step IS NOT NULL ORDER BY step"""
    rows = store.query(query, run=run.run_id, name=TRAINING)
    if not rows:
        return None
    of = {benchmark: [row for row in rows if row.benchmark == benchmark] for benchmark in {r.benchmark for r in rows}}

    def curve(points: Sequence[object], name: str) -> TrainingCurve:
        x_and_y = np.array([(point.step, getattr(point, name)) for point in points], dtype=np.float64)  # type: ignore[attr-defined]
        return TrainingCurve(*x_and_y[~np.isnan(x_and_y[:, 1])].T)

    return ValidationCurves(
        samples=max(row.samples for row in rows),
        accuracy={benchmark: curve(points, "accuracy") for benchmark, points in of.items()},
        best={benchmark: curve(points, "best") for benchmark, points in of.items()},
    )


def average(curves: Sequence[TrainingCurve]) -> TrainingCurve:
    """The mean of curves at the points they share."""
    x = curves[0].x
    for curve in curves[1:]:
        x = np.intersect1d(x, curve.x)
    return TrainingCurve(x, np.mean([curve.y[np.isin(curve.x, x)] for curve in curves], axis=0))
