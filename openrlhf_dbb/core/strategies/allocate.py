"""Rollouts by prompt: more where a reward is expected to vary more, within the budget of a step.

Source: Neyman's optimum allocation (1934), in whole numbers after Wright (2012). VIP (Nguyen et al.
2026, arXiv 2602.01601) and CERO (Zong et al. 2026, arXiv 2606.05606) allocate rollouts by the
variance, too; see docs/methods.md.

Axes: P prompts of the run, B of a batch, K numbers of rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.strategies import (
    Drawn,
    Predictive,
    RunFacts,
    parameter,
    register,
)
from openrlhf_dbb.core.strategies.draws import BatchSampler, DrawingStrategy
from openrlhf_dbb.core.strategies.posterior import expected_variance
from openrlhf_dbb.estimators.base import Floats


@register
@dataclass(frozen=True)
class Allocate(DrawingStrategy):
    """A prompt gets rollouts in proportion to sqrt(E[p (1 - p)]), p being its success probability.

    A batch of B prompts has B N rollouts, and each prompt from ``min`` to ``max`` of them. Each
    prompt comes once a pass. A prompt whose last three visits yielded no score gets ``min``.

    The advantages of a prompt with n rollouts are multiplied by N / n, so that every prompt counts
    alike in a loss that is a mean over rollouts. The baseline uses the prompt's n rollouts. The
    posterior counts all n: they are chosen before any of them is generated, so its likelihood is
    the same.
    """

    min: int = parameter(2, "least rollouts of a prompt", within="[2, 1024]")
    max: int = parameter(32, "most rollouts of a prompt", within="[2, 1024]")

    name: ClassVar[str] = "allocate"
    unequal_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min > self.max:
            raise ValueError(
                f"allocate.min = {self.min!r} is above allocate.max = {self.max!r}; lower it"
            )

    @property
    def min_rollouts(self) -> int:
        """One rollout more than every prompt gets."""
        return self.min + 1  # else nothing is left to allocate

    @property
    def needs(self) -> frozenset[Capability]:
        """It draws the prompts, and asks for as many rollouts of each as it likes."""
        return frozenset({Capability.DRAW, Capability.GENERATE_MORE})

    def describe(self) -> str:
        """Return what the rollouts are in proportion to, and the limits."""
        return f"{self.min} to {self.max} rollouts a prompt, by sqrt(E[p (1 - p)])"

    def sampler(self, facts: RunFacts) -> "AllocateSampler":
        """Return a sampler that gives each prompt its own number of rollouts.

        Raises:
            ValueError: N is above ``max``.
        """
        if facts.rollouts > self.max:
            raise ValueError(
                f"{facts.rollouts} rollouts a prompt on average are more than "
                f"allocate.max = {self.max}; raise it"
            )
        return AllocateSampler(self, facts)


class AllocateSampler(BatchSampler):
    """Takes the prompts of a batch in the order of the pass, and allocates its rollouts."""

    kept: ClassVar[tuple[str, ...]] = (*BatchSampler.kept, "_order", "_metrics")

    def __init__(self, strategy: Allocate, facts: RunFacts) -> None:
        super().__init__(facts)
        self._strategy = strategy
        self._order: list[int] = []  # of the pass, what is left
        self._metrics: dict[str, float] = {}

    def _draw(self, predictive: Predictive) -> list[Drawn]:
        prompts_B = self._next_prompts(predictive.prompt_ids)
        places_B = np.searchsorted(predictive.prompt_ids, prompts_B)
        variance_P = expected_variance(predictive.alpha, predictive.beta)
        if predictive.unverified is not None:
            variance_P[predictive.unverified] = 0  # nothing is learned from a prompt without scores
        variance_B = variance_P[places_B]
        mean = self.facts.rollouts
        sizes_B = allocation(variance_B, mean, self._strategy.min, self._strategy.max)
        even = variance_B.sum() / mean
        self._metrics = {
            "allocate/largest": float(sizes_B.max()),
            "allocate/variance": float((variance_B / sizes_B).sum() / even) if even else 1.0,
        }
        inclusion = len(prompts_B) / len(predictive.prompt_ids)
        return [
            Drawn(prompt_id, inclusion, weight=mean / rollouts, rollouts=rollouts)
            for prompt_id, rollouts in zip(prompts_B, sizes_B.tolist(), strict=True)
        ]

    def _next_prompts(self, prompt_ids_P: NDArray[np.int64]) -> list[int]:
        """Return the next batch of different prompts; the next pass completes one."""
        groups = self.facts.groups
        missing = groups - len(self._order)
        if missing > 0:
            last = self._order
            order = self._random.permutation(prompt_ids_P).tolist()
            first = [prompt_id for prompt_id in order if prompt_id not in last]
            self._order = last + first + last
        batch = self._order[:groups]
        self._order = self._order[groups:]
        return batch

    def metrics(self) -> dict[str, float]:
        """Return the largest group, and the variance of groups' means over that of N each."""
        return dict(self._metrics)


def allocation(variance_B: Floats, mean: int, least: int, most: int) -> NDArray[np.int64]:
    """Return the rollouts of each prompt (B,), from ``least`` to ``most``, with the sum B ``mean``.

    No other such numbers n have a smaller sum of variance / n. The next rollout of a prompt that
    has n lowers that sum by variance / (n (n + 1)): the rollouts that lower it most are taken, of
    equal ones those of smaller groups.
    """
    sizes_K = np.arange(least, most)
    gain_B_K = variance_B[:, None] / (sizes_K * (sizes_K + 1))
    sizes_B_K = np.broadcast_to(sizes_K, gain_B_K.shape)
    order = np.lexsort((sizes_B_K.ravel(), -gain_B_K.ravel()))
    taken = order[: len(variance_B) * (mean - least)]
    prompts = np.unravel_index(taken, gain_B_K.shape)[0]
    return least + np.bincount(prompts, minlength=len(variance_B))
