"""Mean squared errors in closed form, for success probabilities that are given or that probes have measured.

Axes: Q prompts, T visits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from estimators.closed_form import Moments, fitted_prior, moments
from estimators.empirical_bayes import EmpiricalBayes
from openrlhf_dbb.errors import UsageError


@dataclass(frozen=True)
class Probabilities:
    """Success probabilities of Q prompts, and how well they are known.

    Attributes:
        p_Q_T: success probability at each visit; NaN after a prompt's last.
        noise_Q_T: variance of each of them as a measurement; 0 where it is exact, NaN where ``p_Q_T`` is.
    """

    p_Q_T: Floats
    noise_Q_T: Floats

    @classmethod
    def exactly(cls, p_Q_T: Floats) -> Probabilities:
        """Probabilities that are given."""
        return cls(p_Q_T, 0 * p_Q_T)

    def moments(self, estimator: RewardEstimator, rollouts: int) -> Moments:
        """Bias and variance with the probabilities as they are, (Q, T).

        Raises:
            UsageError: no closed form is known for the estimator, or a probability is not in [0, 1].
        """
        try:
            return moments(estimator, self.p_Q_T, rollouts, shared_prior=self._prior(estimator, rollouts))
        except ValueError as error:
            raise UsageError(f"{error} (no closed form is known for it)") from error

    def mse(self, estimator: RewardEstimator, rollouts: int) -> float:
        """Mean squared error over prompts and visits with the probabilities as they are: the paper's number."""
        return float(np.nanmean(self.moments(estimator, rollouts).mse))

    def mse_without_noise(self, estimator: RewardEstimator, rollouts: int) -> float:
        """The same, without the bias that noise in the probabilities causes.

        An estimate is c_0 p_0 + sum_k c_k S_k/N, so its bias is ``b = c_0 p_0 + sum_k a_k p_k`` with a_k = c_k, but
        a_t = c_t - 1. If p~_k is a mean of M probe rollouts and v_k = p_k (1 - p_k)::

            E b~^2 = b^2 + sum_k a_k^2 v_k / M        E p~ (1 - p~) = (1 - 1/M) v

        The sum is subtracted and the missing variance added, with the measured noise p~ (1 - p~) / (M - 1) for v / M.
        """
        weights_T_T = self._weights(estimator, rollouts)
        noise_Q_T = np.nan_to_num(self.noise_Q_T)  # visits that did not happen have weight 0, and 0 * NaN is NaN
        missing = weights_T_T**2 / rollouts
        excess = (weights_T_T - np.eye(len(weights_T_T))) ** 2
        return float(np.nanmean(self.moments(estimator, rollouts).mse + noise_Q_T @ (missing - excess)))

    def _weights(self, estimator: RewardEstimator, rollouts: int) -> Floats:
        """c_k of visit t, (k, t): what a unit of each p_k adds to the bias, which is linear in them, plus 1 for p_t."""
        visits = self.p_Q_T.shape[1]
        units = np.vstack([np.zeros(visits), np.eye(visits)])
        bias = moments(estimator, units, rollouts, shared_prior=self._prior(estimator, rollouts)).bias
        return np.asarray(bias[1:] - bias[0] + np.eye(visits))

    def _prior(self, estimator: RewardEstimator, rollouts: int) -> Floats | None:
        """The prior that empirical Bayes would have on each visit, (T, 2); None for other estimators."""
        if not isinstance(estimator, EmpiricalBayes):
            return None
        return fitted_prior(estimator, self.p_Q_T, rollouts, self.noise_Q_T)
