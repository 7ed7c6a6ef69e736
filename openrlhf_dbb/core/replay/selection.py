"""Which of a prompt's cached rollouts are replayed, by their rewards.

Axes: M cached rollouts of a prompt, oldest first; K of them are chosen.

Source: RePO, replay strategies (full scope, recency-based, reward-oriented, variance-driven).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


def full(rewards_M: NDArray[np.float64], count: int) -> Positions:
    """Every position; ``count`` is ignored."""
    return np.arange(len(rewards_M))


def recency(rewards_M: NDArray[np.float64], count: int) -> Positions:
    """Positions of the newest ``count``, ascending."""
    return np.arange(max(len(rewards_M) - count, 0), len(rewards_M))


def reward(rewards_M: NDArray[np.float64], count: int) -> Positions:
    """Positions of the ``count`` highest rewards, ascending; of equal ones the oldest.

    With rewards 0 and 1 and at least ``count`` successes in the cache, only successes are replayed: they have zero
    variance, and their advantage is 0.
    """
    return np.sort(np.argsort(-rewards_M, kind="stable")[:count])


def variance(rewards_M: NDArray[np.float64], count: int) -> Positions:
    """Positions of the ``count`` rewards with the largest population variance, ascending.

    Ties: of equal variances the larger sum, of equal rewards the oldest. The best subset consists of the j smallest and
    the count - j largest rewards, for some j: variance is strictly convex in each member, so a member between two
    rewards that were left out could be exchanged for one of them to gain variance.
    """
    if count >= len(rewards_M):
        return full(rewards_M, count)
    ascending = np.sort(rewards_M)
    largest = len(rewards_M) - count
    by_sum = [np.concatenate([ascending[:j], ascending[largest + j :]]) for j in range(count + 1)]
    values, times = np.unique(max(by_sum, key=_spread), return_counts=True)  # max takes the first of the best
    oldest = [np.flatnonzero(rewards_M == value)[:number] for value, number in zip(values, times, strict=True)]
    return np.sort(np.concatenate(oldest))


def _spread(rewards_K: NDArray[np.float64]) -> Fraction:
    """K^2 times the population variance, exact: rounding must not decide a tie."""
    exact = [Fraction(float(value)) for value in rewards_K]
    return len(exact) * sum((value**2 for value in exact), Fraction(0)) - sum(exact, Fraction(0)) ** 2


SELECTIONS: dict[str, Callable[[NDArray[np.float64], int], Positions]] = {
    "full": full,
    "recency": recency,
    "reward": reward,
    "variance": variance,
}
"""By name: (rewards, shape (M,), oldest first; count, at least 1) -> positions, shape (K,), ascending.

K is ``min(count, M)``, or M for "full".
"""
