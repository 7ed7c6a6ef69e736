"""Curves of a run over its training: from the store, and from the TensorBoard events that OpenRLHF wrote.

Axes: T points of a curve, K runs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import storage
from openrlhf_dbb.evaluation.record import TRAINING

Floats = NDArray[np.float64]

ENTROPY = "train/entropy_loss"
"""OpenRLHF's tag of the policy's mean entropy, logged if ``--actor.entropy_coef`` is given."""


@dataclass(frozen=True)
class Curve:
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
class Validation:
    """The evaluations of a run during its training.

    Attributes:
        samples: of each prompt, N.
        accuracy, best: Acc@N and Best@N by benchmark.
    """

    samples: int
    accuracy: dict[str, Curve]
    best: dict[str, Curve]


@dataclass(frozen=True)
class Training:
    """What a run trained on.

    Attributes:
        reward: mean reward of the rollouts of each step, those that were filtered out included.
        length: mean response length of the same, in tokens; None without a rollout ledger.
        rollouts: rollouts generated up to each step.
    """

    reward: Curve
    length: Curve | None
    rollouts: Curve


def training(store: storage.PosteriorStore, run: storage.RunRecord) -> Training:
    """The curves of a run's steps, over steps."""
    query = """SELECT step, rollouts, successes, generated, generated_tokens, generated_total FROM steps
               WHERE run_id = :run ORDER BY step"""
    rows = np.array([tuple(row) for row in store.query(query, run=run.run_id)], dtype=np.float64).reshape(-1, 6)
    step, rollouts, successes, generated, tokens, total = rows.T
    seen, counted = rollouts > 0, generated > 0  # NULL is NaN, and so neither
    return Training(
        reward=Curve(step[seen], successes[seen] / rollouts[seen]),
        length=Curve(step[counted], tokens[counted] / generated[counted]) if counted.any() else None,
        rollouts=Curve(step, np.cumsum(rollouts) if np.isnan(total).any() else total),
    )


def validation(store: storage.PosteriorStore, run: storage.RunRecord) -> Validation | None:
    """The evaluations made during a run's training, over steps; None if there are none."""
    query = """SELECT step, benchmark, samples, accuracy, best FROM evaluations
               WHERE run_id = :run AND name = :name AND step IS NOT NULL ORDER BY step"""
    rows = store.query(query, run=run.run_id, name=TRAINING)
    if not rows:
        return None
    of = {benchmark: [row for row in rows if row.benchmark == benchmark] for benchmark in {r.benchmark for r in rows}}

    def curve(points: Sequence[object], name: str) -> Curve:
        x_and_y = np.array([(point.step, getattr(point, name)) for point in points], dtype=np.float64)  # type: ignore[attr-defined]
        return Curve(*x_and_y[~np.isnan(x_and_y[:, 1])].T)

    return Validation(
        samples=max(row.samples for row in rows),
        accuracy={benchmark: curve(points, "accuracy") for benchmark, points in of.items()},
        best={benchmark: curve(points, "best") for benchmark, points in of.items()},
    )


def entropy(run: storage.RunRecord, events: Path | None) -> Curve | str:
    """The policy's mean entropy over steps, in nats per token; or why there is none.

    Args:
        events: a folder with the run's TensorBoard folder somewhere below it; None: where the run's configuration
            says, seen from here.
    """
    folder = _event_folder(run, events)
    if folder is None:
        return "no event files found"
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return "tensorboard is not installed"
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    accumulator.Reload()
    if ENTROPY not in accumulator.Tags()["scalars"]:
        return "not logged, for want of --actor.entropy_coef 0"
    # Steps that a resume has made again are there twice.
    values = {event.step: event.value for event in sorted(accumulator.Scalars(ENTROPY), key=lambda e: e.wall_time)}
    steps = sorted(step for step in values if step <= run.last_step)
    return Curve(np.array(steps, dtype=np.float64), np.array([values[step] for step in steps], dtype=np.float64))


def _event_folder(run: storage.RunRecord, events: Path | None) -> Path | None:
    folder, name = (run.config.get(f"logger.{flag}") for flag in ("tensorboard_dir", "wandb.run_name"))
    if not folder or not name:
        return None
    candidates = [Path(folder) / name] if events is None else [events, *sorted(events.rglob(name))]
    for candidate in candidates:
        if candidate.name == name and any(candidate.glob("events.out.tfevents.*")):
            return candidate
    return None


def over_rollouts(curve: Curve, rollouts: Curve) -> Curve:
    """A curve over steps as one over rollouts; before the first step there are none."""
    return Curve(np.interp(curve.x, np.append(0, rollouts.x), np.append(0, rollouts.y)), curve.y)


def average(curves: Sequence[Curve]) -> Curve:
    """The mean of curves, at the points that all of them have."""
    x = curves[0].x
    for curve in curves[1:]:
        x = np.intersect1d(x, curve.x)
    return Curve(x, np.mean([curve.y[np.isin(curve.x, x)] for curve in curves], axis=0))


def band(curves: Sequence[Curve]) -> Band:
    """Mean, lowest and highest of the curves of K runs, where all have begun and none has ended.

    Runs with the same points are taken as they are, others are interpolated at the points of all.
    """
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[(x >= max(curve.x[0] for curve in curves)) & (x <= min(curve.x[-1] for curve in curves))]
    y_K_T = np.array([np.interp(x, curve.x, curve.y) for curve in curves])
    return Band(x, y_K_T.mean(axis=0), y_K_T.min(axis=0), y_K_T.max(axis=0))
