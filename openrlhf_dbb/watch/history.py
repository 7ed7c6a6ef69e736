"""Read the history of a run: its curves over the steps, and what became of each prompt over its visits.

Point k of a curve covers the steps ``k * width + 1`` to ``(k + 1) * width``; the database sums over them.

Axes: T steps, K points of a curve or columns of the picture, P prompts, V visits (one group of rollouts each).
"""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.inspect.show import usage_totals
from openrlhf_dbb.storage import PosteriorStore, RunRecord, decode
from openrlhf_dbb.storage.engine import table
from openrlhf_dbb.storage.read import SUMS, held_out, unused_rollouts
from openrlhf_dbb.storage.records import TOTALS, Integers
from openrlhf_dbb.terminal import shown

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
        parts = None if totals["informative"] is None else _parts(totals)
        totals |= {"unused_rollouts": unused_rollouts(store, run), "parts": parts}
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
    of_run = f"of run {run.name!r}"
    ends = [decode.moment(row.ended_at, f"created_at of step {row.step} {of_run}") for row in rows]
    ends_K = np.array([end.rstrip("Z") for end in ends], dtype="datetime64[ms]").astype(np.int64)
    ends_K = np.maximum.accumulate(ends_K)  # where the clock went back, time stands still
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
    of_run = f"of run {run.name!r}"
    logged = [decode.numbers(row.metrics, f"metrics of step {row.step} {of_run}") for row in rows]
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
COLUMNS = 400  # the most of a picture, about as many as a screen shows
CELLS = 4_000_000  # about the most of a picture; a browser draws them in a moment
LEVELS, DRAWN = 126, 128
CLASSES = 5  # of means, for the shares among drawn prompts and among the others
_VISITS = """
    SELECT step, prompt_id, rollouts, successes, coalesce(alpha / nullif(alpha + beta, 0), mean) FROM dbb_history
    WHERE run_id = :run ORDER BY step, prompt_id"""
_NOW = "SELECT prompt_id, mean FROM posteriors WHERE run_id = :run ORDER BY prompt_id"


@dataclass(frozen=True)
class Visits:
    last: int  # the last step that was read, 0 if there is none
    prompt_id: Integers  # (P,) the prompts that have a posterior, ascending
    visits: Integers  # (P,) steps that trained on the prompt
    first: Floats  # (P,) mean after the first visit; NaN without visits
    mean: Floats  # (P,) mean after the last visit; without visits, the mean now
    state: Integers  # (P,) index into STATES after the last visit
    state_V: Integers  # (V,) the same after each visit
    unit: bool  # whether all rewards may be in [0, 1]


def read_visits(store: PosteriorStore, run: RunRecord) -> tuple[Visits, dict[str, Any]]:
    """Read the whole history of a run, and draw it: about 2 s for a million visits."""
    kind = [(name, "<f8") for name in ("step", "prompt_id", "rollouts", "successes", "mean")]
    with store.database.transaction() as connection:
        visits = table(connection, kind, _VISITS, {"run": run.run_id}).view("<f8").reshape(-1, len(kind))
        now = table(connection, [("prompt_id", "<i8"), ("mean", "<f8")], _NOW, {"run": run.run_id})
    found = summed(now["prompt_id"], now["mean"], visits)
    return found, picture(found, visits)


def picture(found: Visits, visits: Floats) -> dict[str, Any]:
    """Return a picture of all prompts, one row each, highest mean first; a column covers ``width`` steps.

    Returns:
        "id", "state" (P,) of the rows; "width"; "low", "high": the means of the lowest and the highest level;
        "states" (K, 4): visited prompts in each state after the column.
        "beliefs" (2, CLASSES + 1, K): shares among the column's prompts and among the others: of each class of means
        before the column, and of prompts not visited before.
        "cells": (P, K) bytes, row after row, compressed by zlib and in base64. A byte is 0 before the first visit, else
        1 + the level in [0, LEVELS] of the mean after the column, + DRAWN if the column has a visit.
    """
    step_V, id_V, _, _, mean_V = visits.T
    prompts, width = len(found.prompt_id), 1
    while width * min(COLUMNS, max(1, CELLS // max(1, prompts))) < found.last:  # powers of two, as of the curves
        width *= 2
    low, high = (0.0, 1.0) if found.unit else (float(mean_V.min()), float(mean_V.max()))
    cells, states = np.zeros((2, -(-found.last // width), prompts), dtype=np.uint8)
    at_V = (step_V.astype(np.int64) - 1) // width, np.searchsorted(found.prompt_id, id_V)
    # The visits are ordered by step: the last one of a column stays.
    share_V = np.clip((mean_V - low) / max(high - low, 1e-300), 0, 1)
    cells[at_V] = 1 + np.rint(share_V * LEVELS)
    states[at_V] = found.state_V
    cell, state = np.zeros(prompts, dtype=np.uint8), np.full(prompts, NO_VISITS, dtype=np.uint8)
    class_of = np.array([CLASSES, *np.minimum(np.arange(LEVELS + 1) * CLASSES // LEVELS, CLASSES - 1)])
    counts, beliefs = [], []
    for column, state_after in zip(cells, states, strict=True):
        drawn = column > 0
        before = class_of[cell]
        of_both = [np.bincount(before[some], minlength=CLASSES + 1) / max(some.sum(), 1) for some in (drawn, ~drawn)]
        beliefs.append(of_both)
        cell, state = np.where(drawn, column, cell), np.where(drawn, state_after, state)
        column[:] = cell + DRAWN * drawn.astype(np.uint8)
        counts.append(np.bincount(state, minlength=len(STATES))[:NO_VISITS])
    order = np.lexsort((found.prompt_id, -found.mean))
    packed = base64.b64encode(zlib.compress(cells.T[order].tobytes(), 1)).decode()
    rows = {"id": found.prompt_id[order], "state": found.state[order], "cells": packed}
    shares = np.array(beliefs).reshape(-1, 2, CLASSES + 1).transpose(1, 2, 0)
    return rows | {"width": width, "low": low, "high": high, "states": counts, "beliefs": shares}


def summed(prompt_id: Integers, mean_now: Floats, visits: Floats) -> Visits:
    """Return the states of prompts, from their visits.

    Args:
        prompt_id, mean_now: (P,) of the prompts with a posterior, ids ascending.
        visits: (V, 5) step, prompt id, rollouts, successes and mean afterwards, ordered by step.
    """
    step_V, id_V, rollouts_V, successes_V, mean_V = visits.T
    ids = np.union1d(prompt_id, id_V).astype(np.int64)
    row_V = np.searchsorted(ids, id_V)
    order = np.argsort(row_V, kind="stable")  # prompt after prompt, the visits of each by step
    row, now, right = row_V[order], mean_V[order], successes_V[order] > 0
    # Keys that grow with the prompt: a running maximum over all visits begins anew at each prompt.
    values, rank = np.unique(now, return_inverse=True)
    peak = values[np.maximum.accumulate(row * len(values) + rank) % max(len(values), 1)]
    solved = np.maximum.accumulate(2 * row + right) % 2 == 1
    learnt = np.where(now >= THRESHOLDS["mastered"], MASTERED, LEARNING)
    learnt[peak - now >= THRESHOLDS["forgotten"]] = FORGOTTEN
    learnt[~solved & (now <= THRESHOLDS["unsolved"])] = UNSOLVED
    first, mean = np.full((2, len(ids)), np.nan)
    state, state_V = np.full(len(ids), NO_VISITS), np.empty(len(visits), dtype=np.int64)
    mean[np.searchsorted(ids, prompt_id)] = mean_now
    mean[row], state[row], state_V[order] = now, learnt, learnt  # of each prompt, the last visit stays
    first[row[::-1]] = now[::-1]
    return Visits(
        last=int(step_V[-1]) if len(visits) else 0,
        prompt_id=ids,
        visits=np.bincount(row_V, minlength=len(ids)),
        first=first,
        mean=mean,
        state=state,
        state_V=state_V,
        unit=bool(((successes_V >= 0) & (successes_V <= rollouts_V)).all()),
    )
