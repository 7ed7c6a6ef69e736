"""Prompts over their visits: what was mastered, what was forgotten, epoch by epoch.

An epoch here is a visit number: epoch 3 is every prompt's third visit of the run.

Axes: P prompts, V visits (groups of rollouts) ordered by prompt, then step, E epochs, B bins of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage import PosteriorLog, ProbeLog, UsageLog

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

STATES = ("mastered", "learning", "forgotten", "impossible", "no visits")
MASTERED, LEARNING, FORGOTTEN, IMPOSSIBLE, NO_VISITS = range(5)
MASTERED_FROM = 0.9
FORGOTTEN_BY = 0.3
IMPOSSIBLE_TO = 0.1

BINS = 20


@dataclass(frozen=True)
class Trajectories:
    """The visits of a run, prompt by prompt.

    Attributes:
        prompt_id: (P,) ascending; the prompts with a visit.
        start: (P + 1,) where each prompt's visits begin in what follows.
        step, epoch, rollouts: (V,) int64.
        successes: (V,) sum of the rewards.
        mean: (V,) posterior mean after the visit: alpha / (alpha + beta), else the estimate used in it.
        variance: (V,) estimated variance of one reward, used in the visit.
        alpha, beta: (V,) posterior after the visit; NaN if the estimator has none.
        zero_variance: (V,) bool, all rewards of the group are the same.
        rescued: (V,) bool, of these, the group had an advantage anyway.
        state: (V,) the prompt's state after the visit, an index into ``STATES``.
    """

    prompt_id: Whole
    start: Whole
    step: Whole
    epoch: Whole
    rollouts: Whole
    successes: Floats
    mean: Floats
    variance: Floats
    alpha: Floats
    beta: Floats
    zero_variance: NDArray[np.bool_]
    rescued: NDArray[np.bool_]
    state: Whole

    @property
    def first(self) -> Whole:
        """(P,) index of each prompt's first visit."""
        return self.start[:-1]

    @property
    def last(self) -> Whole:
        """(P,) index of each prompt's last visit."""
        return self.start[1:] - 1


@dataclass(frozen=True)
class Epochs:
    """Totals of the visits of each epoch.

    Attributes:
        epoch, prompts: (E,) the epoch's number, and how many prompts reached it.
        success_rate, mean: (E,) rewards over rollouts; posterior mean over prompts.
        zero_variance, rescued: (E,) shares of the groups.
        states: (E, 4) prompts in each of the first four ``STATES``.
        histogram: (E, B) prompts by posterior mean, equal bins of [0, 1].
    """

    epoch: Whole
    prompts: Whole
    success_rate: Floats
    mean: Floats
    zero_variance: Floats
    rescued: Floats
    states: Whole
    histogram: Whole


def trajectories(log: PosteriorLog, visits: dict[int, int], usage: UsageLog) -> Trajectories:
    """Sort a run's log by prompt.

    Args:
        log: the run's groups.
        visits: by prompt id, its visits in the run, those included that are no longer in the log (pruned).
        usage: the run's rollout usage; empty if it was not recorded.
    """
    order = np.lexsort((log.step, log.prompt_id))
    prompt_id, first = np.unique(log.prompt_id[order], return_index=True)
    start = np.append(first, len(order)).astype(np.int64)
    per_prompt = np.diff(start)
    pairs = zip(prompt_id.tolist(), per_prompt.tolist(), strict=True)
    before = np.array([visits.get(each, kept) - kept for each, kept in pairs], dtype=np.int64)
    epoch = np.arange(len(order)) - np.repeat(start[:-1] - before, per_prompt) + 1
    alpha, beta = log.alpha[order], log.beta[order]
    zero_variance, rescued = _zero_variance(log, usage)
    mean = np.where(np.isnan(alpha + beta), log.mean[order], alpha / (alpha + beta))
    return Trajectories(
        prompt_id,
        start,
        log.step[order],
        epoch,
        log.rollouts[order],
        log.successes[order],
        mean,
        log.variance[order],
        alpha,
        beta,
        zero_variance[order],
        rescued[order],
        _states(start, mean, log.successes[order]),
    )


def _states(start: Whole, mean: Floats, successes: Floats) -> Whole:
    state = np.full(len(mean), LEARNING)
    peak, solved = np.full(len(start) - 1, -np.inf), np.zeros(len(start) - 1, dtype=bool)
    for visit in range(int(np.diff(start).max(initial=0))):
        prompts = np.flatnonzero(np.diff(start) > visit)
        rows = start[prompts] + visit
        peak[prompts] = np.maximum(peak[prompts], mean[rows])
        solved[prompts] |= successes[rows] > 0
        state[rows[mean[rows] >= MASTERED_FROM]] = MASTERED
        state[rows[peak[prompts] - mean[rows] >= FORGOTTEN_BY]] = FORGOTTEN
        state[rows[~solved[prompts] & (mean[rows] <= IMPOSSIBLE_TO)]] = IMPOSSIBLE
    return state


def _zero_variance(log: PosteriorLog, usage: UsageLog) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(V,) groups of zero variance, and those of them that had an advantage, in the order of the log.

    The usage log says so. Where it has no row: rewards that are all 0 or all 1 and, for an advantage, an estimated
    variance above 0; a method that filters groups may still have left such a group out of the training.
    """
    zero_variance = (log.successes == 0) | (log.successes == log.rollouts)
    rescued = zero_variance & (log.variance > 0)
    at, row = same_groups(log, usage)
    zero_variance[at], rescued[at] = usage.zero_variance[row] > 0, usage.rescued[row] > 0
    return zero_variance, rescued


def same_groups(log: PosteriorLog, other: UsageLog | ProbeLog) -> tuple[Whole, Whole]:
    """Rows of both logs that are of the same step and prompt, ordered by step, then prompt id."""
    base = int(max(log.prompt_id.max(initial=0), other.prompt_id.max(initial=0))) + 1
    mine, others = (each.step * base + each.prompt_id for each in (log, other))
    _, at, row = np.intersect1d(mine, others, assume_unique=True, return_indices=True)
    return at, row


def epochs(found: Trajectories) -> Epochs:
    """Totals of each epoch."""
    numbers, at_V = np.unique(found.epoch, return_inverse=True)
    size = len(numbers)

    def total(values: NDArray[np.generic]) -> Floats:
        return np.asarray(np.bincount(at_V, values.astype(np.float64), minlength=size), dtype=np.float64)

    prompts = np.bincount(at_V, minlength=size)
    bin_V = np.clip((found.mean * BINS).astype(np.int64), 0, BINS - 1)
    return Epochs(
        numbers,
        prompts,
        total(found.successes) / total(found.rollouts),
        total(found.mean) / prompts,
        total(found.zero_variance) / prompts,
        total(found.rescued) / prompts,
        np.bincount(at_V * 4 + found.state, minlength=4 * size).reshape(size, 4),
        np.bincount(at_V * BINS + bin_V, minlength=BINS * size).reshape(size, BINS),
    )
