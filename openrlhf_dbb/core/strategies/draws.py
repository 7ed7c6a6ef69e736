"""What the strategies that draw prompts by a forecast have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.core.strategies import Drawn, Predictive, RolloutStrategy, RunFacts, Sampler
from openrlhf_dbb.errors import RunError


@dataclass(frozen=True)
class DrawingStrategy(RolloutStrategy):
    """Draws the prompts by the estimator's forecast."""

    @property
    def draws(self) -> bool:
        """True: the forecast decides about each prompt."""
        return True


class BatchSampler(Sampler):
    """Draws a batch of different prompts when the last one has been handed out."""

    kept: ClassVar[tuple[str, ...]] = ("_random", "_batch")

    def __init__(self, facts: RunFacts) -> None:
        super().__init__(facts)
        self._random = np.random.default_rng(facts.seed)
        self._batch: list[Drawn] = []

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """Return the next prompt of the batch; draw a batch when none is left.

        Raises:
            RunError: there are fewer prompts than a batch has.
        """
        if not self._batch:
            forecast = predictive()
            prompts = len(forecast.prompt_ids)
            if self.facts.groups > prompts:
                problem = (
                    f"a batch of {self.facts.groups} prompts, but only {prompts} prompts differ"
                )
                raise RunError(f"{problem}; lower the batch size")
            self._batch = self._draw(forecast)
        return Drawn(*self._batch.pop(0))  # a list after a resume from JSON

    def _draw(self, predictive: Predictive) -> list[Drawn]:
        """Return the prompts of a batch, as many as it has groups."""
        raise NotImplementedError
