"""Dynamic sampling: another prompt takes the place of a group without variance.

Source: DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies import (
    Decision,
    RolloutStrategy,
    RunFacts,
    Sampler,
    register,
    varies,
)


@register
@dataclass(frozen=True)
class DynamicSampling(RolloutStrategy):
    """Groups of zero variance are replaced by groups of other prompts (DAPO).

    A group is trained on if its scores vary and, with ``RunFacts.score_range``, if their mean lies strictly within it.
    """

    name: ClassVar[str] = "dynamic"
    needs_scores: ClassVar[bool] = True
    reads_score_range: ClassVar[bool] = True

    @property
    def min_rollouts(self) -> int:
        """Two: the scores of a group must be able to differ."""
        return 2

    def describe(self) -> str:
        """Return the name of the method, and that a group replaces a group."""
        return "dynamic sampling, one for one"

    def sampler(self, facts: RunFacts) -> Sampler:
        """Return a sampler that replaces groups."""
        return DynamicSampler(facts)


class DynamicSampler(Sampler):
    """Replaces each group without variance, or with a mean score outside the range."""

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        """Return TRAIN for a group whose scores differ with a mean in the range, else REPLACE."""
        low, high = self.facts.score_range or (-np.inf, np.inf)
        if varies(scores_N) and low < np.nanmean(scores_N) < high:
            return Decision.TRAIN
        return Decision.REPLACE
