from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from openrlhf_dbb.estimators.base import BetaPosterior, Floats, State, counts, parameter, register


@register
@dataclass(frozen=True)
class Spo(BetaPosterior):
    """Score a group by what earlier visits say of its prompt, then update.

    With S successes among the N rollouts of a visit, and D the policy's drift since the prompt's last visit::

        mean = alpha / (alpha + beta)            variance = alpha * beta / (alpha + beta)^2, of ONE reward
        rho = clip(2^(-D / d_half), rho_min, rho_max)
        alpha <- rho * alpha + S                 beta <- rho * beta + N - S

    D is in nats a token; only our trainer measures it (``actors/replays.py``). Elsewhere, and on a first visit, it is
    0, and rho is ``rho_max``. A prompt begins with 0.5, 0.5, as publicly coded without an offline evaluation; the
    public code begins after one with 8 rollouts at the measured rate (``--data.pass_rate_attempts 8``).

    State:
        alpha, beta: discounted counts of successes and failures, in rollouts, > 0.

    Source: SPO (Xu and Ding 2025, arXiv 2509.13232); its public code, verl-recipe ``spo/spo_ray_trainer.py``.
    """

    d_half: float = parameter(0.06, "drift in nats a token that halves the past", within="(0, inf)")
    rho_min: float = parameter(0.875, "least weight of the past per visit", within="(0, 1]")
    rho_max: float = parameter(0.96, "greatest weight of the past per visit", within="(0, 1]")

    name: ClassVar[str] = "spo"
    reads: ClassVar[Literal["after", "before"]] = "before"
    reads_drift: ClassVar[bool] = True
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho_min > self.rho_max:
            raise ValueError(f"spo.rho_min = {self.rho_min} is above spo.rho_max = {self.rho_max}; swap them")

    def initial_state(self, num_prompts: int) -> State:
        return {"alpha": np.full(num_prompts, 0.5), "beta": np.full(num_prompts, 0.5)}

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        rho = np.clip(2.0 ** (-state["drift"] / self.d_half), self.rho_min, self.rho_max)
        least = np.finfo(float).tiny  # the count of what never happens would underflow to 0
        return {
            "alpha": np.maximum(rho * state["alpha"] + successes, least),
            "beta": np.maximum(rho * state["beta"] + (rollouts - successes), least),
        }

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        return state["alpha"], state["beta"]

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return np.zeros(len(rewards_P_G))
