"""Dynamic sampling: groups of zero variance are not trained on, and others take their place.

Source: DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies.base import (
    Decision,
    RolloutStrategy,
    RunFacts,
    Sampler,
    SamplingError,
    register,
    varies,
)
from openrlhf_dbb.core.strategies.parameters import parameter


@register
@dataclass(frozen=True)
class DynamicSampling(RolloutStrategy):
    """Groups of zero variance are replaced by groups of other prompts (DAPO).

    A group is trained on if its scores vary and, with ``RunFacts.score_range``, if their mean lies strictly within it.

    Args:
        refill: "one_for_one": every rejected group is replaced by one new prompt, so that no rollout of an accepted
            group is wasted. "batches": generation batches of ``multiple`` rollout batches, as published; surplus is
            discarded.
        multiple: size of a generation batch, in rollout batches.
        max_rounds: generation batches that a step may take, 0 for any number; with ``batches``.
    """

    refill: str = parameter(
        "one_for_one",
        "one_for_one: a new prompt for each rejected group; batches: further generation batches, surplus discarded",
        choices=("one_for_one", "batches"),
    )
    multiple: int = parameter(3, "prompts of a generation batch, in rollout batches", least=1)
    max_rounds: int = parameter(10, "most generation batches of a step; 0: no limit", least=0, may_change=True)

    name: ClassVar[str] = "dynamic"
    needs_scores: ClassVar[bool] = True
    min_rollouts: ClassVar[int] = 2
    discards: ClassVar[bool] = True
    reads_score_range: ClassVar[bool] = True

    def describe(self) -> str:
        if self.refill == "one_for_one":
            return "dynamic sampling, one for one"
        limit = f"at most {self.max_rounds}" if self.max_rounds else "any number"
        return f"dynamic sampling in generation batches of {self.multiple} x batch, {limit} a step"

    def sampler(self, facts: RunFacts) -> Sampler:
        return DynamicSampler(self, facts)


class DynamicSampler(Sampler):
    """Counts the groups of the step."""

    def __init__(self, strategy: DynamicSampling, facts: RunFacts) -> None:
        super().__init__(facts)
        self._rejected = Decision.REPLACE if strategy.refill == "one_for_one" else Decision.DISCARD
        self._round = strategy.multiple * facts.groups
        self._most = strategy.max_rounds * self._round
        self._generated = self._accepted = 0

    def round_size(self, missing: int) -> int:
        if self._rejected is Decision.REPLACE:
            return missing
        if 0 < self._most <= self._generated:
            raise SamplingError(
                f"{self._generated} groups were generated for one step, {self._accepted} of them with different "
                f"rewards, {self.facts.groups} are needed; the data is too easy or too hard for the model, else raise "
                "--dynamic.max_rounds (0: no limit)"
            )
        # The end of a pass cuts a generation batch short; the limit counts prompts, so that this costs no round.
        return min(self._round, self._most - self._generated) if self._most else self._round

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        accepted = varies(scores_N)
        if accepted and self.facts.score_range is not None:
            low, high = self.facts.score_range
            accepted = low < float(np.nanmean(scores_N)) < high
        self._generated += 1
        self._accepted += accepted
        return Decision.TRAIN if accepted else self._rejected

    def end_step(self) -> None:
        self._generated = self._accepted = 0
