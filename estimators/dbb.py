"""Discounted Beta-Bernoulli (DBB) estimator: the paper's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from estimators.base import Estimate, Floats, RewardEstimator, State
from estimators.registry import register


@register
@dataclass(frozen=True)
class DiscountedBetaBernoulli(RewardEstimator):
    """Track a drifting success probability with a Beta posterior that forgets.

    Each visit of a prompt shrinks its past counts by ``discount``, then adds the new group's
    successes and failures (S of N rollouts)::

        alpha <- discount * alpha + S        mean     = alpha / (alpha + beta)
        beta  <- discount * beta + N - S     variance = alpha * beta / (alpha + beta)^2

    ``variance`` is that of ONE reward. It is > 0 even when all N rewards agree, so a unanimous group
    still yields an advantage.

    Args:
        discount: lambda in (0, 1], weight kept per visit of the same prompt (per epoch, not per gradient
            step). 1 never forgets. The paper uses 0.25, 0.5 and 0.75 for Qwen3 0.6B, 1.7B and 8B.
        prior_alpha: alpha_0 > 0, pseudo-successes before any rollout.
        prior_beta: beta_0 > 0, pseudo-failures before any rollout.
        partial_credit: accept scores in [0, 1], counted as fractional successes, not only 0 or 1.

    State:
        alpha, beta: discounted counts of successes and failures, in rollouts, > 0.

    Raises:
        ValueError: a parameter is outside its range.

    Example:
        >>> dbb = DiscountedBetaBernoulli(discount=0.5)
        >>> state, estimate = dbb.observe(dbb.initial_state(1), [[1.0, 1.0, 1.0, 1.0]])
        >>> state
        {'alpha': array([4.5]), 'beta': array([0.5])}
        >>> estimate
        Estimate(mean=array([0.9]), variance=array([0.09]))

    Source: paper, Definition 2 and Algorithm 1 (update first, then read).
    """

    discount: float = field(default=0.5, metadata={"help": "weight of the past per visit, in (0, 1]"})
    prior_alpha: float = field(default=1.0, metadata={"help": "pseudo-successes before any rollout, > 0"})
    prior_beta: float = field(default=1.0, metadata={"help": "pseudo-failures before any rollout, > 0"})
    partial_credit: bool = field(default=False, metadata={"help": "accept scores in [0, 1], not only 0 or 1"})

    name: ClassVar[str] = "dbb"
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ValueError(f"dbb.discount = {self.discount!r} is not in (0, 1]")
        for parameter in ("prior_alpha", "prior_beta"):
            value = getattr(self, parameter)
            if not 0 < value < np.inf:
                raise ValueError(f"dbb.{parameter} = {value!r} is not a finite number above 0")

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        return "unit" if self.partial_credit else "binary"

    def initial_state(self, num_prompts: int) -> State:
        return {
            "alpha": np.full(num_prompts, float(self.prior_alpha)),
            "beta": np.full(num_prompts, float(self.prior_beta)),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes = np.nansum(rewards_P_G, axis=1)
        rollouts = np.sum(~np.isnan(rewards_P_G), axis=1)
        # The floor keeps the counts positive: 1,074 unanimous visits at discount 0.5 underflow to 0.
        return {
            "alpha": np.maximum(self.discount * state["alpha"] + successes, np.finfo(float).tiny),
            "beta": np.maximum(self.discount * state["beta"] + (rollouts - successes), np.finfo(float).tiny),
        }

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        alpha, beta = state["alpha"], state["beta"]
        # Not mean * (1 - mean): that is exactly 0 after some 50 unanimous visits at discount 0.5.
        mean, failure = alpha / (alpha + beta), beta / (alpha + beta)
        return Estimate(mean, mean * failure)
