"""Read the history of a run: its curves over the steps, and what became of each prompt over its visits.

Point k of a curve covers the steps ``k * width + 1`` to ``(k + 1) * width``; the database sums over them.

Axes: T steps, K points of a curve or columns of the picture, P prompts, V visits (one group of rollouts each).
"""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.inspect.show import usage_totals
from openrlhf_dbb.storage import PosteriorStore, RunRecord, decode
from openrlhf_dbb.storage.engine import table
from openrlhf_dbb.storage.read import SUMS, held_out, unused_rollouts
from openrlhf_dbb.storage.records import TOTALS, Integers
from openrlhf_dbb.terminal import shown

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

POINTS = 1000
_AXES = ("rollouts", "tokens", "hours")

_POINTS = f"""
    SELECT max(step) AS step, max(created_at) AS ended_at, CAST(sum(rollouts) AS BIGINT) AS rewards,
           sum(successes) AS successes, count(*) AS steps, {SUMS}
    FROM dbb_step WHERE run_id = :run AND step <= :last GROUP BY (step - 1) / :width ORDER BY 1"""
_METRICS = "SELECT step, metrics FROM dbb_step WHERE run_id = :run AND step <= :last ORDER BY step"


def series(store: PosteriorStore, run: RunRecord, points: int = POINTS) -> dict[str, Any]:
    """Return the "curves" of a run by name, (K,) each, in at most ``points`` points, and its totals."""
    # Powers of two: when a run grows, two old points merge into one, and no other point moves.
    width = 1
    while points * width < run.last_step:
        width *= 2
    curves, measured = _curves(store, run, width), held_out(store, run)
    totals = usage_totals(store, run)
    if totals["generated"] is not None:
        totals["unused_rollouts"] = unused_rollouts(store, run)
        # A log without advantages does not tell what was trained on.
        totals["parts"] = None if totals["informative"] is None else _parts(totals)
    return {
        "width": width,
        "last": run.last_step,
        "curves": curves,
        "held_out": measured
        and {
            # Between two points of the curves the steps of the later one count alike.
            **{name: np.interp(measured.step, [0, *curves["step"]], [0, *curves[name]]) for name in _AXES},
            **{name: getattr(measured, name) for name in ("step", "accuracy", "prompts", "samples")},
        },
        "totals": None if totals["generated"] is None else totals,  # None if no step was counted
    }


def _curves(store: PosteriorStore, run: RunRecord, width: int) -> dict[str, Floats]:
    rows = store.query(_POINTS, run=run.run_id, last=run.last_step, width=width)
    names = ("step", "rewards", "successes", "steps", *TOTALS)
    table = np.array([[getattr(row, name) for name in names] for row in rows], dtype=np.float64)
    sums = dict(zip(names, table.reshape(-1, len(names)).T, strict=True))
    ends = np.array([_milliseconds(run, row) for row in rows], dtype=np.int64)
    ends_K = np.maximum.accumulate(ends)  # where the clock went back, time stands still
    curves = {
        "step": sums["step"],
        # After a step that was not counted (NaN), the number until a later step is not known.
        "rollouts": np.cumsum(sums["generated"]),
        "tokens": np.cumsum(sums["generated_tokens"]),
        "hours": (ends_K - ends_K[:1]) / 3_600_000,  # from the end of the first point
    }
    generated = sums["generated"]
    several = np.where(generated < 2 * sums["groups"], np.nan, generated)  # zero variance is not defined at N = 1
    shares = {  # dividend and divisor
        "reward": (sums["successes"], sums["rewards"]),
        "zero_variance": (sums["zero_variance"], several),
        "given_advantage": (sums["rescued"], several),
        "length": (sums["generated_tokens"], generated),
        **{name: (count, sums["steps"]) for name, count in _parts(sums).items()},
    }
    with np.errstate(divide="ignore", invalid="ignore"):  # a point without any is a gap in the curve
        curves |= {name: above / below for name, (above, below) in shares.items()}
    return curves | _metric_means(store, run, (sums["step"] - 1) // width, width)


def _milliseconds(run: RunRecord, row: Any) -> int:
    """Return the end of a step since 1970; raise StoreError if it is no time."""
    ended = decode.moment(row.ended_at, f"created_at of step {row.step} of run {run.name!r}")
    return round(1000 * datetime.fromisoformat(ended.replace("Z", "+00:00")).timestamp())


def metrics_of(run: RunRecord, row: Any) -> dict[str, Any]:
    """Return the metrics of a row with its step; raise StoreError if they are no JSON object of numbers."""
    return decode.numbers(row.metrics, f"metrics of step {row.step} of run {run.name!r}")


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
    logged = [metrics_of(run, row) for row in rows]
    row_T = np.searchsorted(points, (np.array([row[0] for row in rows]) - 1) // width)
    means = {}
    for name in dict.fromkeys(name for values in logged for name in values):
        values_T = np.array([values.get(name) for values in logged], dtype=np.float64)
        known = ~np.isnan(values_T)
        sums = np.bincount(row_T[known], values_T[known], minlength=len(points))
        with np.errstate(invalid="ignore"):
            means[f"m:{shown(name, width=None)}"] = sums / np.bincount(row_T[known], minlength=len(points))
    return means


STATES = ("mastered", "learning", "forgotten", "never solved", "no visits")
MASTERED, LEARNING, FORGOTTEN, UNSOLVED, NO_VISITS = range(5)
# Mastered: a mean of at least this. Forgotten: this far below its peak. Never solved: a mean of at most this.
THRESHOLDS = {"mastered": 0.9, "forgotten": 0.3, "unsolved": 0.1}
MOST_COLUMNS = 400  # of a picture, about as many as a screen shows
MOST_CELLS = 4_000_000  # about; a browser draws them in a moment
LEVELS, DRAWN = 126, 128
CLASSES = 5  # of means, for the shares among drawn prompts and among the others
_VISITS = """
    SELECT step, prompt_id, successes, coalesce(alpha / nullif(alpha + beta, 0), mean)
    FROM dbb_history WHERE run_id = :run ORDER BY step, prompt_id"""
_NOW = "SELECT prompt_id, mean FROM posteriors WHERE run_id = :run ORDER BY prompt_id"
_OUTSIDE = "SELECT 1 FROM dbb_history WHERE run_id = :run AND ({condition}) LIMIT 1"
# The variance of N rewards in [0, 1] with a mean m is at most m (1 - m) N / (N - 1).
_TOO_FAR_APART = "variance > mean * (1 - mean) * rollouts / nullif(rollouts - 1.0, 0) + 1e-9"
_KEPT_SCORES = """
    SELECT score FROM dbb_rollout WHERE run_id = :run ORDER BY step {direction} LIMIT 1000"""
_SOME_SCORES = f"""
    SELECT min(score) AS low, max(score) AS high FROM
    (SELECT * FROM ({_KEPT_SCORES.format(direction="ASC")}) early
     UNION ALL SELECT * FROM ({_KEPT_SCORES.format(direction="DESC")}) late) kept"""


def has_unit_scores(store: PosteriorStore, run: RunRecord) -> bool:
    """Return whether all scores of a run lie in [0, 1], as far as the store tells.

    Only then a sum of 0 means that nothing was solved: of scores -1 and 1 it means that half was.
    """
    outside = "successes < 0 OR successes > rollouts"
    if run.estimator == "point":  # its means and variances are those of the groups themselves
        outside += f" OR {_TOO_FAR_APART}"
    if store.query(_OUTSIDE.format(condition=outside), run=run.run_id):
        return False
    (kept,) = store.query(_SOME_SCORES, run=run.run_id)
    if kept.low is not None:
        return bool(kept.low >= 0 and kept.high <= 1)
    # Without kept rollouts: the other memories take only scores in [0, 1].
    memory = run.parameters.get("memory", run.estimator)
    return memory != "gaussian" or run.estimator == "point"


@dataclass(frozen=True)
class Visits:
    last: int  # the last step that was read, 0 if there is none
    prompt_id: Integers  # (P,) the prompts that have a posterior, ascending
    visits: Integers  # (P,) steps that trained on the prompt
    first: Floats  # (P,) mean after the first visit; NaN without visits
    mean: Floats  # (P,) mean after the last visit; without visits, the mean now
    state: Integers  # (P,) index into STATES after the last visit
    state_V: Integers  # (V,) the same after each visit
    unit: bool  # whether the scores lie in [0, 1]; otherwise every visited prompt is "learning"


def read_visits(store: PosteriorStore, run: RunRecord) -> tuple[Visits, dict[str, Any]]:
    """Read the whole history of a run, and draw it: about 2 s for a million visits."""
    kind = [(name, "<f8") for name in ("step", "prompt_id", "successes", "mean")]
    with store.database.transaction() as connection:
        rows = table(connection, kind, _VISITS, {"run": run.run_id})
        now = table(connection, [("prompt_id", "<i8"), ("mean", "<f8")], _NOW, {"run": run.run_id})
    history = rows.view("<f8").reshape(-1, len(kind))
    visits = summed(now["prompt_id"], now["mean"], history, unit=has_unit_scores(store, run))
    return visits, picture(visits, history)


def picture(visits: Visits, history: Floats) -> dict[str, Any]:
    """Return a picture of all prompts, one row each, highest mean first; a column covers ``width`` steps.

    Args:
        visits, history: what :func:`summed` returned, and the rows that it was given.

    Returns:
        "id", "state" (P,) of the rows; "width"; "low", "high": the means of the lowest and the highest level;
        "states" (K, 4): visited prompts in each state after the column.
        "beliefs" (2, CLASSES + 1, K): shares among the column's prompts and among the others: of each class of means
        before the column, and of prompts not visited before.
        "cells": (P, K) bytes, row after row, compressed by zlib and in base64. A byte is 0 before the first visit, else
        1 + the level in [0, LEVELS] of the mean after the column, + DRAWN if the column has a visit.
    """
    step_V, id_V, _, mean_V = history.T
    prompts = len(visits.prompt_id)
    most = min(MOST_COLUMNS, max(1, MOST_CELLS // max(1, prompts)))
    width = 1
    while width * most < visits.last:  # powers of two, as of the curves
        width *= 2
    low, high = 0.0, 1.0
    if not visits.unit and len(history):
        low, high = float(mean_V.min()), float(mean_V.max())
    place_V = (step_V.astype(np.int64) - 1) // width, np.searchsorted(visits.prompt_id, id_V)
    level_V = np.rint(np.clip((mean_V - low) / max(high - low, 1e-300), 0, 1) * LEVELS)
    # The visits are ordered by step: the last one of a column stays.
    cells_KP = np.zeros((-(-visits.last // width), prompts), dtype=np.uint8)
    cells_KP[place_V] = 1 + level_V
    states_KP = np.zeros_like(cells_KP)
    states_KP[place_V] = visits.state_V
    counts, shares = _run_through(cells_KP, states_KP)
    order = np.lexsort((visits.prompt_id, -visits.mean))
    return {
        "id": visits.prompt_id[order],
        "state": visits.state[order],
        "cells": base64.b64encode(zlib.compress(cells_KP.T[order].tobytes(), 1)).decode(),
        "width": width,
        "low": low,
        "high": high,
        "states": counts,
        "beliefs": shares,
    }


def _run_through(cells_KP: Bytes, states_KP: Bytes) -> tuple[list[Integers], Floats]:
    """Return "states" and "beliefs" of :func:`picture`; fill the cells between two visits.

    Args:
        cells_KP: 1 + the level of a prompt's last visit in the column, 0 without a visit.
        states_KP: its state after that visit.
    """
    class_of_level = np.minimum(np.arange(LEVELS + 1) * CLASSES // LEVELS, CLASSES - 1)
    class_of_cell = np.array([CLASSES, *class_of_level])
    cell_P = np.zeros(cells_KP.shape[1], dtype=np.uint8)
    state_P = np.full(cells_KP.shape[1], NO_VISITS, dtype=np.uint8)
    counts = []
    shares = np.zeros((2, CLASSES + 1, len(cells_KP)))
    for k in range(len(cells_KP)):
        is_drawn_P = cells_KP[k] > 0
        class_P = class_of_cell[cell_P]
        for which, some in enumerate((class_P[is_drawn_P], class_P[~is_drawn_P])):
            shares[which, :, k] = np.bincount(some, minlength=CLASSES + 1) / max(len(some), 1)
        cell_P = np.where(is_drawn_P, cells_KP[k], cell_P)
        state_P = np.where(is_drawn_P, states_KP[k], state_P)
        counts.append(np.bincount(state_P, minlength=len(STATES))[:NO_VISITS])
        cells_KP[k] = cell_P + DRAWN * is_drawn_P.astype(np.uint8)
    return counts, shares


def summed(prompt_id: Integers, mean_now: Floats, history: Floats, *, unit: bool) -> Visits:
    """Return the states of prompts, from their visits.

    Args:
        prompt_id, mean_now: (P,) of the prompts with a posterior, ids ascending.
        history: (V, 4) step, prompt id, successes and mean afterwards, ordered by step.
        unit: whether the scores lie in [0, 1].
    """
    step_V, id_V, successes_V, mean_V = history.T
    ids = np.union1d(prompt_id, id_V).astype(np.int64)
    row_V = np.searchsorted(ids, id_V)
    order = np.argsort(row_V, kind="stable")  # prompt after prompt, the visits of each by step
    row = row_V[order]
    mean = mean_V[order]
    state = np.full(len(history), LEARNING)
    if unit:
        state = _states(row, mean, successes_V[order] > 0)
    state_V = np.empty(len(history), dtype=np.int64)
    state_V[order] = state
    first_P = np.full(len(ids), np.nan)
    first_P[row[::-1]] = mean[::-1]
    mean_P = np.full(len(ids), np.nan)
    mean_P[np.searchsorted(ids, prompt_id)] = mean_now
    mean_P[row] = mean  # of each prompt, the last visit stays
    state_P = np.full(len(ids), NO_VISITS)
    state_P[row] = state
    return Visits(
        last=int(step_V[-1]) if len(history) else 0,
        prompt_id=ids,
        visits=np.bincount(row_V, minlength=len(ids)),
        first=first_P,
        mean=mean_P,
        state=state_P,
        state_V=state_V,
        unit=unit,
    )


def _states(row: Integers, mean: Floats, is_right: Bools) -> Integers:
    """Return the state after each visit.

    Args:
        row, mean, is_right: (V,) place of the prompt, mean afterwards, whether a rollout was right;
            prompt after prompt, the visits of each by step.
    """
    # Keys that grow with the prompt: a running maximum over all visits begins anew at each prompt.
    means, rank = np.unique(mean, return_inverse=True)
    peak = means[np.maximum.accumulate(row * len(means) + rank) % max(len(means), 1)]
    is_solved = np.maximum.accumulate(2 * row + is_right) % 2 == 1
    state = np.where(mean >= THRESHOLDS["mastered"], MASTERED, LEARNING)
    state[peak - mean >= THRESHOLDS["forgotten"]] = FORGOTTEN
    state[~is_solved & (mean <= THRESHOLDS["unsolved"])] = UNSOLVED
    return state
