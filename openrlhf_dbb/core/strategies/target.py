"""Difficulty by schedule: prompts are drawn whose posterior mean is near a target, which moves during the run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.core.strategies import (
    Drawn,
    Predictive,
    RolloutStrategy,
    RunFacts,
    Sampler,
    parameter,
    register,
)
from openrlhf_dbb.core.strategies.posterior import inclusion, systematic
from openrlhf_dbb.errors import RunError


@register
@dataclass(frozen=True)
class Target(RolloutStrategy):
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

    @property
    def draws(self) -> bool:
        """True: the forecast tells a prompt's distance from the target."""
        return True

    def describe(self) -> str:
        """Return how the target moves, and the floor."""
        return (
            f"prompts drawn near a pass rate that moves from {self.start:g} to {self.end:g} "
            f"in {self.steps} steps, floor {self.floor:g}"
        )

    def sampler(self, facts: RunFacts) -> "TargetSampler":
        """Return a sampler that draws prompts near the target."""
        return TargetSampler(self, facts)


class TargetSampler(Sampler):
    """Draws a batch of different prompts when the last one has been handed out."""

    kept: ClassVar[tuple[str, ...]] = ("_random", "_batch", "_step")

    def __init__(self, strategy: Target, facts: RunFacts) -> None:
        super().__init__(facts)
        self._strategy = strategy
        self._random = np.random.default_rng(facts.seed)
        self._batch: list[Drawn] = []
        self._step = 0  # steps that have ended

    @property
    def target(self) -> float:
        """The target pass rate of the present step."""
        strategy = self._strategy
        moved = min(self._step / strategy.steps, 1.0)
        return strategy.start + moved * (strategy.end - strategy.start)

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """Return the next prompt of the batch; draw a batch when none is left."""
        if not self._batch:
            self._batch = self._draw(predictive())
        return self._batch.pop(0)

    def _draw(self, predictive: Predictive) -> list[Drawn]:
        prompts = len(predictive.prompt_ids)
        if self.facts.groups > prompts:
            raise RunError(
                f"a batch of {self.facts.groups} prompts, but only {prompts} prompts differ; lower the batch size"
            )
        mean_P = predictive.alpha / (predictive.alpha + predictive.beta)
        value_P = np.exp(-(((mean_P - self.target) / self._strategy.width) ** 2) / 2)
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
