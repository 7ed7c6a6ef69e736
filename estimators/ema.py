"""Exponential moving average of a prompt's success rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from estimators.base import Estimate, Floats, RewardEstimator, State, counts
from estimators.registry import register


@register
@dataclass(frozen=True)
class MovingAverage(RewardEstimator):
    """Average a prompt's group means, each past one weighing less by ``discount``.

    With S successes among the N rollouts of a visit::

        mean     = S / N                                             on the first visit
        mean    <- discount * mean + (1 - discount) * S / N          on later ones
        variance = mean * (1 - mean)                                 of ONE reward

    There is no prior, so the variance can collapse: it is exactly 0 as long as all rewards of a prompt have
    been 0, or all 1. Such groups yield no advantage.

    The paper's order is that of DBB: update first, then read, so that the current group is part of its own
    baseline. RAE (SPIRAL) scores a reward against the average of the earlier ones, which starts at 0; a
    subclass with ``reads = "before"`` does the same, except for its first update, which is S / N.

    Args:
        discount: lambda in [0, 1), weight of the past per visit of the same prompt. 0 is the current group
            alone; 1 would keep the first group for ever and is refused.
        partial_credit: accept scores in [0, 1], counted as fractional successes, not only 0 or 1.

    State:
        mean: the average, in [0, 1]; 0 before any rollout.
        visits: number of groups in it.

    Raises:
        ValueError: a parameter is outside its range.

    Example:
        >>> ema = MovingAverage(discount=0.5)
        >>> state, estimate = ema.observe(ema.initial_state(1), [[1.0, 1.0, 1.0, 1.0]])
        >>> estimate
        Estimate(mean=array([1.]), variance=array([0.]))
        >>> ema.observe(state, [[1.0, 0.0, 0.0, 0.0]])[1]
        Estimate(mean=array([0.625]), variance=array([0.234375]))

    Source: paper, appendix "Comparison with Per-Prompt EMA and Laplace Smoothing", for the mean; the
    variance is read as DBB's, without N - 1.
    """

    discount: float = field(default=0.3, metadata={"help": "weight of the past per visit, in [0, 1)"})
    partial_credit: bool = field(default=False, metadata={"help": "accept scores in [0, 1], not only 0 or 1"})

    name: ClassVar[str] = "ema"
    state_fields: ClassVar[tuple[str, ...]] = ("mean", "visits")

    def __post_init__(self) -> None:
        if not 0 <= self.discount < 1:
            raise ValueError(f"ema.discount = {self.discount!r} is not in [0, 1)")

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        return "unit" if self.partial_credit else "binary"

    def initial_state(self, num_prompts: int) -> State:
        return {"mean": np.zeros(num_prompts), "visits": np.zeros(num_prompts)}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        visits = state["visits"] + 1
        # In this form the average of equal group means is exact: 1 stays 1.
        mean = state["mean"] + self._weight(visits) * (successes / rollouts - state["mean"])
        return {"mean": mean, "visits": visits}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        return Estimate(state["mean"], state["mean"] * (1 - state["mean"]))

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return self._weight(state["visits"])

    def mean_without_each(self, state: State, rewards_P_G: Floats, estimate: Estimate) -> Floats | None:
        rest = super().mean_without_each(state, rewards_P_G, estimate)
        if rest is None or self.reads == "before":
            return rest
        # A group's mean has the same weight however few rollouts it is of, down to one.
        successes, rollouts = (of_group[:, None] for of_group in counts(rewards_P_G))
        moved = (rewards_P_G - successes / rollouts) / np.maximum(rollouts - 1, 1)
        weight = self.group_weight(state, rewards_P_G)[:, None]
        return np.where(rollouts > 1, estimate.mean[:, None] - weight * moved, rest)

    def _weight(self, visits: Floats) -> Floats:
        """Weight of the latest of ``visits`` groups."""
        return np.where(visits == 1, 1.0, 1 - self.discount)
