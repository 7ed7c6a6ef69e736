"""Prompts over their visits: what was mastered, what was forgotten, epoch by epoch.

An epoch here is a visit number: epoch 3 is every prompt's third visit of the run. The history is read once, oldest
first, in short transactions: a long one would keep SQLite's log of changes from being emptied.

Axes: P prompts, V visits (groups of rollouts) of a part of the history, E epochs, B bins of the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from openrlhf_dbb.watch.numbers import rounded, whole
from openrlhf_dbb.watch.series import Steps
from storage import PosteriorStore, RunRecord
from storage.engine import chunks

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

STATES = ("mastered", "learning", "forgotten", "impossible", "no visits")
MASTERED, LEARNING, FORGOTTEN, IMPOSSIBLE, NO_VISITS = range(5)
MASTERED_FROM = 0.9
FORGOTTEN_BY = 0.3
IMPOSSIBLE_TO = 0.1

BINS = 20
PART = 100_000
"""Rows of the history read in one transaction, about."""

LISTED = 10

MEAN = "coalesce(alpha / nullif(alpha + beta, 0), mean)"
"""SQL: the posterior mean after a visit, or the estimate used in it if the estimator has no alpha and beta."""

_READ = f"""
    SELECT step, prompt_id, rollouts, successes, {MEAN} FROM dbb_history
    WHERE run_id = :run AND step BETWEEN :first AND :last ORDER BY step, prompt_id"""
_PROMPTS = "SELECT prompt_id, visits, mean FROM posteriors WHERE run_id = :run ORDER BY prompt_id"


def states(mean: Floats, successes: Floats) -> Whole:
    """(V,) the state of one prompt after each of its visits, an index into ``STATES``.

    Args:
        mean: (V,) posterior mean after each visit; successes: (V,) sum of its rewards.
    """
    peak, solved = np.maximum.accumulate(mean), np.logical_or.accumulate(successes > 0)
    return _state(mean, peak, solved)


def _state(mean: Floats, peak: Floats, solved: NDArray[np.bool_]) -> Whole:
    """States from the mean after a visit, the highest mean so far, and whether any reward was above 0 so far."""
    state = np.where(mean >= MASTERED_FROM, MASTERED, LEARNING)
    state[peak - mean >= FORGOTTEN_BY] = FORGOTTEN
    state[~solved & (mean <= IMPOSSIBLE_TO)] = IMPOSSIBLE
    return state


class Visits:
    """The prompts of a run and its epochs, accumulated over the part of the history that was read.

    Not for several threads at once.

    Attributes:
        until: the last step that was read, 0 before the first.
        restarts: how often what had been read turned out to be no longer true.
        prompt_id: (P,) ascending; the prompts that have a posterior.
        visits: (P,) steps that trained on the prompt.
        current: (P,) posterior mean now; NaN if there is none.
        seen: (P,) visits that were read; first, mean: (P,) posterior mean after the first and the last of them.
        state: (P,) after the last of them, an index into ``STATES``; last_step: (P,) its step, 0 if there is none.
    """

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self.restarts = 0
        self._start_over()

    def _start_over(self) -> None:
        self.until = self._opened_at = 0
        self._opened = False
        self._digest: bytes | None = None  # of the step ``until``
        self._mark: Any = None  # newest event that changed the history
        self._unit = True
        self.prompt_id: Whole = np.empty(0, dtype=np.int64)
        self.visits = self.seen = self.last_step = self.prompt_id
        self.state: Whole = self.prompt_id
        self.current = self.first = self.mean = self._peak = np.empty(0)
        self._solved = np.empty(0, dtype=bool)
        self._epochs = np.zeros((0, 4))  # prompts, rollouts, successes, sum of the means
        self._states_E = np.zeros((0, 4), dtype=np.int64)
        self._bins_E = np.zeros((0, BINS), dtype=np.int64)

    @property
    def opened(self) -> bool:
        """Whether anything was read."""
        return self._opened

    def behind(self, steps: Steps) -> bool:
        """Whether some of the steps have not been read."""
        return not self._opened or (len(steps.step) > 0 and self.until < steps.step[-1])

    def read_part(self, store: PosteriorStore, steps: Steps) -> None:
        """Read the next steps, about ``PART`` rows, in one transaction; from the start if the past has changed.

        Args:
            steps: all steps, as ``series.Series`` has them.

        Raises:
            StoreError: the store cannot be read; nothing has changed then.
        """
        with store.database.transaction() as connection:
            mark = self._newest_change(connection)
            if self._opened and not (mark == self._mark and self._is_there(connection)):
                self._start_over()
                self.restarts += 1
            if not self._opened:
                self._open(connection, mark)
            for first, last in self._parts(steps, self.until)[:1]:
                rows = [row for part in chunks(connection, _READ, self._key(first, last)) for row in part]
                digest = self._digest_of(connection, last)
                if digest is None:  # rolled back since the steps were read
                    return
                self._digest, self.until = digest, last
                if rows:
                    step, prompt_id, rollouts, successes, mean = zip(*rows, strict=True)
                    self.add(
                        np.array(step, dtype=np.int64),
                        np.array(prompt_id, dtype=np.int64),
                        np.array(rollouts, dtype=np.float64),
                        np.array(successes, dtype=np.float64),
                        np.array(mean, dtype=np.float64),
                    )

    def _key(self, first: int, last: int) -> dict[str, int]:
        return {"run": self._run.run_id, "first": first, "last": last}

    def _newest_change(self, connection: Connection) -> Any:
        query = """SELECT event_id, detail FROM dbb_event
                   WHERE run_id = :run AND kind IN ('warm_start', 'roll_back')
                   ORDER BY event_id DESC LIMIT 1"""
        row = connection.execute(text(query), {"run": self._run.run_id}).one_or_none()
        return None if row is None else tuple(row)

    def _digest_of(self, connection: Connection, step: int) -> bytes | None:
        query = text("SELECT digest FROM dbb_step WHERE run_id = :run AND step = :step")
        digest = connection.scalar(query, {"run": self._run.run_id, "step": step})
        return None if digest is None else bytes(digest)

    def _is_there(self, connection: Connection) -> bool:
        return not self.until or self._digest_of(connection, self.until) == self._digest

    def _open(self, connection: Connection, mark: Any) -> None:
        """Read the posteriors as they are now."""
        parts = [np.array(rows, dtype=np.float64) for rows in chunks(connection, _PROMPTS, self._key(0, 0))]
        prompt_id, visits, current = np.concatenate([np.empty((0, 3)), *parts]).T
        self._make_room(prompt_id.astype(np.int64))
        self.visits, self.current = visits.astype(np.int64), current.copy()
        query = "SELECT last_step FROM dbb_run WHERE run_id = :run"
        self._opened_at = connection.execute(text(query), {"run": self._run.run_id}).scalar_one()
        self.until = 0
        self._digest = self._digest_of(connection, self.until)
        self._mark, self._opened = mark, True

    def _parts(self, steps: Steps, after: int) -> list[tuple[int, int]]:
        """First and last step of parts of about ``PART`` rows, of the steps behind ``after``."""
        left = np.flatnonzero(steps.step > after)
        if not len(left):
            return []
        step, rows = steps.step[left].astype(np.int64), steps.prompts[left]
        number = ((np.cumsum(rows) - rows) // PART).astype(np.int64)
        ends = np.append(np.flatnonzero(np.diff(number)), len(step) - 1)
        return list(zip(step[np.append(0, ends[:-1] + 1)].tolist(), step[ends].tolist(), strict=True))

    def share(self, steps: Steps) -> float:
        """Return the share of the history that was read, 0 to 1."""
        if not self._opened:
            return 0.0
        if not len(steps.step):
            return 1.0
        rows = steps.prompts
        return float(rows[steps.step <= self.until].sum() / rows.sum()) if rows.sum() else 1.0

    def _make_room(self, prompt_id: Whole) -> None:
        """Let these prompts be known too."""
        ids = np.union1d(self.prompt_id, prompt_id)
        if len(ids) == len(self.prompt_id):
            return
        at = np.searchsorted(ids, self.prompt_id)

        def wider(values: NDArray[Any], missing: float) -> NDArray[Any]:
            wide = np.full(len(ids), missing, dtype=values.dtype)
            wide[at] = values
            return wide

        self.visits, self.seen, self.last_step = (wider(each, 0) for each in (self.visits, self.seen, self.last_step))
        self.state = wider(self.state, NO_VISITS)
        self.current, self.first, self.mean = (wider(each, np.nan) for each in (self.current, self.first, self.mean))
        self._peak, self._solved = wider(self._peak, -np.inf), wider(self._solved, False)
        self.prompt_id = ids

    def add(self, step: Whole, prompt_id: Whole, rollouts: Floats, successes: Floats, mean: Floats) -> None:
        """Accumulate visits, each (V,), ordered by step."""
        self._make_room(prompt_id)
        self._unit &= bool(((successes >= 0) & (successes <= rollouts)).all())
        row_V = np.searchsorted(self.prompt_id, prompt_id)
        epoch_V, state_V = np.empty_like(row_V), np.empty_like(row_V)
        for nth in _occurrences(row_V):  # in each of them, a prompt occurs at most once
            row = row_V[nth]
            new = self.seen[row] == 0
            self.first[row[new]] = mean[nth][new]
            self.seen[row] += 1
            self._peak[row] = np.maximum(self._peak[row], mean[nth])
            self._solved[row] |= successes[nth] > 0
            self.mean[row], self.last_step[row] = mean[nth], step[nth]
            self.state[row] = state_V[nth] = _state(mean[nth], self._peak[row], self._solved[row])
            epoch_V[nth] = self.seen[row] - 1
        later = step > self._opened_at if self._opened else np.ones(len(step), dtype=bool)
        self.visits += np.bincount(row_V[later], minlength=len(self.visits))
        self.current[row_V[later]] = mean[later]  # of several, numpy keeps the last
        self._add_epochs(epoch_V, state_V, rollouts, successes, mean)

    def _add_epochs(self, epoch_V: Whole, state_V: Whole, rollouts: Floats, successes: Floats, mean: Floats) -> None:
        size = max(int(epoch_V.max()) + 1, len(self._epochs))
        bin_V = np.clip((mean * BINS).astype(np.int64), 0, BINS - 1)
        sums = [np.bincount(epoch_V, each, minlength=size) for each in (np.ones(len(mean)), rollouts, successes, mean)]
        self._epochs = _taller(self._epochs, size) + np.stack(sums, axis=1)
        self._states_E = _taller(self._states_E, size) + _table(epoch_V, state_V, size, 4)
        self._bins_E = _taller(self._bins_E, size) + _table(epoch_V, bin_V, size, BINS)

    def epochs(self) -> dict[str, list[Any]]:
        """Totals of each epoch that has visits.

        Returns:
            epoch, prompts: (E,) its number, from 1, and how many prompts' visits were read; success_rate: rewards over
            rollouts; mean: posterior mean over prompts; states: (E, 4) prompts in each of the first four ``STATES``;
            histogram: (E, B) prompts by posterior mean, equal bins of [0, 1].
        """
        there = np.flatnonzero(self._epochs[:, 0])
        prompts, rollouts, successes, mean = self._epochs[there].T
        return {
            "epoch": (there + 1).tolist(),
            "prompts": whole(prompts),
            "success_rate": rounded(successes / rollouts),
            "mean": rounded(mean / prompts),
            "states": self._states_E[there].tolist(),
            "histogram": self._bins_E[there].tolist(),
        }

    def state_counts(self) -> list[int]:
        """Prompts in each of the ``STATES``."""
        return np.bincount(self.state, minlength=len(STATES)).tolist()

    @property
    def unit(self) -> bool:
        """Whether all rewards read so far may be in [0, 1]."""
        return self._unit

    def movers(self) -> tuple[Whole, Whole]:
        """Rows of the prompts whose posterior mean rose most, and fell most, from the first visit to the last."""
        visited = np.flatnonzero(self.seen)
        change = (self.mean - self.first)[visited]
        order = np.lexsort((self.prompt_id[visited], change))
        rising = order[::-1][:LISTED]
        falling = order[:LISTED]
        return visited[rising[change[rising] > 0]], visited[falling[change[falling] < 0]]


def _occurrences(row_V: Whole) -> list[Whole]:
    """Indices of the first occurrence of each row, of the second, ..."""
    order = np.argsort(row_V, kind="stable")
    begins = np.flatnonzero(np.diff(row_V[order], prepend=-1))
    counts = np.diff(np.append(begins, len(order)))
    number = np.arange(len(order)) - np.repeat(begins, counts)
    by_number = np.argsort(number, kind="stable")
    return np.split(order[by_number], np.cumsum(np.bincount(number))[:-1]) if len(order) else []


def _taller(values: NDArray[Any], size: int) -> NDArray[Any]:
    return np.concatenate([values, np.zeros((size - len(values), values.shape[1]), dtype=values.dtype)])


def _table(row: Whole, column: Whole, rows: int, columns: int) -> Whole:
    return np.bincount(row * columns + column, minlength=rows * columns).reshape(rows, columns)
