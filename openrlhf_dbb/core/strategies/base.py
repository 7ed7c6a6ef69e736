"""The contract of a rollout strategy: which prompts are generated for, and what becomes of each group.

Axes: N rollouts of a group, P prompts of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from estimators.registry import Registry
from openrlhf_dbb.core.strategies import parameters
from openrlhf_dbb.errors import RunError


class SamplingError(RunError):
    """The strategy gives up: no batch can be filled, and going on would only cost rollouts."""


@dataclass(frozen=True)
class RunFacts:
    """What a strategy is told about the run.

    Attributes:
        groups: groups of a rollout batch (``--rollout.batch_size``).
        rollouts: rollouts of a group, N (``--rollout.n_samples_per_prompt``).
        seed: for random numbers of the strategy's own (``--train.seed``).
        score_range: the mean score of a group must lie strictly between these two to be trained on
            (``--algo.dynamic_filtering_range``); None if ``--algo.dynamic_filtering_enable`` is not given.
        form: how rewards become advantages (``--algo.advantage.estimator``).
        loss: how the loss is aggregated (``--actor.loss_agg_mode``).
        asynchronous: generation runs ahead of the training (``--train.async_enable``).
    """

    groups: int
    rollouts: int
    seed: int = 0
    score_range: tuple[float, float] | None = None
    form: str = "group_norm"
    loss: str = "token-mean"
    asynchronous: bool = False


@dataclass(frozen=True)
class Predictive:
    """What the estimator expects of every prompt's next visit: its success probability is Beta(alpha, beta).

    Attributes:
        prompt_ids: (P,) int, ascending.
        alpha, beta: (P,) float, > 0.
    """

    prompt_ids: NDArray[np.int64]
    alpha: NDArray[np.float64]
    beta: NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """A prompt that the strategy has chosen.

    Attributes:
        prompt_id: of the prompt.
        rollouts: to generate for it, >= 1.
        inclusion: probability with which it is in the batch, in (0, 1]; fixed before anything is generated.
        weight: factor on its advantages, > 0.
    """

    prompt_id: int
    rollouts: int
    inclusion: float
    weight: float


class Decision(Enum):
    """What becomes of a group that has been generated."""

    TRAIN = auto()
    """It is trained on."""
    DISCARD = auto()
    """It is observed by the estimator, but not trained on."""
    REPLACE = auto()
    """Discarded, and another prompt is drawn at once, in the same round."""


class Sampler:
    """How rollout batches are filled with groups, step by step; as it is here, with every prompt and every group.

    A step draws prompts in rounds of :meth:`round_size`, leaving out those for which :meth:`rollouts` says 0. Each of
    the others gets a group of rollouts, which :meth:`judge` judges, until enough groups for a batch are to be trained
    on. Surplus groups are discarded.

    A strategy that ``draws`` is asked for each prompt by :meth:`next_prompt` instead of getting them in the order of
    the data, and a pass is over when as many have been drawn as there are.
    """

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts

    def round_size(self, missing: int) -> int:
        """Prompts to generate for in the next round.

        Args:
            missing: groups that the batch still needs, >= 1.

        Raises:
            SamplingError: the strategy gives up.
        """
        return missing

    def rollouts(self, prompt_id: int) -> int:
        """Rollouts to generate for a prompt that has just been drawn: N, or 0 to skip it."""
        return self.facts.rollouts

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """The next prompt to generate for; asked of a strategy that ``draws``.

        Args:
            predictive: what the estimator knows now; takes the time of a pass over all prompts.

        Raises:
            SamplingError: it cannot draw.
        """
        raise NotImplementedError

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        """Take note of a generated group, and decide what becomes of it.

        Args:
            scores_N: the verifier's scores before any penalty; NaN where missing.
        """
        return Decision.TRAIN

    def end_round(self) -> None:
        """All groups of a round have been judged."""

    def end_step(self) -> None:
        """The batch is full and will be trained on."""

    def end_pass(self) -> None:
        """Every prompt has been drawn once more.

        Raises:
            SamplingError: the strategy gives up.
        """

    def metrics(self) -> dict[str, float]:
        """Numbers to be logged after a step, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold; taken between steps."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""


@dataclass(frozen=True)
class RolloutStrategy:
    """Decides which prompts are generated for and which groups are trained on.

    A strategy is a frozen dataclass: its fields, made by :func:`parameters.parameter`, are its parameters and become
    the flags ``--NAME.FIELD``. What changes during the training is in the :class:`Sampler` that it makes.

    Class attributes:
        name: the registered name.
        needs_scores: it looks at scores, so that rewards must be known at generation.
        min_rollouts: the smallest group that it can do anything with.
        discards: some rollouts are never trained on, so that a step may need more than a batch of groups.
        needs_budget: a pass over the prompts has no fixed cost, so that the training ends by ``--train.max_rollouts``,
            which is set to prompts x samples x episodes if not given.
        draws: it chooses the prompts itself, by what the estimator expects of them, which therefore must have a
            ``predictive``.
        reads_score_range: it honours ``RunFacts.score_range``; others refuse ``--algo.dynamic_filtering_enable``.

    Raises:
        ValueError: a parameter is outside its range.
    """

    name: ClassVar[str]
    needs_scores: ClassVar[bool] = False
    min_rollouts: ClassVar[int] = 1
    discards: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    reads_score_range: ClassVar[bool] = False

    def __post_init__(self) -> None:
        parameters.check(self, self.name)

    def complete(self, facts: RunFacts) -> RolloutStrategy:
        """The strategy with the parameters filled in that depend on the run; their default is None.

        Raises:
            ValueError: it cannot work with these facts.
        """
        return self

    def describe(self) -> str:
        """What it does, in a few words: a part of the line that the start prints."""
        raise NotImplementedError

    def sampler(self, facts: RunFacts) -> Sampler:
        """The mutable part, for one training; called on a complete strategy."""
        raise NotImplementedError


STRATEGIES: Registry[RolloutStrategy] = Registry(
    "rollout strategy", RolloutStrategy, "openrlhf_dbb.core.strategies", "openrlhf_dbb.strategies"
)
register = STRATEGIES.register


def varies(scores_N: NDArray[np.float64]) -> bool:
    """Whether the known scores of a group differ; False if fewer than two are known."""
    known = scores_N[~np.isnan(scores_N)]
    return bool(len(known) and known.min() < known.max())
