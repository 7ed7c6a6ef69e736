"""Bias, variance and mean squared error of the estimators' means, exactly, for given success probabilities.

Axes: Q prompts, T visits of each.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from openrlhf_dbb.estimators.base import Floats, RewardEstimator
from openrlhf_dbb.estimators.dbb import DiscountedBetaBernoulli
from openrlhf_dbb.estimators.empirical_bayes import EmpiricalBayes, fit_beta
from openrlhf_dbb.estimators.simple import LaplaceSmoothing, MovingAverage, PointEstimator

SUPPORTED = (DiscountedBetaBernoulli, MovingAverage, EmpiricalBayes, LaplaceSmoothing, PointEstimator)


@dataclass(frozen=True)
class Moments:
    """Bias (expectation minus truth) and variance of an estimated mean, (Q, T) each."""

    bias: Floats
    variance: Floats

    @property
    def mse(self) -> Floats:
        """Mean squared error, shape (Q, T)."""
        return np.asarray(self.bias**2 + self.variance)


def moments(estimator: RewardEstimator, p_Q_T: ArrayLike, rollouts: int) -> Moments:
    """Return bias and variance of an estimator's mean, by prompt and visit, over all rollouts that might be drawn.

    Given p_1 ... p_t, every estimator here is a weighted average with fixed weights, ``c_0 + ... + c_t = 1``::

        estimate_t = c_0 p_0 + sum_k c_k S_k / N                S_k ~ Binomial(N, p_k), independent
        bias_t     = c_0 (p_0 - p_t) + sum_k c_k (p_k - p_t)
        variance_t = sum_k c_k^2 p_k (1 - p_k) / N

    With ``dbb``, c_0 is in proportion to discount^t (alpha_0 + beta_0), and c_k to N discount^(t - k); the others are
    in the code. The prior of ``empirical_bayes`` is accurate if there are many prompts.

    ``p_Q_T`` are success probabilities in [0, 1], NaN after a prompt's last visit; N >= 1 ``rollouts`` at each. Raise
    ValueError for another estimator, or an argument outside its range.

    Source: paper, section 3.3 and its appendices, whose formulas are special cases of the three lines above.
    """
    if rollouts < 1:
        raise ValueError(f"rollouts must be at least 1, got {rollouts}")
    p_Q_T = np.asarray(p_Q_T, dtype=np.float64)
    if ((p_Q_T < 0) | (p_Q_T > 1)).any():
        raise ValueError(f"probabilities lie in [{np.nanmin(p_Q_T):g}, {np.nanmax(p_Q_T):g}], not in [0, 1]")
    prior_T, prior_mean_T, groups_T_T = _weights(estimator, p_Q_T, rollouts)
    total_T = prior_T + groups_T_T.sum(axis=1)
    c_0_T, c_T_T = prior_T / total_T, groups_T_T / total_T[:, None]

    visited = ~np.isnan(p_Q_T)
    p = np.where(visited, p_Q_T, 0.0)  # later visits have weight 0, and 0 * NaN is NaN
    bias = c_0_T * prior_mean_T + p @ c_T_T.T - p
    variance = (p * (1 - p)) @ (c_T_T.T**2) / rollouts
    return Moments(np.where(visited, bias, np.nan), np.where(visited, variance, np.nan))


def _weights(estimator: RewardEstimator, p_Q_T: Floats, rollouts: int) -> tuple[Floats, Floats, Floats]:
    """Return the prior's weight and mean, (T,), and the weight at visit t of group k, (T, T)."""
    # Not isinstance: a subclass may weigh the groups in another way.
    if type(estimator) not in SUPPORTED:
        known = ", ".join(sorted(cls.name for cls in SUPPORTED))
        raise ValueError(f"no closed form is known for {estimator}; it is for {known}")
    visits = p_Q_T.shape[1]
    current_T_T = rollouts * np.eye(visits)
    none_T, t = np.zeros(visits), np.arange(1, visits + 1)
    match estimator:
        case DiscountedBetaBernoulli(discount=discount, prior_alpha=alpha, prior_beta=beta):
            return discount**t * (alpha + beta), none_T + alpha / (alpha + beta), rollouts * _powers(discount, visits)
        case MovingAverage(discount=discount):
            weights_T_T = (1 - discount) * _powers(discount, visits)
            weights_T_T[:, 0] = discount ** (t - 1)
            return none_T, none_T, weights_T_T
        case LaplaceSmoothing(smoothing=smoothing):
            return none_T + 2 * smoothing, none_T + 0.5, current_T_T
        case EmpiricalBayes():
            prior_T_2 = fitted_prior(p_Q_T, rollouts)
            return prior_T_2.sum(axis=1), prior_T_2[:, 0] / prior_T_2.sum(axis=1), current_T_T
        case _:  # point
            return none_T, none_T, current_T_T


def _powers(discount: float, visits: int) -> Floats:
    t = np.arange(visits)
    return np.tril(discount ** np.abs(t[:, None] - t).astype(np.float64))


def fitted_prior(p_Q_T: Floats, rollouts: int) -> Floats:
    """Return the prior (a, b) fitted to the moments expected of visits 1 ... t, (T, 2)."""
    squares_Q_T = p_Q_T**2 + p_Q_T * (1 - p_Q_T) / rollouts
    groups_T = np.sum(~np.isnan(p_Q_T), axis=0)
    moments_T_4 = np.stack(
        [groups_T, np.nansum(p_Q_T, axis=0), np.nansum(squares_Q_T, axis=0), groups_T / rollouts], axis=1
    )
    return np.array([fit_beta(moments) for moments in np.cumsum(moments_T_4, axis=0)]).reshape(-1, 2)
