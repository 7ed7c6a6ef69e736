"""Follow the prompts of a run over their visits: mastered, learning, forgotten, unsolved.

An epoch here is a visit number: epoch 3 is every prompt's third visit of the run.

Axes: P prompts, V visits (one group of rollouts each), E epochs, B bins of the mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf_dbb.core.step import earlier_visits
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.engine import table
from openrlhf_dbb.storage.read import Integers, current_means

STATES = ("mastered", "learning", "forgotten", "unsolved", "no visits")
MASTERED, LEARNING, FORGOTTEN, UNSOLVED, NO_VISITS = range(5)
THRESHOLDS = {"mastered": 0.9, "forgotten": 0.3, "unsolved": 0.1}
"""Mastered: a mean of at least this. Forgotten: this far below its peak. Unsolved: a mean of at most this."""

BINS = 20

_VISITS = """
    SELECT step, prompt_id, rollouts, successes, coalesce(alpha / nullif(alpha + beta, 0), mean) FROM dbb_history
    WHERE run_id = :run ORDER BY step, prompt_id"""


@dataclass(frozen=True)
class Visits:
    """The states of the prompts of a run."""

    last: int  # the last step that was read, 0 if there is none
    prompt_id: Integers  # (P,) the prompts that have a posterior, ascending
    visits: Integers  # (P,) steps that trained on the prompt
    first: Floats  # (P,) mean after the first visit; NaN without visits
    mean: Floats  # (P,) mean after the last visit; without visits, the mean now
    state: Integers  # (P,) index into STATES after the last visit
    epochs: dict[str, list[Any]]  # totals of each: epoch, prompts, success_rate, mean, states (E, 4), histogram (E, B)
    unit: bool  # whether all rewards may be in [0, 1]


def read_visits(store: PosteriorStore, run: RunRecord) -> Visits:
    """Read the whole history of a run: about 2 s for a million visits."""
    kind = [(name, "<f8") for name in ("step", "prompt_id", "rollouts", "successes", "mean")]
    with store.database.transaction() as connection:
        visits = table(connection, kind, _VISITS, {"run": run.run_id}).view("<f8").reshape(-1, len(kind))
    return summed(*current_means(store, run), visits)


def summed(prompt_id: Integers, mean_now: Floats, visits: Floats) -> Visits:
    """Return the states of prompts, from their visits.

    Args:
        prompt_id, mean_now: (P,) of the prompts with a posterior, ids ascending.
        visits: (V, 5) step, prompt id, rollouts, successes and mean afterwards, ordered by step.
    """
    step_V, id_V, rollouts_V, successes_V, mean_V = visits.T
    ids = np.union1d(prompt_id, id_V).astype(np.int64)
    row_V = np.searchsorted(ids, id_V)
    first, peak = np.full(len(ids), np.nan), np.full(len(ids), -np.inf)
    mean = np.full(len(ids), np.nan)
    mean[np.searchsorted(ids, prompt_id)] = mean_now
    solved, state = np.zeros(len(ids), dtype=bool), np.full(len(ids), NO_VISITS)
    names = ("epoch", "prompts", "success_rate", "mean", "states", "histogram")
    epochs: dict[str, list[Any]] = {name: [] for name in names}
    # One epoch after the other: in each of them a prompt has one visit at most, so whole columns can be updated.
    epoch_V = earlier_visits(row_V)
    ends = np.cumsum(np.bincount(epoch_V))
    by_epoch = np.split(np.argsort(epoch_V, kind="stable"), ends[:-1]) if len(visits) else []
    for epoch, visit in enumerate(by_epoch, start=1):
        row, now = row_V[visit], mean_V[visit]
        if epoch == 1:
            first[row] = now
        peak[row] = np.maximum(peak[row], now)
        solved[row] |= successes_V[visit] > 0
        mean[row] = now
        learnt = np.where(now >= THRESHOLDS["mastered"], MASTERED, LEARNING)
        learnt[peak[row] - now >= THRESHOLDS["forgotten"]] = FORGOTTEN
        learnt[~solved[row] & (now <= THRESHOLDS["unsolved"])] = UNSOLVED
        state[row] = learnt
        # A mean of exactly 1 belongs to the last bin.
        bins = np.clip((now * BINS).astype(np.int64), 0, BINS - 1)
        rate = successes_V[visit].sum() / rollouts_V[visit].sum()
        states, histogram = np.bincount(state[row], minlength=4), np.bincount(bins, minlength=BINS)
        for name, value in zip(names, (epoch, len(visit), rate, now.mean(), states, histogram), strict=True):
            epochs[name].append(value)
    return Visits(
        last=int(step_V[-1]) if len(visits) else 0,
        prompt_id=ids,
        visits=np.bincount(row_V, minlength=len(ids)),
        first=first,
        mean=mean,
        state=state,
        epochs=epochs,
        unit=bool(((successes_V >= 0) & (successes_V <= rollouts_V)).all()),
    )
