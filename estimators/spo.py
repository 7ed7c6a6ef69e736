"""SPO's tracker of each prompt's success rate, read before the update."""

from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.estimators.base import (
    BetaPosterior,
    Floats,
    State,
    counts,
    parameter,
    register,
)
from openrlhf_dbb.estimators.dbb import faded


@register
@dataclass(frozen=True)
class Spo(BetaPosterior):
    """Score a group by what earlier visits say of its prompt, then update.

    With S successes among the N rollouts of a visit::

        mean     = alpha / (alpha + beta)
        variance = alpha * beta / (alpha + beta)^2        of ONE reward, > 0
        alpha   <- rho * alpha + S
        beta    <- rho * beta + N - S

    A prompt begins with 0.5, 0.5, as publicly coded without an offline evaluation; the public code
    begins after one with 8 rollouts at the measured rate (``--data.pass_rate_attempts 8``).

    State:
        alpha, beta: discounted counts of successes and failures, in rollouts, > 0.

    Source: SPO (Xu and Ding 2025, arXiv 2509.13232); its public code, verl-recipe
    ``spo/spo_ray_trainer.py``.
    """

    rho: float = parameter(0.96, "weight of the past per visit", within="(0, 1]")

    name = "spo"
    reads = "before"
    state_fields = ("alpha", "beta")

    def initial_state(self, num_prompts: int) -> State:
        """Return alpha = beta = 0.5 for each prompt, (P,) each, in rollouts."""
        return {"alpha": np.full(num_prompts, 0.5), "beta": np.full(num_prompts, 0.5)}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the counts discounted by rho plus those of the group, (P,) each."""
        successes, rollouts = counts(rewards_P_G)
        return faded(state, self.rho, successes, rollouts)

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        """Return the counts undiscounted, (P,) each, since a group is scored before the update."""
        return state["alpha"], state["beta"]

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return 0 for each prompt, (P,): the mean is read before the group."""
        return np.zeros(len(rewards_P_G))
