"""The free oracle of protocol "draws": pass rates that another run measured, and that nothing changes later.

``--estimator study.measured:Measured --warm_start RUN`` replays the visits of a run that measured every prompt once.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.estimators.base import BetaPosterior, Floats, RewardEstimator, State, counts
from openrlhf_dbb.estimators.simple import PointEstimator

PRIOR_ALPHA, PRIOR_BETA = 0.1, 0.9  # rollouts; most prompts of the protocol's pool have no success


@dataclass(frozen=True)
class FirstGroup(BetaPosterior):
    """The Beta posterior after a prompt's first group; later groups change nothing.

    State:
        alpha, beta: in rollouts, > 0.
    """

    name: ClassVar[str] = "first_group"
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    def initial_state(self, num_prompts: int) -> State:
        return {
            "alpha": np.full(num_prompts, PRIOR_ALPHA),
            "beta": np.full(num_prompts, PRIOR_BETA),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        unseen = state["alpha"] + state["beta"] == PRIOR_ALPHA + PRIOR_BETA
        return {
            "alpha": np.where(unseen, PRIOR_ALPHA + successes, state["alpha"]),
            "beta": np.where(unseen, PRIOR_BETA + rollouts - successes, state["beta"]),
        }

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        return state["alpha"], state["beta"]


@dataclass(frozen=True)
class Measured(PointEstimator):
    """Scores a group alone, as GRPO. Strategies draw by the rates that the warm start's run measured."""

    name: ClassVar[str] = "measured"

    @property
    def belief(self) -> RewardEstimator:
        return FirstGroup()
