"""Read the curves of a run over its steps.

Point k of a curve covers the steps ``k * width + 1`` to ``(k + 1) * width``; the database sums over
them.

Axes: T steps, K points of a curve.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.inspect.numbers import usage_totals
from openrlhf_dbb.storage import PosteriorStore, RunRecord, decode
from openrlhf_dbb.storage.read import HeldOut, held_out, unused_rollouts
from openrlhf_dbb.storage.records import TOTALS
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch import queries

POINTS = 1000
_MS_PER_HOUR = 3_600_000

Answer = dict[str, Any]
Curves = dict[str, Floats]
"""(K,) each, by name."""

_SUMMED = (
    "step",
    "rewards",
    "successes",
    "steps",
    *TOTALS,
)


def series(store: PosteriorStore, run: RunRecord, points: int = POINTS) -> Answer:
    """Return the "curves" of a run by name, its "held_out" accuracy, and its "totals".

    The curves have at most ``points`` points. The totals are None if no step was counted.

    Raises:
        StoreError: a value cannot be read.
    """
    # Powers of two: when a run grows, two old points merge into one, and no other point moves.
    width = 1
    while points * width < run.last_step:
        width *= 2
    curves = _curves(store, run, width)
    return {
        "width": width,
        "last": run.last_step,
        "curves": curves,
        "held_out": _held_out(held_out(store, run), curves),
        "totals": _totals(store, run),
    }


def _totals(store: PosteriorStore, run: RunRecord) -> Answer | None:
    totals = usage_totals(store, run)
    if totals["generated"] is None:
        return None
    totals["unused_rollouts"] = unused_rollouts(store, run)
    # A log without advantages does not tell what was trained on.
    totals["parts"] = None if totals["informative"] is None else _parts(totals)
    return totals


def _held_out(measured: HeldOut | None, curves: Curves) -> Answer | None:
    """Return held-out accuracy with its places on the axes of the curves."""
    if measured is None:
        return None
    places = {}
    for name in ("rollouts", "tokens", "hours"):
        # Between two points of the curves the steps of the later one count alike.
        places[name] = np.interp(measured.step, [0, *curves["step"]], [0, *curves[name]])
    return {
        **places,
        "step": measured.step,
        "accuracy": measured.accuracy,
        "prompts": measured.prompts,
        "samples": measured.samples,
    }


def _curves(store: PosteriorStore, run: RunRecord, width: int) -> Curves:
    rows, logged = queries.series(store, run, width)
    sums = {}
    for name in _SUMMED:  # NULL becomes NaN
        sums[name] = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    ends = np.array([_milliseconds(run, row) for row in rows], dtype=np.int64)
    ends_K = np.maximum.accumulate(ends)  # where the clock went back, time stands still
    generated = sums["generated"]
    # Zero variance is not defined at N = 1.
    several = np.where(generated < 2 * sums["groups"], np.nan, generated)
    with np.errstate(divide="ignore", invalid="ignore"):  # a point without any is a gap
        return {
            "step": sums["step"],
            # After a step that was not counted (NaN), the number until a later step is not known.
            "rollouts": np.cumsum(generated),
            "tokens": np.cumsum(sums["generated_tokens"]),
            "hours": (ends_K - ends_K[:1]) / _MS_PER_HOUR,  # from the end of the first point
            "reward": sums["successes"] / sums["rewards"],
            "zero_variance": sums["zero_variance"] / several,
            "given_advantage": sums["rescued"] / several,
            "length": sums["generated_tokens"] / generated,
            **{name: count / sums["steps"] for name, count in _parts(sums).items()},
            **_metric_means(run, logged, (sums["step"] - 1) // width, width),
        }


def _milliseconds(run: RunRecord, row: Any) -> int:
    """Return the end of a step since 1970; raise StoreError if it is no time."""
    ended = decode.moment(row.ended_at, f"created_at of step {row.step} of run {run.name!r}")
    return round(1000 * decode.instant(ended).timestamp())


def metrics_of(run: RunRecord, row: Any) -> Answer:
    """Return the metrics of a row with its step.

    Raises:
        StoreError: they are no JSON object of numbers.
    """
    return decode.numbers(row.metrics, f"metrics of step {row.step} of run {run.name!r}")


def _parts(sums: Mapping[str, Any]) -> Answer:
    """Return how many rollouts are in each of four parts; each generated one is in one of them."""
    return {
        # Trained on, in a group whose rewards differ.
        "mixed": sums["informative"] - sums["rescued"],
        # Trained on, in a zero-variance group that was given an advantage.
        "given": sums["rescued"],
        "no_advantage": sums["trained"] - sums["informative"],
        "filtered": sums["generated"] - sums["trained"],
    }


def _metric_means(run: RunRecord, rows: list[Any], points: Floats, width: int) -> Curves:
    """Return the mean of each logged metric over each point; a step without a value is left out.

    Args:
        rows: step and metrics of each step.
        points: (K,) the number of each point, ascending.
    """
    logged = [metrics_of(run, row) for row in rows]
    steps_T = np.array([row.step for row in rows], dtype=np.int64)
    point_T = np.searchsorted(points, (steps_T - 1) // width)
    means = {}
    for name in dict.fromkeys(name for values in logged for name in values):
        values_T = np.array([values.get(name) for values in logged], dtype=np.float64)
        known_T = ~np.isnan(values_T)
        sums = np.bincount(point_T[known_T], values_T[known_T], minlength=len(points))
        counts = np.bincount(point_T[known_T], minlength=len(points))
        with np.errstate(invalid="ignore"):
            means[f"m:{shown(name, width=None)}"] = sums / counts
    return means
