"""The squared error of V estimates, measured against M extra rollouts each of the same policy (probes)."""

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import Floats

Samples = Floats | NDArray[np.int64]


def squared_errors(estimates: Floats, samples: Samples, successes: Floats, squares: Floats) -> Floats:
    """Return unbiased estimates of ``(estimate - p)^2``, shape (V,), with p the expected score of a probe rollout.

    Each is ``(estimate - q)^2 - s^2 / M`` with q the mean and s^2 the N-1 variance of the M scores (``samples``), of
    which ``successes`` and ``squares`` are the sum and the sum of squares; (V,) each. NaN where M < 2.

    Source: paper, section 5.3, with the noise of its reference removed.
    """
    return (estimates - successes / samples) ** 2 - mean_variance(samples, successes, squares)


def mean_variance(samples: Samples, successes: Floats, squares: Floats) -> Floats:
    """Return an unbiased estimate of the variance of a probe's mean, shape (V,); arguments as above."""
    variance = np.full(np.shape(successes), np.nan)
    scatter = squares - successes**2 / samples
    return np.divide(scatter, samples * (samples - 1), out=variance, where=np.asarray(samples) > 1)
