"""Prompts drawn by their posterior: more often where a reward is expected to vary more.

Axes: P prompts of the run, B of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies import (
    Drawn,
    Predictive,
    RunFacts,
    parameter,
    register,
)
from openrlhf_dbb.core.strategies.draws import BatchSampler, DrawingStrategy
from openrlhf_dbb.estimators.base import Floats

_LEAST_LIFT = 1.0  # below it draws by the forecast make the gradient noisier than even draws


@register
@dataclass(frozen=True)
class PosteriorSampling(DrawingStrategy):
    """Each batch's prompts are drawn by the expected variance of a reward, E[p (1 - p)].

    The estimator forecasts each prompt's success probability p as a Beta just before the batch. One systematic draw
    gives a batch of different prompts. docs/methods.md has the probabilities and the importance weights.
    A prompt whose last three visits yielded no score is drawn at the floor only.

    Source: importance sampling with unequal probabilities (Horvitz and Thompson 1952); with this posterior our own.
    """

    power: float = parameter(
        1.0, "power of E[p (1 - p)] that the draws are in proportion to", within="[0, 2]"
    )
    floor: float = parameter(
        0.1, "share of the draws that goes to all prompts alike", within="(0, 1]"
    )
    weight_power: float = parameter(
        1.0, "power of the importance weights; 1: unbiased, 0: none, a curriculum", within="[0, 1]"
    )

    name: ClassVar[str] = "posterior"

    def describe(self) -> str:
        """Return what the draws are in proportion to, the floor and the weights."""
        drawn = f"prompts drawn by E[p (1 - p)]^{self.power:g}, floor {self.floor:g}"
        return f"{drawn}, importance weights to the power {self.weight_power:g}"

    def sampler(self, facts: RunFacts) -> "PosteriorSampler":
        """Return a sampler that draws batches by the forecast."""
        return PosteriorSampler(self, facts)


class PosteriorSampler(BatchSampler):
    """Draws a batch by the forecast, or evenly while that does not pay."""

    kept: ClassVar[tuple[str, ...]] = (
        *BatchSampler.kept,
        "_metrics",
        "_passes",
        "_evenly",
        "note",
        "_outcomes",
    )

    def __init__(self, strategy: PosteriorSampling, facts: RunFacts) -> None:
        super().__init__(facts)
        self._strategy = strategy
        self._metrics: dict[str, float] = {}
        self._evenly = False
        self._passes = 0
        # Of each group of the pass: 1 if it is mixed, that times as_even, and that times as_forecast.
        self._outcomes: list[tuple[float, float, float]] = []
        self._of_step: list[tuple[float, float, float]] = []  # likewise; empty between steps

    def _draw(self, predictive: Predictive) -> list[Drawn]:
        strategy = self._strategy
        prompts = len(predictive.prompt_ids)
        batch = self.facts.groups
        value_P = expected_variance(predictive.alpha, predictive.beta) ** strategy.power
        even_P = np.full(prompts, batch / prompts)
        drawn_evenly_P = even_P
        if predictive.unverified is not None and predictive.unverified.any():
            # Nothing is learned from a prompt without scores: it keeps its share of the floor.
            value_P[predictive.unverified] = 0
            is_verified_P = (~predictive.unverified).astype(np.float64)
            drawn_evenly_P = inclusion(is_verified_P, batch, strategy.floor)
        forecast_P = inclusion(value_P, batch, strategy.floor)
        pi_P = drawn_evenly_P if self._evenly else forecast_P
        drawn_B = systematic(pi_P, self._random)
        pi_B = pi_P[drawn_B]
        as_even_B = even_P[drawn_B] / pi_B
        weights_B = as_even_B**strategy.weight_power
        effective = weights_B.sum() ** 2 / (batch * (weights_B @ weights_B))  # 1 for equal weights
        self._metrics["posterior/even"] = float(self._evenly)
        self._metrics["posterior/effective"] = float(effective)
        columns = (
            predictive.prompt_ids[drawn_B],
            pi_B,
            weights_B,
            as_even_B,
            forecast_P[drawn_B] / pi_B,
        )
        rows = zip(*[column.tolist() for column in columns], strict=True)
        return [Drawn(*row) for row in rows]

    def observe(self, drawn: Drawn, mixed: bool) -> None:
        """Note whether the group was mixed, and its weights for even draws and the forecast's."""
        outcome = (float(mixed), mixed * drawn.as_even, mixed * drawn.as_forecast)
        self._outcomes.append(outcome)
        self._of_step.append(outcome)

    def end_step(self) -> None:
        """Compute the step's share of mixed groups, and what even draws would have had."""
        if self._of_step:  # a reward model's scores come later and are not observed
            mixed, mixed_even, _ = np.mean(self._of_step, axis=0).tolist()
            self._metrics["posterior/mixed"] = mixed
            self._metrics["posterior/mixed_even"] = mixed_even
            self._of_step = []

    def end_pass(self) -> None:
        """Let the next pass draw by the forecast if that paid in this pass, else evenly."""
        lift = effective_lift(self._outcomes, self._strategy.weight_power)
        self._outcomes = []
        self._passes += 1
        if lift is None or (lift < _LEAST_LIFT) == self._evenly:
            return
        self._evenly = not self._evenly
        way = "evenly" if self._evenly else "by the posterior"
        self.note = (
            f"prompts are drawn {way} after pass {self._passes}: weighted, the posterior's draws are "
            f"worth {lift:.2f} times the mixed groups of even draws; more than {_LEAST_LIFT:g} pays"
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the last draw, and the last step's shares of mixed groups."""
        return dict(self._metrics)


def effective_lift(
    outcomes: Sequence[tuple[float, float, float]], weight_power: float
) -> float | None:
    """Return how many mixed groups of even draws one pass of draws by the forecast is worth, as a ratio.

    Importance weights w make the gradient noisier. Weighted groups are worth (sum w)^2 / sum w^2
    equal ones (Kish 1965). Both numbers are Horvitz and Thompson's estimates: the way that is not
    drawn by counts each mixed group by its probability there over its probability here.

    Args:
        outcomes: of each drawn group: 1 if it is mixed, that times ``Drawn.as_even``, and that
            times ``Drawn.as_forecast``.
        weight_power: of the importance weights, in [0, 1].

    Returns:
        The ratio, > 0; None without a mixed group, which tells nothing.
    """
    mixed = np.array([outcome for outcome in outcomes if outcome[0]]).reshape(-1, 3)
    if not len(mixed):
        return None
    even = mixed[:, 1]
    forecast = mixed[:, 2]
    weights = (even / forecast) ** weight_power
    worth = (forecast @ weights) ** 2 / (forecast @ weights**2)
    return float(worth / even.sum())


def expected_variance(alpha: Floats, beta: Floats) -> Floats:
    """Return E[p (1 - p)] for p ~ Beta(alpha, beta), in [0, 1/4]."""
    total = alpha + beta
    return np.asarray(alpha / total * (beta / (total + 1)))


def inclusion(value_P: Floats, batch: int, floor: float) -> Floats:
    """Return the probability that each prompt is in a batch, (P,) in [floor * batch / P, 1], with the sum ``batch``.

    The draws are in proportion to ``value_P`` >= 0, apart from the floor in (0, 1] and the limit of 1.
    """
    prompts = len(value_P)
    even_P = np.full(prompts, 1 / prompts)
    total = value_P.sum()
    own_P = value_P / total if total > 0 else even_P
    share_P = floor * even_P + (1 - floor) * own_P
    order = np.argsort(-share_P, kind="stable")
    sorted_P = share_P[order]
    rest_P = np.cumsum(sorted_P[::-1])[::-1]  # sum of this share and all smaller ones
    # With the k largest certain, the others are scaled to fill the batch; k is the least with which that is below 1.
    scale_P = (batch - np.arange(prompts)) / rest_P
    certain = int(np.argmax(scale_P * sorted_P <= 1 + 1e-12))
    pi_P = scale_P[certain] * share_P
    return np.where(pi_P > 1 - 1e-9, 1.0, pi_P)  # rounding must not make a certain prompt uncertain


def systematic(pi_P: Floats, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw as many different prompts as ``pi_P`` sums to, each with its probability."""
    certain = np.flatnonzero(pi_P == 1)
    others = random.permutation(np.flatnonzero(pi_P < 1))
    size = round(float(pi_P.sum())) - len(certain)
    ends = np.cumsum(pi_P[others])
    if size:
        ends *= size / ends[-1]  # rounding must not move the last end away from a whole number
    drawn = others[np.searchsorted(ends, random.random() + np.arange(size), side="right")]
    return random.permutation(np.concatenate([certain, drawn]))
