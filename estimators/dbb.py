"""Discounted Beta-Bernoulli (DBB) estimator: the paper's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from estimators.base import Estimate, Floats, RewardEstimator, State, bernoulli, counts
from estimators.registry import register

NEVER = -1.0


@register
@dataclass(frozen=True)
class DiscountedBetaBernoulli(RewardEstimator):
    """Track a drifting success probability with a Beta posterior that forgets.

    Each visit of a prompt shrinks its past counts by ``discount``, then adds the new group's
    successes and failures (S of N rollouts)::

        alpha <- discount * alpha + S        mean     = alpha / (alpha + beta)
        beta  <- discount * beta + N - S     variance = alpha * beta / (alpha + beta)^2

    ``variance`` is that of ONE reward. It is > 0 even when all N rewards are equal, so a group with zero
    variance still yields an advantage.

    With ``forgetting="updates"`` the past shrinks with the policy updates since the prompt's last visit,
    by ``discount ** (elapsed / updates_per_epoch)``: the same if every prompt comes once an epoch, and
    correct also where prompts come back irregularly (dynamic sampling, curricula, warm start). On its first
    visit a prompt's prior is discounted once. Every call of ``observe`` is one update.

    Args:
        discount: lambda in (0, 1], weight kept per visit of the same prompt (per epoch, not per gradient
            step). 1 never forgets. The paper uses 0.25, 0.5 and 0.75 for Qwen3 0.6B, 1.7B and 8B.
        prior_alpha: alpha_0 > 0, pseudo-successes before any rollout.
        prior_beta: beta_0 > 0, pseudo-failures before any rollout.
        partial_credit: accept scores in [0, 1], counted as fractional successes, not only 0 or 1.
        forgetting: "visits" (the paper's) or "updates".
        updates_per_epoch: > 0, with "updates" only: policy updates (rollout batches) in which the past shrinks
            by ``discount`` once. 0: filled in by the trainer.

    State:
        alpha, beta: discounted counts of successes and failures, in rollouts, > 0.
        seen_at: with "updates" only; number of the update that last saw the prompt, -1: never.
        updates (shared): with "updates" only; number of updates so far.

    Raises:
        ValueError: a parameter is outside its range.

    Example:
        >>> dbb = DiscountedBetaBernoulli(discount=0.5)
        >>> state, estimate = dbb.observe(dbb.initial_state(1), [[1.0, 1.0, 1.0, 1.0]])
        >>> state
        {'alpha': array([4.5]), 'beta': array([0.5])}
        >>> estimate
        Estimate(mean=array([0.9]), variance=array([0.09]))

    Source: paper, Definition 2 and Algorithm 1 (update first, then read); ``forgetting`` is our own.
    """

    discount: float = field(default=0.5, metadata={"help": "weight of the past per visit, in (0, 1]"})
    prior_alpha: float = field(default=1.0, metadata={"help": "pseudo-successes before any rollout, > 0"})
    prior_beta: float = field(default=1.0, metadata={"help": "pseudo-failures before any rollout, > 0"})
    partial_credit: bool = field(default=False, metadata={"help": "accept scores in [0, 1], not only 0 or 1"})
    forgetting: str = field(default="visits", metadata={"help": "what the discount counts: visits or updates"})
    updates_per_epoch: float = field(
        default=0.0, metadata={"help": "with forgetting by updates: updates per discount; 0: one pass over the data"}
    )

    name: ClassVar[str] = "dbb"
    never_collapses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ValueError(f"dbb.discount = {self.discount!r} is not in (0, 1]")
        for parameter in ("prior_alpha", "prior_beta"):
            value = getattr(self, parameter)
            if not 0 < value < np.inf:
                raise ValueError(f"dbb.{parameter} = {value!r} is not a finite number above 0")
        if self.forgetting not in ("visits", "updates"):
            raise ValueError(f"dbb.forgetting = {self.forgetting!r} is neither 'visits' nor 'updates'")
        if not 0 <= self.updates_per_epoch < np.inf:
            raise ValueError(f"dbb.updates_per_epoch = {self.updates_per_epoch!r} is not a finite number >= 0")

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        return "unit" if self.partial_credit else "binary"

    @property
    def state_fields(self) -> tuple[str, ...]:
        return ("alpha", "beta", "seen_at") if self.forgetting == "updates" else ("alpha", "beta")

    @property
    def shared_fields(self) -> tuple[str, ...]:
        return ("updates",) if self.forgetting == "updates" else ()

    def initial_state(self, num_prompts: int) -> State:
        state = {
            "alpha": np.full(num_prompts, float(self.prior_alpha)),
            "beta": np.full(num_prompts, float(self.prior_beta)),
        }
        if self.forgetting == "updates":
            state |= {"seen_at": np.full(num_prompts, NEVER), "updates": np.zeros(1)}
        return state

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        kept = self._kept(state)
        # The floor keeps the counts positive: 1,074 zero-variance groups at discount 0.5 underflow to 0.
        new_state = {
            "alpha": np.maximum(kept * state["alpha"] + successes, np.finfo(float).tiny),
            "beta": np.maximum(kept * state["beta"] + (rollouts - successes), np.finfo(float).tiny),
        }
        if self.forgetting == "updates":
            now = state["updates"] + 1
            new_state |= {"seen_at": np.full(len(successes), now[0]), "updates": now}
        return new_state

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        return bernoulli(state["alpha"], state["beta"])

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        kept = self._kept(state)
        floor = np.finfo(float).tiny
        return np.maximum(kept * state["alpha"], floor), np.maximum(kept * state["beta"], floor)

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return counts(rewards_P_G)[1] / (state["alpha"] + state["beta"])

    def _kept(self, state: State) -> Floats | float:
        """Factor on the past at the next visit."""
        if self.forgetting == "visits":
            return self.discount
        if not self.updates_per_epoch:
            raise ValueError("dbb.updates_per_epoch is 0; give the number of policy updates in an epoch")
        elapsed = state["updates"] + 1 - state["seen_at"]
        epochs = np.where(state["seen_at"] == NEVER, 1.0, elapsed / self.updates_per_epoch)
        return np.asarray(self.discount**epochs)
