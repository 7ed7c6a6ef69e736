"""How good an estimator was at a run's recorded visits: squared error, predictive likelihood, advantages.

Axes: V visits, G rollouts of the largest group, S possible numbers of successes (0 to N of the largest group).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimators import Estimate, standardized
from estimators.base import Floats
from estimators.probe_error import mean_variance
from openrlhf_dbb.lab.visits import Visits


def error_from_log(visits: Visits, mean: Floats, group_weight: Floats) -> Floats:
    """Unbiased estimate of ``(mean - p)^2`` from the recorded successes alone, (V,); NaN where N < 2.

    With x = S/N and w the group weight::

        (mean - x)^2 - (1 - 2 w) S (N - S) / (N^2 (N - 1))

    Derivation: given the past and the policy, S ~ Binomial(N, p) and mean = w x + c with w and c fixed. In
    ``(mean - p)^2 = (mean - x)^2 + 2 (mean - x)(x - p) + (x - p)^2`` the last term has the expectation
    Var x = p (1 - p) / N; in the middle one mean - x = (w - 1) x + c, so its expectation is 2 (w - 1) Var x.
    Hence ``E (mean - p)^2 = E (mean - x)^2 - (1 - 2 w) Var x``, and S (N - S) / (N^2 (N - 1)) is unbiased for Var x.

    A single value may be negative; only means over many visits are meaningful. Every group of a step must have been
    recorded, also those with zero variance. Run-wide numbers fitted to the step's own groups make w and c depend on S:
    the result is then too low, see ``OPTIMISM``.

    Args:
        mean: (V,) the estimate the visit was scored with.
        group_weight: (V,) share of ``mean`` that is the visit's own S/N, in [0, 1].
    """
    return (mean - visits.successes / visits.rollouts) ** 2 - (1 - 2 * group_weight) * noise(visits)


OPTIMISM = 20.0
"""Allowance, in units of ``noise / prompts``, for how far ``error_from_log`` is too low for ``auto``, whose run-wide
numbers are fitted to the groups they score. In simulation it was 8 on average over all regimes
(``scripts/replay_choice.py``)."""


def noise(visits: Visits) -> Floats:
    """Unbiased estimate of Var S/N = p (1 - p) / N, (V,); NaN where N < 2."""
    return mean_variance(visits.rollouts, visits.successes, visits.successes)


def beta_binomial(alpha: Floats, beta: Floats, rollouts: Floats) -> Floats:
    """Log-probability of every number of successes among N rollouts, (V, S); -inf beyond N.

    Args:
        alpha, beta: (V,) > 0, of the success probability's Beta distribution.
        rollouts: (V,) N >= 1.
    """
    fewer = np.arange(rollouts.max(initial=1))
    left = rollouts[:, None] - fewer
    with np.errstate(divide="ignore"):
        choices = np.log(np.maximum(left, 0)) - np.log(fewer + 1)
    up = np.log(alpha[:, None] + fewer) - np.log(beta[:, None] + np.maximum(left - 1, 0))
    logs = np.concatenate([np.zeros((len(alpha), 1)), np.cumsum(choices + up, axis=1)], axis=1)
    highest = logs.max(axis=1, keepdims=True)
    return np.asarray(logs - highest - np.log(np.exp(logs - highest).sum(axis=1, keepdims=True)))


def log_score(visits: Visits, alpha: Floats, beta: Floats) -> Floats:
    """Log-probability (nats) of a visit's S, given what was known before it, (V,); NaN at first visits.

    Args:
        alpha, beta: (V,) of the predictive distribution before the visit.
    """
    score = np.full(len(alpha), np.nan)
    past = np.flatnonzero(visits.earlier > 0)
    logs = beta_binomial(alpha[past], beta[past], visits.rollouts[past])
    score[past] = logs[np.arange(len(past)), visits.successes[past].astype(np.int64)]
    return score


@dataclass(frozen=True)
class Advantages:
    """Standardized advantages of all rollouts of a run.

    Attributes:
        zero_groups: share of groups in which every advantage is 0.
        zeros: share of rollouts with advantage 0.
        size: mean of abs(advantage) over rollouts.
        histogram: share of rollouts in each bin of ``EDGES``, those with advantage 0 left out; the outer bins
            also hold what lies beyond.
    """

    zero_groups: float
    zeros: float
    size: float
    histogram: Floats


EDGES = np.linspace(-3, 3, 25)


def advantages(visits: Visits, estimate: Estimate) -> Advantages:
    """The advantages ``(X - mean) / sqrt(variance)`` of the recorded rollouts."""
    advantages_V_G = standardized(visits.rewards_V_G, estimate)
    values = advantages_V_G[~np.isnan(visits.rewards_V_G)]
    nonzero = values[values != 0]
    inside = np.clip(nonzero, EDGES[0], EDGES[-1])
    return Advantages(
        zero_groups=float((advantages_V_G == 0).all(axis=1).mean()),
        zeros=1 - len(nonzero) / len(values),
        size=float(np.abs(values).mean()),
        histogram=np.histogram(inside, EDGES)[0] / len(values),
    )
