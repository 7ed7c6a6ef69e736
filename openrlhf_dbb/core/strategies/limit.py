"""A pass-rate limit with revisits: prompts that are too easy or too hard rest, and come back every few passes.

Unlike ``--leave_out``, which takes a prompt out for good, the limit follows the posterior during the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies import (
    Drawn,
    Predictive,
    RunFacts,
    Sampler,
    parameter,
    register,
)
from openrlhf_dbb.core.strategies.draws import DrawingStrategy


@register
@dataclass(frozen=True)
class Limit(DrawingStrategy):
    """Prompts whose posterior mean is below ``low`` or above ``high`` rest, and are tried again every ``every`` passes.

    The other prompts come once a pass, in an order of chance. So do prompts without a visit: the prior's mean lies
    within the limits. A prompt whose last three visits yielded no score rests as well.
    """

    low: float = parameter(
        0.0, "least posterior mean of a prompt that does not rest", within="[0, 1]"
    )
    high: float = parameter(
        0.9, "largest posterior mean of a prompt that does not rest", within="[0, 1]"
    )
    every: int = parameter(
        4, "passes after which a resting prompt is tried again", within="[2, 1000]"
    )

    name: ClassVar[str] = "limit"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(
                f"limit.low = {self.low!r} is above limit.high = {self.high!r}; no prompt lies between"
            )

    def describe(self) -> str:
        """Return the limits, and after how many passes a prompt comes back."""
        outside = f"outside [{self.low:g}, {self.high:g}]"
        return f"prompts with a posterior mean {outside} rest, back every {self.every} passes"

    def sampler(self, facts: RunFacts) -> "LimitSampler":
        """Return a sampler that lets prompts outside the limits rest."""
        return LimitSampler(self, facts)


class LimitSampler(Sampler):
    """Draws the prompts of a pass in an order of chance, without those that rest."""

    kept: ClassVar[tuple[str, ...]] = ("_random", "_order", "_rested", "_resting", "note")

    def __init__(self, strategy: Limit, facts: RunFacts) -> None:
        super().__init__(facts)
        self._strategy = strategy
        self._random = np.random.default_rng(facts.seed)
        self._order: list[int] = []  # of the pass, what is left
        self._rested: dict[int, int] = {}  # passes in a row that a prompt has rested
        self._resting = 0  # prompts of this pass

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """Return the next prompt of the pass; begin a pass when none is left."""
        if not self._order:
            self._order = self._begin(predictive())
        return Drawn(self._order.pop(0), inclusion=1.0, weight=1.0)

    def _begin(self, predictive: Predictive) -> list[int]:
        """Return the prompts of the next pass in their order."""
        mean_P = predictive.mean
        outside_P = (mean_P < self._strategy.low) | (mean_P > self._strategy.high)
        if predictive.unverified is not None:
            outside_P |= predictive.unverified
        rests_P = np.array(
            [
                outside and self._rested.get(prompt_id, 0) < self._strategy.every - 1
                for prompt_id, outside in zip(
                    predictive.prompt_ids.tolist(), outside_P, strict=True
                )
            ]
        )
        if rests_P.all():
            self.note = "every prompt lies outside the limits of strategy limit: all are drawn"
            rests_P[:] = False
        self._count(predictive.prompt_ids, rests_P)
        return self._random.permutation(predictive.prompt_ids[~rests_P]).tolist()

    def _count(self, prompt_ids_P: NDArray[np.int64], rests_P: NDArray[np.bool_]) -> None:
        self._resting = int(rests_P.sum())
        rested = {}
        for prompt_id in prompt_ids_P[rests_P].tolist():
            rested[prompt_id] = self._rested.get(prompt_id, 0) + 1
        self._rested = rested

    def metrics(self) -> dict[str, float]:
        """Return the number of prompts that rest in this pass."""
        return {"limit/resting": float(self._resting)}
