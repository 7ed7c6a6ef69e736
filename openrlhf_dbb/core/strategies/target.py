"""Difficulty by schedule: prompts are drawn whose posterior mean is near a target, which moves during the run."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.core.strategies import (
    Drawn,
    Predictive,
    RunFacts,
    parameter,
    register,
)
from openrlhf_dbb.core.strategies.draws import BatchSampler, DrawingStrategy
from openrlhf_dbb.core.strategies.posterior import inclusion, systematic


@register
@dataclass(frozen=True)
class Target(DrawingStrategy):
    """Each step draws prompts whose posterior mean is near a target pass rate, which moves from ``start`` to ``end``.

    The target moves by equal parts over ``steps`` steps, and then stays at ``end``. A prompt at distance d from it is
    drawn in proportion to exp(-(d / width)^2 / 2), apart from the floor. The advantages have no importance weights: a
    prompt counts as often as it is drawn.
    """

    start: float = parameter(0.7, "target pass rate of the first step", within="[0, 1]")
    end: float = parameter(0.3, "target pass rate from step --target.steps on", within="[0, 1]")
    steps: int = parameter(100, "steps in which the target moves", within="[1, inf)")
    width: float = parameter(
        0.15, "distance from the target at which draws fall to 0.61", within="(0, 1]"
    )
    floor: float = parameter(
        0.1, "share of the draws that goes to all prompts alike", within="(0, 1]"
    )

    name: ClassVar[str] = "target"

    def describe(self) -> str:
        """Return how the target moves, and the floor."""
        return (
            f"prompts drawn near a pass rate that moves from {self.start:g} to {self.end:g} "
            f"in {self.steps} steps, floor {self.floor:g}"
        )

    def sampler(self, facts: RunFacts) -> "TargetSampler":
        """Return a sampler that draws prompts near the target."""
        return TargetSampler(self, facts)


class TargetSampler(BatchSampler):
    """Draws prompts near the target of the step."""

    kept: ClassVar[tuple[str, ...]] = (*BatchSampler.kept, "_step")

    def __init__(self, strategy: Target, facts: RunFacts) -> None:
        super().__init__(facts)
        self._strategy = strategy
        self._step = 0  # steps that have ended

    @property
    def target(self) -> float:
        """The target pass rate of the present step."""
        strategy = self._strategy
        moved = min(self._step / strategy.steps, 1.0)
        return strategy.start + moved * (strategy.end - strategy.start)

    def _draw(self, predictive: Predictive) -> list[Drawn]:
        value_P = np.exp(-(((predictive.mean - self.target) / self._strategy.width) ** 2) / 2)
        if predictive.unverified is not None:
            value_P[predictive.unverified] = 0  # nothing is learned from a prompt without scores
        pi_P = inclusion(value_P, self.facts.groups, self._strategy.floor)
        drawn = systematic(pi_P, self._random)
        return [
            Drawn(prompt_id, probability, weight=1.0)
            for prompt_id, probability in zip(
                predictive.prompt_ids[drawn].tolist(), pi_P[drawn].tolist(), strict=True
            )
        ]

    def end_step(self) -> None:
        """Count the step, by which the target moves."""
        self._step += 1

    def metrics(self) -> dict[str, float]:
        """Return the target pass rate of the present step."""
        return {"target/pass_rate": self.target}
