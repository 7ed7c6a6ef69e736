"""Point estimator: the current group alone, as GRPO does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from estimators.base import Estimate, Floats, RewardEstimator, State, counts
from estimators.registry import register


@register
@dataclass(frozen=True)
class PointEstimator(RewardEstimator):
    """Sample mean and N-1 variance of the current group; nothing is kept between visits.

    ``mean = sum(X) / N`` and ``variance = sum((X - mean)^2) / (N - 1)`` over the N rollouts that are
    not missing. The variance is exactly 0 when all N rewards are equal (or N = 1): no advantage.

    Example:
        >>> point = PointEstimator()
        >>> point.observe(point.initial_state(1), [[1.0, 0.0, 0.0, 0.0]])[1]
        Estimate(mean=array([0.25]), variance=array([0.25]))

    Source: paper, section 2.2 (GRPO's mu and sigma) and section 3.1.
    """

    name: ClassVar[str] = "point"
    min_rollouts: ClassVar[int] = 2

    def initial_state(self, num_prompts: int) -> State:
        return {}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        return {}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        total, rollouts = counts(rewards_P_G)
        mean = total / rollouts
        squares = np.nansum((rewards_P_G - mean[:, None]) ** 2, axis=1)
        # The mean of eight times 0.1 is not exactly 0.1: rounding errors must not count as variance.
        zero_variance = np.fmin.reduce(rewards_P_G, axis=1) == np.fmax.reduce(rewards_P_G, axis=1)
        return Estimate(mean, np.where(zero_variance, 0.0, squares / np.maximum(rollouts - 1, 1)))

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return np.ones(len(rewards_P_G))
