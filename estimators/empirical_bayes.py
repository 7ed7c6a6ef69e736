from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.estimators.base import Estimate, Floats, RewardEstimator, State, Support, counts, register

WEIGHT = 2.0  # of the prior, in rollouts, where it cannot be estimated
_WEAKEST, _STRONGEST = 0.05, 1e3  # its limits
_MEAN_LIMIT = 1e-3


@register
@dataclass(frozen=True)
class EmpiricalBayes(RewardEstimator):
    """Shrink each group's mean towards what all prompts have shown so far.

    The success probabilities of the prompts are taken as draws from one Beta(a, b), fitted by the method of moments to
    the S/N of all groups seen, the current ones included::

        mean     = (a + S) / (a + b + N)        nothing is kept of a single prompt
        variance = mean * (1 - mean)            of ONE reward

    With m and v the mean and variance of S/N over the groups, and h the mean of 1/N::

        rho = (v / (m (1 - m)) - h) / (1 - h)       nu = 1 / rho - 1       a = m nu,  b = (1 - m) nu

    ``nu`` is kept in [0.05, 1000] rollouts, m in [0.001, 0.999]. With fewer than two groups, or if N is always 1, nu
    is 2.

    State (shared by all prompts):
        moments: number of groups, and their sums of S/N, (S/N)^2 and 1/N.
        prior: a, b.

    Source: paper, appendix "Comparison with Hierarchical / Empirical-Bayes Prior"; the equations are ours.
    """

    name: ClassVar[str] = "empirical_bayes"
    support: ClassVar[Support] = "unit"
    shared_fields: ClassVar[tuple[str, ...]] = ("moments", "prior")

    def initial_state(self, num_prompts: int) -> State:
        return {"moments": np.zeros(4), "prior": np.ones(2)}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        moments = state["moments"] + group_moments(*counts(rewards_P_G))
        return {"moments": moments, "prior": fit_beta(moments)}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        successes, rollouts = counts(rewards_P_G)
        alpha, beta = state["prior"]
        return Estimate.bernoulli(alpha + successes, beta + rollouts - successes)

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        rollouts = counts(rewards_P_G)[1]
        return rollouts / (rollouts + state["prior"].sum())


def group_moments(successes: Floats, rollouts: Floats, counted: Floats | None = None) -> Floats:
    """Return the number of groups, and sums of S/N, (S/N)^2 and 1/N, weighted by ``counted``."""
    share = successes / rollouts
    counted = np.ones_like(share) if counted is None else counted
    return np.array([counted.sum(), (counted * share).sum(), (counted * share) @ share, (counted / rollouts).sum()])


def fit_beta(moments: Floats, weight: float = WEIGHT) -> Floats:
    """Return (a, b) of the Beta behind some groups; ``weight``: a + b if they do not tell it."""
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
    """Return ``a + b``, within limits, of a Beta of variance ``spread * m (1 - m)``."""
    return min(max(1 / spread - 1, _WEAKEST), _STRONGEST) if spread > 0 else _STRONGEST
