"""Laplace smoothing of the current group's success rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from estimators.base import Estimate, Floats, RewardEstimator, State, bernoulli, counts
from estimators.registry import register


@register
@dataclass(frozen=True)
class LaplaceSmoothing(RewardEstimator):
    """Shrink each group's mean towards 1/2; nothing is kept between visits.

    With S successes among N rollouts::

        mean     = (S + smoothing) / (N + 2 * smoothing)
        variance = mean * (1 - mean)                        of ONE reward, > 0

    It is DBB without a history: on a first visit, DBB with prior (a, a) gives the same estimate for
    ``smoothing = discount * a``. Compared with DBB it shows what the history is worth. ``predictive`` is None:
    it would be Beta(smoothing, smoothing) for every prompt, but an empty state does not say how many there are.

    Args:
        smoothing: lambda > 0, pseudo-successes and as many pseudo-failures, in rollouts.
        partial_credit: accept scores in [0, 1], counted as fractional successes, not only 0 or 1.

    Raises:
        ValueError: a parameter is outside its range.

    Example:
        >>> laplace = LaplaceSmoothing(smoothing=0.5)
        >>> laplace.observe(laplace.initial_state(1), [[1.0, 1.0, 1.0, 1.0]])[1]
        Estimate(mean=array([0.9]), variance=array([0.09]))

    Source: paper, appendix "Comparison with Per-Prompt EMA and Laplace Smoothing", for the mean.
    """

    smoothing: float = field(default=1.0, metadata={"help": "pseudo-successes and pseudo-failures each, > 0"})
    partial_credit: bool = field(default=False, metadata={"help": "accept scores in [0, 1], not only 0 or 1"})

    name: ClassVar[str] = "laplace"
    never_collapses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.smoothing < np.inf:
            raise ValueError(f"laplace.smoothing = {self.smoothing!r} is not a finite number above 0")

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        return "unit" if self.partial_credit else "binary"

    def initial_state(self, num_prompts: int) -> State:
        return {}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        return {}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        successes, rollouts = counts(rewards_P_G)
        return bernoulli(successes + self.smoothing, rollouts - successes + self.smoothing)

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        rollouts = counts(rewards_P_G)[1]
        return rollouts / (rollouts + 2 * self.smoothing)
