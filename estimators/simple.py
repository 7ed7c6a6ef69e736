"""Estimators of a group alone: the sample mean and Laplace smoothing; and a moving average."""

from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.estimators.base import (
    ESTIMATORS,
    Estimate,
    Floats,
    RewardEstimator,
    State,
    counts,
    parameter,
    register,
)


@dataclass(frozen=True)
class GroupAlone(RewardEstimator):
    """Scores a group by itself.

    The run remembers all groups by another estimator, ``memory``, which changes no advantage.
    """

    memory: str = parameter(
        "auto",
        "what keeps posteriors",
        choices=("auto", "predicted_prior", "dbb", "gaussian"),
    )

    @property
    def belief(self) -> RewardEstimator:
        """The estimator that ``memory`` names, with its default parameters."""
        return ESTIMATORS.build(self.memory)

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return an empty state: nothing is kept between visits."""
        return {}


@register
@dataclass(frozen=True)
class PointEstimator(GroupAlone):
    """Sample mean and N-1 variance of the current group, as in GRPO.

    ``mean = sum(X) / N`` and ``variance = sum((X - mean)^2) / (N - 1)`` over the N rollouts that
    are not missing. The variance is exactly 0 if all N rewards are equal (or N = 1).

    Source: paper, section 2.2 (GRPO's mu and sigma) and section 3.1.
    """

    name = "point"
    min_rollouts = 2

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return the group's mean and N-1 variance, (P,) each, in (squared) reward units."""
        total, rollouts = counts(rewards_P_G)
        mean = total / rollouts
        squares = np.nansum((rewards_P_G - mean[:, None]) ** 2, axis=1)
        # The mean of eight times 0.1 is not exactly 0.1: rounding errors must not count as
        # variance.
        least = np.fmin.reduce(rewards_P_G, axis=1)
        most = np.fmax.reduce(rewards_P_G, axis=1)
        variance = squares / np.maximum(rollouts - 1, 1)
        return Estimate(mean, np.where(least == most, 0.0, variance))

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return 1 for each prompt, (P,): the mean is the group's."""
        return np.ones(len(rewards_P_G))


@register
@dataclass(frozen=True)
class LaplaceSmoothing(GroupAlone):
    """Shrink each group's mean towards 1/2.

    With S successes among N rollouts, which may be fractions::

        mean     = (S + smoothing) / (N + 2 * smoothing)
        variance = mean * (1 - mean)                        of ONE reward, > 0

    Source: paper, appendix "Comparison with Per-Prompt EMA and Laplace Smoothing", for the mean.
    """

    smoothing: float = parameter(
        1.0,
        "pseudo-successes and as many pseudo-failures, in rollouts",
        within="(0, inf)",
    )

    name = "laplace"
    support = "unit"

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return mean and variance of the group with the pseudo-counts, (P,) each."""
        successes, rollouts = counts(rewards_P_G)
        failures = rollouts - successes
        return Estimate.bernoulli(successes + self.smoothing, failures + self.smoothing)

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return N / (N + 2 smoothing), (P,)."""
        _, rollouts = counts(rewards_P_G)
        return rollouts / (rollouts + 2 * self.smoothing)


@register
@dataclass(frozen=True)
class MovingAverage(RewardEstimator):
    """Average a prompt's group means; each past one weighs less by ``discount``.

    With S successes among the N rollouts of a visit::

        mean     = S / N                                             on the first visit
        mean    <- discount * mean + (1 - discount) * S / N          on later ones
        variance = mean * (1 - mean)                                 of ONE reward

    The variance is 0 while all rewards of a prompt are 0, or all 1. Scores in [0, 1] are fractional
    successes.

    State:
        mean, visits: the average, in [0, 1], 0 before any rollout; the number of groups in it.

    Source: paper, appendix "Comparison with Per-Prompt EMA and Laplace Smoothing", for the mean.
    """

    discount: float = parameter(0.3, "weight of the past per visit", within="[0, 1)")

    name = "ema"
    support = "unit"
    state_fields = ("mean", "visits")

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return each prompt's average with the group's mean in it, and one visit more."""
        successes, rollouts = counts(rewards_P_G)
        visits = state["visits"] + 1
        weight = self.group_weight({"visits": visits}, rewards_P_G)
        # In this form the average of equal group means is exact: 1 stays 1.
        mean = state["mean"] + weight * (successes / rollouts - state["mean"])
        return {"mean": mean, "visits": visits}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return the average and mean * (1 - mean), (P,) each."""
        return Estimate(state["mean"], state["mean"] * (1 - state["mean"]))

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return 1 on a first visit, 1 - discount on later ones, (P,)."""
        return np.where(state["visits"] == 1, 1.0, 1 - self.discount)

    def mean_without_each(self, state: State, rewards_P_G: Floats, estimate: Estimate) -> None:
        """Return None: a group weighs the same at any size, so that the formula does not hold."""
