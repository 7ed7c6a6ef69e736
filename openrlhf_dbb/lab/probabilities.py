"""Mean squared errors in closed form, for success probabilities that are given or that probes have measured.

Axes: Q prompts, T visits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimators import RewardEstimator
from estimators.closed_form import Moments, moments
from estimators.empirical_bayes import EmpiricalBayes, fit_beta
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab.error_curves import Floats


@dataclass(frozen=True)
class Known:
    """What is known of the success probabilities of Q prompts.

    Attributes:
        p_Q_T: success probability at each visit; NaN after a prompt's last.
        samples_Q_T: M >= 2, probe rollouts that each of them is the mean of; infinite where it is exact.
    """

    p_Q_T: Floats
    samples_Q_T: Floats

    @classmethod
    def exactly(cls, p_Q_T: Floats) -> Known:
        """Probabilities that are given."""
        return cls(p_Q_T, np.full_like(p_Q_T, np.inf))

    @property
    def noise_Q_T(self) -> Floats:
        """Variance of a probed probability, unbiased: p (1 - p) / (M - 1)."""
        return np.asarray(self.p_Q_T * (1 - self.p_Q_T) / (self.samples_Q_T - 1))

    def moments(self, estimator: RewardEstimator, rollouts: int) -> Moments:
        """Bias and variance with the probabilities as they are, (Q, T).

        Raises:
            UsageError: no closed form is known for the estimator, or a probability is none.
        """
        try:
            return moments(estimator, self.p_Q_T, rollouts, shared_prior=self._prior(estimator, rollouts))
        except ValueError as error:
            raise UsageError(f"{error} ('simulate' takes any estimator)") from error

    def mse(self, estimator: RewardEstimator, rollouts: int) -> float:
        """Mean squared error over prompts and visits with the probabilities as they are: the paper's number."""
        return float(np.nanmean(self.moments(estimator, rollouts).mse))

    def mse_without_noise(self, estimator: RewardEstimator, rollouts: int) -> float:
        """The same, unbiased when the probabilities are means p~ of M probe rollouts.

        An estimate is c_0 p_0 + sum_k c_k S_k/N, so its bias is ``b = c_0 p_0 + sum_k a_k p_k`` with a_k = c_k, but
        a_t = c_t - 1. With v_k = p_k (1 - p_k)::

            E b~^2 = b^2 + sum_k a_k^2 v_k / M        E p~ (1 - p~) = (1 - 1/M) v

        The sum is taken out and the variance made up, with p~ (1 - p~) / (M - 1) for v / M.
        """
        weights_T_T = self._weights(estimator, rollouts)
        noise_Q_T = np.nan_to_num(self.noise_Q_T)  # a visit that never was has weight 0, and 0 * NaN is NaN
        missing = weights_T_T**2 / rollouts
        excess = (weights_T_T - np.eye(len(weights_T_T))) ** 2
        return float(np.nanmean(self.moments(estimator, rollouts).mse + noise_Q_T @ (missing - excess)))

    def _weights(self, estimator: RewardEstimator, rollouts: int) -> Floats:
        """c_k of visit t, (k, t): how the bias answers to each p_k, of which it is a linear function."""
        visits = self.p_Q_T.shape[1]
        units = np.vstack([np.zeros(visits), np.eye(visits)])
        bias = moments(estimator, units, rollouts, shared_prior=self._prior(estimator, rollouts)).bias
        return np.asarray(bias[1:] - bias[0] + np.eye(visits))

    def _prior(self, estimator: RewardEstimator, rollouts: int) -> Floats | None:
        """The prior that empirical Bayes would have on each visit, (T, 2), from the moments that S/N is to have."""
        if not isinstance(estimator, EmpiricalBayes):
            return None
        running, priors = np.zeros(4), []
        variance_Q_T = np.nan_to_num(self.p_Q_T * (1 - self.p_Q_T)) + np.nan_to_num(self.noise_Q_T)
        squares_Q_T = self.p_Q_T**2 - self.noise_Q_T + variance_Q_T / rollouts
        for p_Q, squares_Q in zip(self.p_Q_T.T, squares_Q_T.T, strict=True):
            groups = int(np.sum(~np.isnan(p_Q)))
            kept = 0.5 ** (groups / estimator.half_life) if estimator.half_life else 1.0
            running = kept * running + [groups, np.nansum(p_Q), np.nansum(squares_Q), groups / rollouts]
            priors.append(fit_beta(running))
        return np.array(priors)
