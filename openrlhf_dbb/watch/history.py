"""Read what became of each prompt of a run over its visits, and draw a picture of it.

Axes: K columns of the picture, P prompts, V visits (one group of rollouts each).
"""

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.records import Integers
from openrlhf_dbb.watch import queries

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

STATES = (
    "mastered",
    "learning",
    "forgotten",
    "never solved",
    "no visits",
)
MASTERED = 0
LEARNING = 1
FORGOTTEN = 2
UNSOLVED = 3
NO_VISITS = 4
# Mastered: a mean of at least this. Forgotten: this far below its peak. Never solved: a mean of at
# most this.
THRESHOLDS = {
    "mastered": 0.9,
    "forgotten": 0.3,
    "unsolved": 0.1,
}
MOST_COLUMNS = 400  # of a picture, about as many as a screen shows
MOST_CELLS = 4_000_000  # about; a browser draws them in a moment
LEVELS = 126
DRAWN = 128
CLASSES = 5  # of means, for the shares among drawn prompts and among the others


@dataclass(frozen=True)
class Visits:
    """The visits of a run's prompts, and their states."""

    last: int  # the last step that was read, 0 if there is none
    prompt_id: Integers  # (P,) the prompts that have a posterior, ascending
    visits: Integers  # (P,) steps that trained on the prompt
    first: Floats  # (P,) mean after the first visit; NaN without visits
    mean: Floats  # (P,) mean after the last visit; without visits, the mean now
    state: Integers  # (P,) index into STATES after the last visit
    state_V: Integers  # (V,) the same after each visit
    unit: bool  # whether the scores lie in [0, 1]; otherwise every visited prompt is "learning"


Pool = tuple[Visits, dict[str, Any]]
"""The visits of a run's prompts, and their :func:`picture`."""


def read_visits(store: PosteriorStore, run: RunRecord) -> Pool:
    """Read the whole history of a run, and draw it: about 2 s for a million visits."""
    history = queries.history(store, run)
    visits = summed(history.prompt_id, history.mean, history.visits, unit=history.unit)
    return visits, picture(visits, history.visits)


def picture(visits: Visits, history: Floats) -> dict[str, Any]:
    """Return a picture of all prompts, one row each, highest mean first.

    Args:
        visits, history: what :func:`summed` returned, and the rows that it was given.

    Returns:
        "id", "state": (P,) of the rows.
        "width": the steps that a column covers.
        "low", "high": the means of the lowest and the highest level.
        "states": (K, 4) visited prompts in each state after the column.
        "beliefs": (2, CLASSES + 1, K) shares among the column's prompts and among the others: of
        each class of means before the column, and of prompts not visited before.
        "cells": (P, K) bytes, row after row, compressed by zlib and in base64. A byte is 0 before
        the first visit, else 1 + the level in [0, LEVELS] of the mean after the column, + DRAWN if
        the column has a visit.
    """
    step_V, id_V, _, mean_V = history.T
    prompts = len(visits.prompt_id)
    most = min(MOST_COLUMNS, max(1, MOST_CELLS // max(1, prompts)))
    width = 1
    while width * most < visits.last:  # powers of two, as of the curves
        width *= 2
    low = 0.0
    high = 1.0
    if not visits.unit and len(history):
        low = float(mean_V.min())
        high = float(mean_V.max())
    share_V = np.clip((mean_V - low) / max(high - low, 1e-300), 0, 1)
    column_V = (step_V.astype(np.int64) - 1) // width
    row_V = np.searchsorted(visits.prompt_id, id_V)
    columns = -(-visits.last // width)
    # The visits are ordered by step: the last one of a column stays.
    cells_KP = np.zeros((columns, prompts), dtype=np.uint8)
    cells_KP[column_V, row_V] = 1 + np.rint(share_V * LEVELS)
    states_KP = np.zeros_like(cells_KP)
    states_KP[column_V, row_V] = visits.state_V
    counts, shares = _run_through(cells_KP, states_KP)
    order = np.lexsort((visits.prompt_id, -visits.mean))
    compressed = zlib.compress(cells_KP.T[order].tobytes(), 1)
    return {
        "id": visits.prompt_id[order],
        "state": visits.state[order],
        "cells": base64.b64encode(compressed).decode(),
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
        shares[0, :, k] = _shares(class_P[is_drawn_P])
        shares[1, :, k] = _shares(class_P[~is_drawn_P])
        cell_P = np.where(is_drawn_P, cells_KP[k], cell_P)
        state_P = np.where(is_drawn_P, states_KP[k], state_P)
        counts.append(np.bincount(state_P, minlength=len(STATES))[:NO_VISITS])
        cells_KP[k] = cell_P + DRAWN * is_drawn_P.astype(np.uint8)
    return counts, shares


def _shares(classes: Integers) -> Floats:
    """Return the share of each class of means, and of prompts not visited before."""
    return np.bincount(classes, minlength=CLASSES + 1) / max(len(classes), 1)


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
    highest = np.maximum.accumulate(row * len(means) + rank)
    peak = means[highest % max(len(means), 1)]
    is_solved = np.maximum.accumulate(2 * row + is_right) % 2 == 1
    state = np.where(mean >= THRESHOLDS["mastered"], MASTERED, LEARNING)
    state[peak - mean >= THRESHOLDS["forgotten"]] = FORGOTTEN
    state[~is_solved & (mean <= THRESHOLDS["unsolved"])] = UNSOLVED
    return state
