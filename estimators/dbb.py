"""Discounted Beta-Bernoulli: the paper's estimator."""

from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.estimators.base import (
    BetaPosterior,
    Floats,
    State,
    Support,
    counts,
    parameter,
    register,
)


@register
@dataclass(frozen=True)
class DiscountedBetaBernoulli(BetaPosterior):
    """Track a drifting success probability with a Beta posterior that forgets.

    Each visit of a prompt shrinks its past counts by ``discount``, then adds the new group's
    successes and failures (S of N rollouts)::

        alpha <- discount * alpha + S        mean     = alpha / (alpha + beta)
        beta  <- discount * beta + N - S     variance = alpha * beta / (alpha + beta)^2

    ``variance`` is that of ONE reward, > 0 even if all N rewards are equal.

    State:
        alpha, beta: discounted counts of successes and failures, in rollouts, > 0.

    Source: paper, Definition 2 and Algorithm 1 (update first, then read).
    """

    # Per visit of the same prompt, not per gradient step; 1 never forgets. The paper uses 0.25,
    # 0.5 and 0.75 for Qwen3 0.6B, 1.7B and 8B.
    discount: float = parameter(0.5, "weight of the past per visit", within="(0, 1]")
    prior_alpha: float = parameter(1.0, "pseudo-successes before any rollout", within="(0, inf)")
    prior_beta: float = parameter(1.0, "pseudo-failures before any rollout", within="(0, inf)")
    partial_credit: bool = parameter(
        False,
        "accept scores in [0, 1] as fractional successes, not only 0 or 1",
    )

    name = "dbb"
    wide_clip = True
    state_fields = ("alpha", "beta")

    @property
    def support(self) -> Support:  # type: ignore[override]
        """The rewards accepted: "unit" with ``partial_credit``, else "binary"."""
        return "unit" if self.partial_credit else "binary"

    def initial_state(self, num_prompts: int) -> State:
        """Return alpha and beta of the prior, (P,) each, in rollouts."""
        return {
            "alpha": np.full(num_prompts, float(self.prior_alpha)),
            "beta": np.full(num_prompts, float(self.prior_beta)),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the discounted counts plus the group's successes and failures, (P,) each."""
        successes, rollouts = counts(rewards_P_G)
        return faded(state, self.discount, successes, rollouts)

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        """Return the counts as the next visit discounts them, (P,) each, in rollouts."""
        before = faded(state, self.discount)
        return before["alpha"], before["beta"]


def faded(
    state: State,
    discount: float,
    successes: Floats | float = 0.0,
    rollouts: Floats | float = 0.0,
) -> State:
    """Return alpha and beta, (P,) each, discounted, with the counts of one more group.

    Args:
        state: ``alpha`` and ``beta`` of P prompts.
        discount: what is left of them, in (0, 1].
        successes: S of each prompt's group, (P,).
        rollouts: N of each prompt's group, (P,).

    Source: paper, Definition 2.
    """
    alpha = discount * state["alpha"] + successes
    beta = discount * state["beta"] + (rollouts - successes)
    # 1,074 zero-variance groups at discount 0.5 would underflow to 0.
    least = np.finfo(float).tiny
    return {"alpha": np.maximum(alpha, least), "beta": np.maximum(beta, least)}
