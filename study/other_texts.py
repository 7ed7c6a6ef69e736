"""The memory of protocol "rival" that knows each prompt by its own counts alone: other prompts' texts stand for theirs.

Features do not tell which prompt they are of, because prompts whose numbers have equally many digits share them: the
pool has 77 kinds. So the state says whose text each prompt has.

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
def pool_features() -> Floats:
    """Return the features of the texts of the protocol's pool, (P, D), each text once."""
    flags = protocol.load("rival").choose(["rival"])[0].flags
    template = flags["data.input_template"]
    problems = tasks.problems(flags["data.prompt_dataset"], instruction="")
    questions = dict.fromkeys(problem["prompt"] for problem in problems)
    return text_features([template.format(question) for question in questions])


def _with_other_texts(state: State) -> State:
    if "features" not in state:
        return state
    return state | {"features": pool_features()[state["text"].astype(int)]}


@dataclass(frozen=True)
class OtherTexts(SelfTuningBetaBernoulli):
    """``auto`` on a pool whose texts are permuted among its prompts.

    State, beside that of ``auto``:
        text: the row in :func:`pool_features` that a prompt has in place of its own.
    """

    name: ClassVar[str] = "other_texts"
    state_fields = (*SelfTuningBetaBernoulli.state_fields, "text")  # type: ignore[assignment]

    def initial_state(self, num_prompts: int) -> State:
        texts_P = np.random.default_rng(0).permutation(num_prompts)
        return super().initial_state(num_prompts) | {"text": texts_P.astype(np.float64)}

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
