"""Curves of a run over its training, from the store and from the TensorBoard events that OpenRLHF wrote.

Axes: T points of a curve, K runs of a group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import storage
from storage.evaluations import TRAINING

Floats = NDArray[np.float64]

ENTROPY = "train/entropy_loss"
"""OpenRLHF's tag of the policy's mean entropy, logged if ``--actor.entropy_coef`` is given."""


class Scalars(NamedTuple):
    """One TensorBoard tag.

    Attributes:
        step: (T,) ascending.
        value: (T,) logged at these steps.
        wall_time: (T,) seconds since 1970 when they were logged.
    """

    step: Floats
    value: Floats
    wall_time: Floats


def read_scalars(folder: Path) -> dict[str, Scalars]:
    """All scalars in a folder's event files, by tag; empty without event files.

    Of a step that was logged more than once, because a resume repeated it, the last value counts.

    Raises:
        ImportError: tensorboard is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        last = {event.step: event for event in sorted(accumulator.Scalars(tag), key=lambda event: event.wall_time)}
        rows = [(step, last[step].value, last[step].wall_time) for step in sorted(last)]
        found[tag] = Scalars(*np.array(rows, dtype=np.float64).T)
    return found


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
class Band:
    """The curves of several runs: (T,) their mean, lowest and highest at each x."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


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


def entropy(run: storage.RunRecord, events: Path | None) -> TrainingCurve | str:
    """The policy's mean entropy over steps, in nats per token; or why there is none.

    Args:
        events: a folder with the run's TensorBoard folder somewhere below it; None for the place in the run's
            configuration, relative to the working directory.
    """
    folder = _event_folder(run, events)
    if folder is None:
        return "no event files found"
    try:
        logged = read_scalars(folder).get(ENTROPY)
    except ImportError:
        return "tensorboard is not installed"
    if logged is None:
        return "not logged; train with --actor.entropy_coef 0 to log it"
    kept = logged.step <= run.last_step
    return TrainingCurve(logged.step[kept], logged.value[kept])


def _event_folder(run: storage.RunRecord, events: Path | None) -> Path | None:
    folder, name = (run.config.get(f"logger.{flag}") for flag in ("tensorboard_dir", "wandb.run_name"))
    if not folder or not name:
        return None
    candidates = [Path(folder) / name] if events is None else [events, *sorted(events.rglob(name))]
    for candidate in candidates:
        if candidate.name == name and any(candidate.glob("events.out.tfevents.*")):
            return candidate
    return None


def over_rollouts(curve: TrainingCurve, rollouts: TrainingCurve) -> TrainingCurve:
    """A curve over steps as one over rollouts; there are none before the first step."""
    return TrainingCurve(np.interp(curve.x, np.append(0, rollouts.x), np.append(0, rollouts.y)), curve.y)


def average(curves: Sequence[TrainingCurve]) -> TrainingCurve:
    """The mean of curves at the points they share."""
    x = curves[0].x
    for curve in curves[1:]:
        x = np.intersect1d(x, curve.x)
    return TrainingCurve(x, np.mean([curve.y[np.isin(curve.x, x)] for curve in curves], axis=0))


def band(curves: Sequence[TrainingCurve]) -> Band:
    """Mean, lowest and highest of the curves of K runs, where all have started and none has ended.

    Curves are interpolated linearly at the points of all of them.
    """
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[(x >= max(curve.x[0] for curve in curves)) & (x <= min(curve.x[-1] for curve in curves))]
    y_K_T = np.array([np.interp(x, curve.x, curve.y) for curve in curves])
    return Band(x, y_K_T.mean(axis=0), y_K_T.min(axis=0), y_K_T.max(axis=0))
