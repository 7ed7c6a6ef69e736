"""The memory of protocol "rival" that knows each prompt by its own counts alone: other prompts' texts stand for theirs.

``--estimator study.other_texts:OwnCounts``
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb import tasks
from openrlhf_dbb.estimators.auto import SelfTuningBetaBernoulli
from openrlhf_dbb.estimators.base import Floats, RewardEstimator, State
from openrlhf_dbb.estimators.simple import PointEstimator
from openrlhf_dbb.estimators.text_prior import text_features
from study import protocol


@functools.cache
def _others() -> dict[bytes, Floats]:
    """Return the features that another prompt of the pool has, by the features of a prompt."""
    flags = protocol.load("rival").choose(["rival"])[0].flags
    template = flags["data.input_template"]
    problems = tasks.problems(flags["data.prompt_dataset"], instruction="")
    questions = list(dict.fromkeys(problem["prompt"] for problem in problems))
    features_P_D = text_features([template.format(question) for question in questions])
    order_P = np.random.default_rng(0).permutation(len(questions))
    others = {}
    for row, other in enumerate(order_P):
        others[features_P_D[row].tobytes()] = features_P_D[other]
    return others


def _with_other_texts(state: State) -> State:
    if "features" not in state:
        return state
    others = _others()
    swapped = [others[row.tobytes()] for row in state["features"]]
    return state | {"features": np.stack(swapped)}


@dataclass(frozen=True)
class OtherTexts(SelfTuningBetaBernoulli):
    """``auto`` on a pool whose texts are permuted among its prompts."""

    name: ClassVar[str] = "other_texts"

    def update(self, state: State, rewards_P_G: Floats) -> State:
        return super().update(_with_other_texts(state), rewards_P_G)

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        return super().predictive(_with_other_texts(state))

    def learn(self, state: State) -> State:
        return super().learn(_with_other_texts(state))


@dataclass(frozen=True)
class OwnCounts(PointEstimator):
    """Scores a group alone, as GRPO. The memory that draws the prompts cannot read their texts."""

    name: ClassVar[str] = "own_counts"

    @property
    def belief(self) -> RewardEstimator:
        return OtherTexts()
