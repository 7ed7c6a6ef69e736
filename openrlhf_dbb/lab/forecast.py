"""Is a forecast of the next visit right? Randomized PIT, coverage of central intervals, reliability.

Axes: V visits forecast, S possible numbers of successes (0 to N of the largest group), B bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimators.base import Floats
from openrlhf_dbb.lab.visits import Integers


def pit(log_mass_V_S: Floats, successes: Integers, uniform: Floats) -> Floats:
    """Randomized probability integral transform, (V,) in [0, 1]: uniform if the forecasts are right.

    ``F(S) - u P(S)`` with F the forecast's cumulative probability, P that of S itself, and u uniform.

    Args:
        log_mass_V_S: log-probability of every number of successes.
        successes: (V,) S, the outcome.
        uniform: (V,) u in [0, 1).
    """
    mass_V_S = np.exp(log_mass_V_S)
    rows = np.arange(len(successes))
    reached = np.cumsum(mass_V_S, axis=1)[rows, successes] - uniform * mass_V_S[rows, successes]
    return np.asarray(np.clip(reached, 0, 1))


def coverage(log_mass_V_S: Floats, successes: Integers, level: float) -> tuple[float, float]:
    """How often S fell into the forecast's central interval, and how often it should have.

    The interval runs from the first S whose cumulative probability reaches (1 - level) / 2 to the first that reaches
    (1 + level) / 2. Since S is a whole number it holds more than ``level``; the second value says how much.

    Args:
        level: in (0, 1).

    Returns:
        Share of visits inside, and mean over visits of the probability that the forecast gives to its interval.
    """
    cumulative_V_S = np.cumsum(np.exp(log_mass_V_S), axis=1)
    low, high = ((cumulative_V_S >= (1 + side * level) / 2).argmax(axis=1) for side in (-1, 1))
    rows = np.arange(len(successes))
    below = np.where(low > 0, cumulative_V_S[rows, np.maximum(low - 1, 0)], 0)
    inside = (successes >= low) & (successes <= high)
    return float(inside.mean()), float((cumulative_V_S[rows, high] - below).mean())


@dataclass(frozen=True)
class Reliability:
    """Forecast means against outcomes, in B bins of about equally many visits.

    Attributes:
        forecast, observed: (B,) means of the forecast and of S/N over the visits of a bin.
        error: (B,) standard error of observed - forecast; NaN with a single visit.
        visits: (B,) number of visits.
    """

    forecast: Floats
    observed: Floats
    error: Floats
    visits: Integers

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean over visits of abs(observed - forecast) of their bin."""
        return float(np.average(np.abs(self.observed - self.forecast), weights=self.visits))

    @property
    def by_chance(self) -> float:
        """The calibration error expected of right forecasts: ``sqrt(2 / pi)`` standard errors."""
        return float(np.average(np.nan_to_num(self.error) * np.sqrt(2 / np.pi), weights=self.visits))


def reliability(forecast: Floats, share: Floats, bins: int = 10) -> Reliability:
    """Bin visits by their forecast mean, at its quantiles.

    Args:
        forecast: (V,) its mean.
        share: (V,) S/N, the outcome.
        bins: at most this many; equal forecasts stay together.
    """
    edges = np.unique(np.quantile(forecast, np.arange(1, bins) / bins))
    _, of = np.unique(np.searchsorted(edges, forecast, side="right"), return_inverse=True)
    visits = np.bincount(of)
    expected, observed = (np.bincount(of, values) / visits for values in (forecast, share))
    gap = share - forecast
    centred = (gap - (observed - expected)[of]) ** 2
    with np.errstate(invalid="ignore"):
        error = np.sqrt(np.bincount(of, centred) / (visits - 1) / visits)
    return Reliability(expected, observed, error, visits)
