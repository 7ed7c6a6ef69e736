"""A discounted Normal-inverse-gamma posterior: as ``dbb``, for any real reward."""

from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.estimators.base import (
    Estimate,
    Floats,
    RewardEstimator,
    State,
    counts,
    parameter,
    register,
)

_RESOLUTION = 1e-10  # least standard deviation, in units of the mean


@register
@dataclass(frozen=True)
class DiscountedGaussian(RewardEstimator):
    """Track mean and variance of rewards with a Normal-inverse-gamma posterior that forgets.

    With group mean ``xbar`` and ``SS = sum((X - xbar)^2)`` of the N rollouts of a visit, and old
    values on the right::

        weight <- discount * weight + N
        mean   <- (discount * weight * mean + N * xbar) / weight_new
        spread <- discount * spread + SS + discount * weight * N * (xbar - mean)^2 / weight_new
        variance = spread / weight                                of ONE reward, > 0

    ``variance`` is 1 / E[1 / v] of that posterior. On rewards 0 and 1 the defaults give exactly
    ``dbb``.

    State:
        weight: discounted number of rollouts, > 0.
        mean: in reward units.
        spread: discounted sum of squared deviations, in squared reward units, > 0.

    Source: the conjugate update of Gelman et al., Bayesian Data Analysis, section 3.3; discounting
    it is our own.
    """

    discount: float = parameter(0.5, "weight of the past per visit", within="(0, 1]")
    prior_mean: float = parameter(0.5, "expected reward before any rollout", within="(-inf, inf)")
    prior_variance: float = parameter(0.25, "expected variance of one reward", within="(0, inf)")
    prior_weight: float = parameter(2.0, "rollouts that the prior counts for", within="(0, inf)")

    name = "gaussian"
    state_fields = ("weight", "mean", "spread")

    def initial_state(self, num_prompts: int) -> State:
        """Return weight, mean and spread of the prior, (P,) each."""
        spread = self.prior_weight * self.prior_variance
        return {
            "weight": np.full(num_prompts, float(self.prior_weight)),
            "mean": np.full(num_prompts, float(self.prior_mean)),
            "spread": np.full(num_prompts, float(spread)),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the discounted state plus the group; the spread stays above rounding errors."""
        total, rollouts = counts(rewards_P_G)
        group_mean = total / rollouts
        squares = np.nansum((rewards_P_G - group_mean[:, None]) ** 2, axis=1)
        kept = self.discount * state["weight"]
        weight = kept + rollouts
        surprise = group_mean - state["mean"]
        mean = state["mean"] + rollouts / weight * surprise
        between = kept * rollouts / weight * surprise**2
        spread = self.discount * state["spread"] + squares + between
        # Without a floor, rounding errors of the mean would be divided by a vanishing deviation.
        floor = np.maximum((_RESOLUTION * mean) ** 2, np.finfo(float).tiny)
        return {"weight": weight, "mean": mean, "spread": np.maximum(spread, weight * floor)}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return mean and spread / weight, (P,) each, in (squared) reward units."""
        return Estimate(state["mean"], state["spread"] / state["weight"])

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return the share of the group's rollouts in the weight, (P,)."""
        _, rollouts = counts(rewards_P_G)
        return rollouts / state["weight"]
