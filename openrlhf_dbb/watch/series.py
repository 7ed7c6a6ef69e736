"""Read the curves of a run over its steps; the database sums them over points of several steps.

Point k covers the steps ``k * width + 1`` to ``(k + 1) * width``.

Axes: T steps, K points of a curve.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.inspect.show import usage_totals
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.read import COUNTED, SUMS, held_out, unused_rollouts
from openrlhf_dbb.storage.records import TOTALS
from openrlhf_dbb.terminal import shown

POINTS = 1000
_AXES = ("rollouts", "tokens", "hours")

_POINTS = f"""
    SELECT max(step) AS step, max(created_at) AS ended_at, CAST(sum(rollouts) AS BIGINT) AS rewards,
           sum(successes) AS successes, count(*) AS steps, sum(CASE WHEN {COUNTED} THEN 1 ELSE 0 END) AS counted, {SUMS}
    FROM dbb_step WHERE run_id = :run AND step <= :last GROUP BY (step - 1) / :width ORDER BY 1"""
_METRICS = "SELECT step, metrics FROM dbb_step WHERE run_id = :run AND step <= :last ORDER BY step"


def series(store: PosteriorStore, run: RunRecord, points: int = POINTS) -> dict[str, Any]:
    """Return the "curves" of a run by name, (K,) each, in at most ``points`` points, and its totals."""
    # Powers of two: when a run grows, two old points merge into one, and no other point moves.
    width = 1
    while points * width < run.last_step:
        width *= 2
    curves = _curves(store, run, width)
    totals = usage_totals(store, run)
    if totals["generated"] is not None:
        mixed = totals["mixed_groups"]
        totals |= {
            "zero_variance_groups": None if mixed is None else totals["groups"] - mixed,
            "given_groups": None if mixed is None else totals["rescued"] * totals["groups"] / totals["generated"],
            "unused_rollouts": unused_rollouts(store, run),
            "parts": _parts(totals),
        }
    return {
        "width": width,
        "first": min(run.last_step, 1),
        "last": run.last_step,
        "curves": curves,
        "held_out": _held_out(store, run, curves),
        "totals": None if totals["generated"] is None else totals,  # None if no step was counted
    }


def _held_out(store: PosteriorStore, run: RunRecord, curves: Mapping[str, Floats]) -> dict[str, Any] | None:
    measured = held_out(store, run)
    if measured is None:
        return None
    # Between two points of the curves the steps of the later one count alike.
    places = {name: np.interp(measured.step, [0, *curves["step"]], [0, *curves[name]]) for name in _AXES}
    return places | {name: getattr(measured, name) for name in ("step", "accuracy", "prompts", "samples")}


def _curves(store: PosteriorStore, run: RunRecord, width: int) -> dict[str, Floats]:
    rows = store.query(_POINTS, run=run.run_id, last=run.last_step, width=width)
    names = ("step", "rewards", "successes", "steps", "counted", *TOTALS)
    table = np.array([[getattr(row, name) for name in names] for row in rows], dtype=np.float64)
    sums = dict(zip(names, table.reshape(-1, len(names)).T, strict=True))
    # After a step that was not counted, the number of rollouts until a later step is not known.
    unknown = np.cumsum(sums["steps"] - sums["counted"]) > 0
    ends_K = np.array([row.ended_at.rstrip("Z") for row in rows], dtype="datetime64[ms]").astype(np.int64)
    curves = {
        "step": sums["step"],
        "rollouts": np.where(unknown, np.nan, np.cumsum(np.nan_to_num(sums["generated"]))),
        "tokens": np.where(unknown, np.nan, np.cumsum(np.nan_to_num(sums["generated_tokens"]))),
        "hours": (ends_K - ends_K[:1]) / 3_600_000,  # from the end of the first point
    }
    generated, steps = sums["generated"], sums["counted"]
    several = np.where(generated < 2 * sums["groups"], np.nan, generated)  # zero variance is not defined at N = 1
    shares = {  # dividend and divisor
        "reward": (sums["successes"], sums["rewards"]),
        "zero_variance": (sums["zero_variance"], several),
        "given_advantage": (sums["rescued"], several),
        "length": (sums["generated_tokens"], generated),
        **{name: (count, steps) for name, count in _parts(sums).items()},
    }
    with np.errstate(divide="ignore", invalid="ignore"):  # a point without any is a gap in the curve
        curves |= {name: above / below for name, (above, below) in shares.items()}
    return curves | _metric_means(store, run, (sums["step"] - 1) // width, width)


def _parts(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many rollouts are in each of four parts; every generated rollout is in one of them."""
    return {
        "mixed": sums["informative"] - sums["rescued"],  # trained on, in a group whose rewards differ
        "given": sums["rescued"],  # trained on, in a zero-variance group that was given an advantage
        "no_advantage": sums["trained"] - sums["informative"],
        "filtered": sums["generated"] - sums["trained"],
    }


def _metric_means(store: PosteriorStore, run: RunRecord, points: Floats, width: int) -> dict[str, Floats]:
    """Return the mean of each logged metric over each point, by name; a step without a value does not count."""
    rows = store.query(_METRICS, run=run.run_id, last=run.last_step)
    logged = [json.loads(row.metrics or "{}") for row in rows]
    row_T = np.searchsorted(points, (np.array([row[0] for row in rows]) - 1) // width)
    means = {}
    for name in dict.fromkeys(name for values in logged for name in values):
        values_T = np.array([values.get(name) for values in logged], dtype=np.float64)
        known = ~np.isnan(values_T)
        sums = np.bincount(row_T[known], values_T[known], minlength=len(points))
        with np.errstate(invalid="ignore"):
            means[f"m:{shown(name, width=None)}"] = sums / np.bincount(row_T[known], minlength=len(points))
    return means
