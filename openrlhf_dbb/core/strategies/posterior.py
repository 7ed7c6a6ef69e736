"""Prompts drawn by their posterior: more often where a rollout is expected to teach more.

Axes: P prompts of the run, B of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies.base import (
    Drawn,
    Predictive,
    RolloutStrategy,
    RunFacts,
    Sampler,
    SamplingError,
    register,
)
from openrlhf_dbb.core.strategies.parameters import parameter

Floats = NDArray[np.float64]


@register
@dataclass(frozen=True)
class PosteriorSampling(RolloutStrategy):
    """Each batch's prompts are drawn by the expected variance of a reward, E[p (1 - p)].

    With Beta(a_i, b_i) the estimator's distribution of prompt i's next success probability, just before the batch, and
    B prompts of P in a batch::

        v_i   = E[p (1 - p)] = a_i b_i / ((a_i + b_i) (a_i + b_i + 1))
        q_i   = (1 - floor) v_i^power / sum(v^power) + floor / P
        pi_i  = min(1, c q_i), sum(pi) = B            probability that prompt i is in the batch

    and one systematic draw, so that a batch has exactly B different prompts. A rollout's advantage is multiplied by
    ``(B / (P pi_i)) ** weight_power``: with power 1 the expected gradient is that of prompts drawn evenly, and no
    weight exceeds 1 / floor; with 0 the policy is trained on the mixture that was drawn, a curriculum. As pi is fixed
    before anything is generated, the weights are exact. With weights, power 1/2 is what makes the gradient least noisy
    if v is right; without, a higher one makes a steeper curriculum.

    A prompt's v is as good as the estimator's forecast of it; the floor bounds what a wrong one costs.

    Source: importance sampling with unequal probabilities (Horvitz and Thompson 1952); with this posterior our own.
    """

    power: float = parameter(0.5, "power of E[p (1 - p)] that the draws are in proportion to", within="[0, 2]")
    floor: float = parameter(0.25, "share of the draws that goes to all prompts alike", within="(0, 1]")
    weight_power: float = parameter(
        1.0, "power of the importance weights; 1: unbiased, 0: none, a curriculum", within="[0, 1]"
    )

    name: ClassVar[str] = "posterior"
    draws: ClassVar[bool] = True

    def describe(self) -> str:
        weights = {0.0: "without weights (a curriculum)", 1.0: "with importance weights"}.get(
            self.weight_power, f"with importance weights to the power {self.weight_power:g} (partly a curriculum)"
        )
        return f"prompts drawn by E[p (1 - p)]^{self.power:g}, floor {self.floor:g}, {weights}"

    def sampler(self, facts: RunFacts) -> PosteriorSampler:
        return PosteriorSampler(self, facts)


class PosteriorSampler(Sampler):
    """Draws a batch whenever the last one has been handed out."""

    def __init__(self, strategy: PosteriorSampling, facts: RunFacts) -> None:
        super().__init__(facts)
        self._strategy = strategy
        self._random = np.random.default_rng(facts.seed)
        self._batch: deque[Drawn] = deque()
        self._metrics: dict[str, float] = {}

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        if not self._batch:
            self._batch.extend(self._draw(predictive()))
        return self._batch.popleft()

    def _draw(self, predictive: Predictive) -> list[Drawn]:
        prompts, batch, strategy = len(predictive.prompt_ids), self.facts.groups, self._strategy
        if batch > prompts:
            raise SamplingError(
                f"--rollout.strategy posterior draws each prompt at most once in a batch of {batch} "
                f"(--rollout.batch_size), but only {prompts} prompts differ; lower it"
            )
        variance = expected_variance(predictive.alpha, predictive.beta)
        pi = inclusion(variance**strategy.power, batch, strategy.floor)
        drawn = systematic(pi, self._random)
        weights = (batch / (prompts * pi[drawn])) ** strategy.weight_power
        self._metrics = {
            "posterior/lift": float(variance[drawn].mean() / variance.mean()) if variance.any() else 1.0,
            "posterior/certain": float(np.mean(pi == 1)),
            "posterior/effective": float(weights.sum() ** 2 / (batch * (weights @ weights))),
        }
        columns = (predictive.prompt_ids[drawn], np.full(batch, self.facts.rollouts), pi[drawn], weights)
        return [Drawn(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def metrics(self) -> dict[str, float]:
        """Of the last batch drawn.

        posterior/lift: mean E[p (1 - p)] of its prompts, over that of all. posterior/certain: share of all prompts with
        pi = 1. posterior/effective: what the weights leave of the batch, (sum w)^2 / (B sum w^2), in (0, 1].
        """
        return self._metrics

    def state(self) -> dict[str, Any]:
        return {
            "random": self._random.bit_generator.state,
            "batch": [astuple(drawn) for drawn in self._batch],
            "metrics": dict(self._metrics),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self._batch = deque(Drawn(*row) for row in state["batch"])
        self._metrics = dict(state["metrics"])


def expected_variance(alpha: Floats, beta: Floats) -> Floats:
    """E[p (1 - p)] for p ~ Beta(alpha, beta), in [0, 1/4]: the variance that a reward is expected to have, given p."""
    total = alpha + beta
    return np.asarray(alpha / total * (beta / (total + 1)))


def inclusion(value_P: Floats, batch: int, floor: float) -> Floats:
    """Probability that each prompt is in a batch, (P,) in (0, 1], with the sum ``batch``.

    Args:
        value_P: >= 0; what the draws are in proportion to, but for the floor and the limit of 1.
        batch: at most P.
        floor: share in (0, 1] that all prompts get alike. No probability is below ``floor * batch / P``.
    """
    prompts, total = len(value_P), value_P.sum()
    even_P = np.full(prompts, 1 / prompts)
    share_P = floor * even_P + (1 - floor) * (value_P / total if total > 0 else even_P)
    order = np.argsort(-share_P, kind="stable")
    sorted_P = share_P[order]
    rest_P = np.cumsum(sorted_P[::-1])[::-1]  # sum of this share and all smaller ones
    # With the k largest certain, the others are scaled to fill the batch; k is the least with which that is below 1.
    scale_P = (batch - np.arange(prompts)) / rest_P
    certain = int(np.argmax(scale_P * sorted_P <= 1 + 1e-12))
    pi_P = scale_P[certain] * share_P
    return np.where(pi_P > 1 - 1e-9, 1.0, pi_P)  # what is certain is so exactly


def systematic(pi_P: Floats, random: np.random.Generator) -> NDArray[np.int64]:
    """One systematic draw: as many different prompts as ``pi_P`` sums to, each with its probability; in random order.

    Args:
        pi_P: in (0, 1], with a whole sum.
    """
    certain = np.flatnonzero(pi_P == 1)
    others = random.permutation(np.flatnonzero(pi_P < 1))
    size = round(float(pi_P.sum())) - len(certain)
    ends = np.cumsum(pi_P[others])
    if size:
        ends *= size / ends[-1]  # its last is whole but for rounding
    drawn = others[np.searchsorted(ends, random.random() + np.arange(size), side="right")]
    return random.permutation(np.concatenate([certain, drawn]))
