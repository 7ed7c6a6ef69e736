"""The curves of a run over its steps, summed by the database over points of several steps.

Point k covers the steps ``k * width + 1`` to ``(k + 1) * width``, so that no point moves when steps are added.

Axes: T steps, K points of a curve.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from estimators.probe_error import squared_errors
from openrlhf_dbb.inspect.overview import is_single, mixed_groups, ratio
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch.numbers import number, rounded, whole
from storage import PosteriorStore, RunRecord
from storage.engine import chunks
from storage.held_out import held_out
from storage.usage import TOTALS

Floats = NDArray[np.float64]

LATE_STEPS = 16
"""The metrics of a step may be written a moment after it; the metrics of so many last steps may still be missing."""

PAUSES = ("claim", "take_over", "roll_back")
"""Events between two sessions of a training; the time across one of them is no training."""

MOST_POINTS = 5_000

_METRIC = "m:"
_LONGEST_SHARED = 400  # characters; of the run-wide vectors, only those of one element are drawn

# The sum of big integers is a decimal on PostgreSQL.
_SUMS = ", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in TOTALS)
_POINTS = f"""
    SELECT max(step) AS step, max(created_at) AS moment, CAST(sum(rollouts) AS BIGINT) AS rewards,
           sum(successes) AS successes, count(*) AS steps, count(generated) AS counted, {_SUMS}
    FROM dbb_step WHERE run_id = :run AND step >= :first GROUP BY (step - 1) / :width ORDER BY 1"""
_BEFORE = """
    SELECT count(*) - count(generated) AS uncounted, CAST(coalesce(sum(generated), 0) AS BIGINT) AS generated,
           CAST(coalesce(sum(generated_tokens), 0) AS BIGINT) AS generated_tokens
    FROM dbb_step WHERE run_id = :run AND step < :first"""
_METRICS = f"""
    SELECT step, metrics, CASE WHEN length(shared) <= {_LONGEST_SHARED} THEN shared END
    FROM dbb_step WHERE run_id = :run AND step >= :first ORDER BY step"""
_EXTENT = """
    SELECT coalesce(min(step), 0) AS first, coalesce(max(step), 0) AS last, min(created_at) AS began
    FROM dbb_step WHERE run_id = :run"""
_UNMEASURED = f"""
    SELECT min(step) FROM dbb_step WHERE run_id = :run AND step > :last - {LATE_STEPS} AND metrics IS NULL"""
_GAPS = f"""
    SELECT DISTINCT before.created_at, after.created_at
    FROM dbb_event e JOIN dbb_step before ON before.run_id = e.run_id AND before.step = e.to_step
    JOIN dbb_step after ON after.run_id = e.run_id AND after.step = e.to_step + 1
    WHERE e.run_id = :run AND e.kind IN ({", ".join(f"'{kind}'" for kind in PAUSES)})
      AND e.created_at BETWEEN before.created_at AND after.created_at"""
_PROBES = """
    SELECT p.step, p.samples, p.successes, p.squares, h.mean, h.successes / h.rollouts
    FROM dbb_probe p JOIN dbb_history h ON h.run_id = p.run_id AND h.step = p.step AND h.prompt_id = p.prompt_id
    WHERE p.run_id = :run AND p.samples > 1 ORDER BY p.step"""


def usage(connection: Connection, run_id: int) -> dict[str, Any]:
    """Return the sums of a run's rollout usage by name, and ``steps``, how many steps were counted; None if none."""
    row = connection.execute(
        text(f"SELECT count(generated) AS steps, {_SUMS} FROM dbb_step WHERE run_id = :run"), {"run": run_id}
    ).one()
    return row._asdict()


def series(
    store: PosteriorStore, run: RunRecord, *, points: int, after: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """Return the curves of a run, in at most ``points`` points.

    Args:
        after: leaves out the points whose last step is not after this one. It is ignored if the points are no longer
            of ``width`` steps.

    Returns:
        "curves": by name, (K,) each; "width", of a point; "full", whether no point was left out; "first", "last",
        steps of the run; "settled", the last step up to which no point will change; "held_out", "probes", "totals".
    """
    with store.database.transaction() as connection:
        extent = connection.execute(text(_EXTENT), {"run": run.run_id}).one()
        chosen = _width(extent.first, extent.last, points)
        full = after is None or width != chosen or after > extent.last
        # A point that has grown is sent again as a whole.
        begin = 1 if full or after is None else after // chosen * chosen + 1
        drawn = _curves(connection, run.run_id, begin, chosen, extent.began)
        unmeasured = connection.scalar(text(_UNMEASURED), {"run": run.run_id, "last": extent.last})
        totals = _totals(connection, run.run_id)
        probes = _probe_errors(connection, run.run_id, chosen)
    settled = extent.last if unmeasured is None else unmeasured - 1
    # Coarser than points of one step: pages that ask a moment apart then ask for the same, and share an answer.
    grain = max(chosen, LATE_STEPS)
    return {
        "width": chosen,
        "full": full,
        "first": extent.first,
        "last": extent.last,
        "settled": settled // grain * grain,
        "curves": drawn,
        "held_out": _held_out(store, run),
        "probes": probes,
        "totals": totals,
    }


def _width(first: int, last: int, points: int) -> int:
    """Return the smallest power of two such that at most ``points`` points cover the steps."""
    width = 1
    while (last - 1) // width - (first - 1) // width + 1 > points:
        width *= 2
    return width


def _curves(connection: Connection, run_id: int, first: int, width: int, began: str | None) -> dict[str, list[Any]]:
    key = {"run": run_id, "first": first}
    rows = connection.execute(text(_POINTS), key | {"width": width}).all()
    before = connection.execute(text(_BEFORE), key).one()
    names = ("step", "rewards", "successes", "steps", "counted", *TOTALS)
    table = np.array([[getattr(row, name) for name in names] for row in rows], dtype=np.float64)
    sums = dict(zip(names, table.reshape(-1, len(names)).T, strict=True))
    # After a step that was not counted, the number of rollouts until a later step is not known.
    gaps = before.uncounted + np.cumsum(sums["steps"] - sums["counted"]) > 0
    until = {
        name: np.where(gaps, np.nan, getattr(before, name) + np.cumsum(np.nan_to_num(sums[name])))
        for name in ("generated", "generated_tokens")
    }
    curves: dict[str, list[Any]] = {
        "step": whole(sums["step"]),
        "rollouts": whole(until["generated"]),
        "tokens": whole(until["generated_tokens"]),
        "hours": _hours(connection, run_id, [row.moment for row in rows], began),
    }
    with np.errstate(divide="ignore", invalid="ignore"):  # a point without any is a gap in the curve
        curves |= {name: rounded(above / below) for name, (above, below) in _shares(sums).items()}
    points = (sums["step"] - 1) // width
    return curves | _metric_means(connection, key, points, width)


def _shares(sums: Mapping[str, Floats]) -> dict[str, tuple[Floats, Floats]]:
    """Return what is divided by what, of each curve of the rewards and the rollout usage; (K,) each."""
    generated, steps = sums["generated"], sums["counted"]
    several = np.where(generated < 2 * sums["groups"], np.nan, generated)  # zero variance is not defined at N = 1
    return {
        "reward": (sums["successes"], sums["rewards"]),
        "zero_variance": (sums["zero_variance"], several),
        "given_advantage": (sums["rescued"], several),
        "length": (sums["generated_tokens"], generated),
        **{name: (count, steps) for name, count in _parts(sums).items()},
        "replayed": (sums["replayed"], steps),
        "skipped": (sums["skipped"], steps),
    }


def _parts(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many rollouts are in each of four parts; every generated rollout is in one of them."""
    return {
        "mixed": sums["informative"] - sums["rescued"],  # trained on, in a group whose rewards differ
        "given": sums["rescued"],  # trained on, in a zero-variance group that was given an advantage
        "no_advantage": sums["trained"] - sums["informative"],
        "filtered": sums["generated"] - sums["trained"],
    }


def _hours(connection: Connection, run_id: int, ends: Sequence[str], began: str | None) -> list[float | None]:
    """Return the hours of training until the end of each point, without the gaps between two sessions."""
    if not ends or began is None:
        return []
    pauses = connection.execute(text(_GAPS), {"run": run_id}).all()
    starts, stops = (moments(row[place] for row in pauses) for place in (0, 1))
    ends_K = moments(ends)
    paused_K = ((ends_K[:, None] >= stops) * (stops - starts)).sum(axis=1)
    return rounded(np.maximum(ends_K - moments([began])[0] - paused_K, 0) / 3600)


def _metric_means(connection: Connection, key: dict[str, int], points: Floats, width: int) -> dict[str, list[Any]]:
    """Return the mean of each logged metric over each point, by name; a step without a value does not count."""
    rows = [row for part in chunks(connection, _METRICS, key) for row in part]
    if not rows:
        return {}
    # One document instead of one per step: parsing takes a third of the time.
    logged = [values or {} for values in json.loads(f"[{','.join(row[1] or 'null' for row in rows)}]")]
    for values, (_, _, shared) in zip(logged, rows, strict=True):
        vectors = json.loads(shared) if shared else {}
        values |= {f"shared/{name}": vector[0] for name, vector in vectors.items() if len(vector) == 1}
    row_T = np.searchsorted(points, (np.array([row[0] for row in rows]) - 1) // width)
    means: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for values in logged for name in values):
        values_T = np.array([values.get(name) for values in logged], dtype=np.float64)
        measured = ~np.isnan(values_T)
        with np.errstate(invalid="ignore"):
            sums, counts = (
                np.bincount(row_T[measured], weights, minlength=len(points)) for weights in (values_T[measured], None)
            )
            means[_METRIC + shown(name, width=None)] = rounded(sums / counts)
    return means


def _held_out(store: PosteriorStore, run: RunRecord) -> dict[str, Any] | None:
    measured = held_out(store, run)
    if measured is None:
        return None
    return {
        "step": measured.step.tolist(),
        "accuracy": rounded(measured.accuracy),
        "prompts": measured.prompts,
        "samples": measured.samples,
    }


def _totals(connection: Connection, run_id: int) -> dict[str, Any] | None:
    """Return what the run spent and what it got for it; None if no step was counted."""
    sums = usage(connection, run_id)
    if not sums["steps"]:
        return None
    ends = connection.execute(
        text("SELECT detail FROM dbb_event WHERE run_id = :run AND kind = 'finish'"), {"run": run_id}
    )
    unused = sum(json.loads(row.detail).get("unused_rollouts", 0) for row in ends)
    mixed = mixed_groups(sums)
    names = ("steps", "generated", "generated_tokens", "trained", "replayed", "skipped", "groups")
    return {name: sums[name] for name in names} | {
        "filtered": sums["generated"] - sums["trained"],
        "mixed_groups": number(mixed),
        "zero_variance_groups": None if mixed is None else number(sums["groups"] - mixed),
        "given_groups": None if mixed is None else number(sums["rescued"] * sums["groups"] / sums["generated"]),
        "rollouts_per_mixed_group": number(ratio(sums["generated"], mixed)),
        "tokens_per_mixed_group": number(ratio(sums["generated_tokens"], mixed)),
        "single": is_single(sums),
        "unused_rollouts": unused,
        "parts": _parts(sums),
    }


def _probe_errors(connection: Connection, run_id: int, width: int) -> dict[str, Any] | None:
    """Return the mean squared errors against the probes, of the estimates and of the groups' own means.

    A probe counts if the step was trained on its group. Without probes, return None.
    """
    rows = [row for part in chunks(connection, _PROBES, {"run": run_id}) for row in part]
    if not rows:
        return None
    step, samples, successes, squares, estimate, group = np.array(rows, dtype=np.float64).T
    point, row_V = np.unique((step - 1) // width, return_inverse=True)
    estimates = {"estimate": estimate, "group": group}
    means = {
        name: np.bincount(row_V, squared_errors(values, samples, successes, squares)) / np.bincount(row_V)
        for name, values in estimates.items()
    }
    last = np.searchsorted(step, (point + 1) * width, side="right") - 1
    return {
        "step": whole(step[last]),
        **{name: rounded(values) for name, values in means.items()},
        "groups": len(rows),
        "samples": int(samples.sum()),
    }


def moments(texts: Iterable[str]) -> Floats:
    """Return moments (UTC, ISO 8601) as seconds."""
    return np.array([moment.rstrip("Z") for moment in texts], dtype="datetime64[ms]").astype(np.int64) / 1000
