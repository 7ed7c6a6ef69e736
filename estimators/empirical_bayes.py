"""Empirical Bayes: one prior of all prompts, fitted online; nothing is kept of a single prompt."""

from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.estimators.base import (
    Estimate,
    Floats,
    RewardEstimator,
    State,
    counts,
    register,
)

WEIGHT = 2.0  # of the prior, in rollouts, where it cannot be estimated
_WEAKEST = 0.05  # the limits of that weight
_STRONGEST = 1e3
_MEAN_LIMIT = 1e-3  # the prior's mean is at least as far from 0 and from 1


@register
@dataclass(frozen=True)
class EmpiricalBayes(RewardEstimator):
    """Shrink each group's mean towards what all prompts have shown so far.

    The success probabilities of the prompts are taken as draws from one Beta(a, b), fitted by the
    method of moments to the S/N of all groups seen, the current ones included::

        mean     = (a + S) / (a + b + N)        nothing is kept of a single prompt
        variance = mean * (1 - mean)            of ONE reward

    With m and v the mean and variance of S/N over the groups, and h the mean of 1/N::

        rho = (v / (m (1 - m)) - h) / (1 - h)       nu = 1 / rho - 1       a = m nu,  b = (1 - m) nu

    ``nu`` is kept in [0.05, 1000] rollouts, m in [0.001, 0.999]. With fewer than two groups, or if
    N is always 1, nu is 2.

    State (shared by all prompts):
        moments: number of groups, and their sums of S/N, (S/N)^2 and 1/N.
        prior: a, b.

    Source: paper, appendix "Comparison with Hierarchical / Empirical-Bayes Prior"; the equations
    are ours.
    """

    name = "empirical_bayes"
    support = "unit"
    shared_fields = ("moments", "prior")

    def initial_state(self, num_prompts: int) -> State:
        """Return the moments of no group, (4,), and the prior a = b = 1, (2,)."""
        return {"moments": np.zeros(4), "prior": np.ones(2)}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the moments with the groups added, (4,), and the prior fitted to them, (2,)."""
        successes, rollouts = counts(rewards_P_G)
        moments = state["moments"] + group_moments(successes, rollouts)
        return {"moments": moments, "prior": fit_beta(moments)}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return mean and variance by the prior and the group, (P,) each."""
        successes, rollouts = counts(rewards_P_G)
        alpha, beta = state["prior"]
        return Estimate.bernoulli(alpha + successes, beta + rollouts - successes)

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return N / (N + a + b), (P,)."""
        _, rollouts = counts(rewards_P_G)
        return rollouts / (rollouts + state["prior"].sum())


def group_moments(
    successes: Floats,
    rollouts: Floats,
    weights: Floats | None = None,
) -> Floats:
    """Return the number of groups, and sums of S/N, (S/N)^2 and 1/N: (4,).

    Args:
        successes: S of each of P groups, in [0, N].
        rollouts: N of each, >= 1.
        weights: how many groups each one counts for; None: one.
    """
    share = successes / rollouts
    if weights is None:
        weights = np.ones_like(share)
    weighted = weights * share
    moments = [weights.sum(), weighted.sum(), weighted @ share, (weights / rollouts).sum()]
    return np.array(moments)


def fit_beta(moments: Floats, weight: float = WEIGHT) -> Floats:
    """Return (a, b) of the Beta behind some groups, by the method of moments.

    Args:
        moments: (4,), of :func:`group_moments`.
        weight: a + b, in rollouts, if the groups do not tell it.
    """
    groups, total, squares, inverse = moments
    if not groups:
        return np.array([weight / 2, weight / 2])
    mean = min(max(total / groups, _MEAN_LIMIT), 1 - _MEAN_LIMIT)
    noise = inverse / groups
    if groups > 1 and noise < 1:
        variance = max(squares - total**2 / groups, 0.0) / (groups - 1)
        spread = (variance / (mean * (1 - mean)) - noise) / (1 - noise)
        weight = beta_weight(spread)
    return np.array([mean * weight, (1 - mean) * weight])


def beta_weight(spread: float) -> float:
    """Return ``a + b``, in [0.05, 1000], of a Beta of mean m, variance ``spread * m (1 - m)``."""
    if spread <= 0:
        return _STRONGEST
    return min(max(1 / spread - 1, _WEAKEST), _STRONGEST)
