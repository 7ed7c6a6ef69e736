"""The squared error of V estimates, measured against M extra rollouts each of the same policy.

These rollouts are called probes.
"""

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import Floats

Samples = Floats | NDArray[np.int64]


def squared_errors(
    estimates: Floats,
    samples: Samples,
    successes: Floats,
    squares: Floats,
) -> Floats:
    """Return unbiased estimates of ``(estimate - p)^2``, (V,).

    p is the expected score of a probe rollout. Each estimate is ``(estimate - q)^2 - s^2 / M``, q
    the mean and s^2 the N-1 variance of the scores of a probe's M rollouts; NaN where M < 2.

    Args:
        estimates: (V,) estimated means.
        samples: (V,) M, the numbers of rollouts.
        successes: (V,) sums of their scores.
        squares: (V,) sums of the squares of their scores.

    Source: paper, section 5.3, with the noise of its reference removed.
    """
    distance = estimates - successes / samples
    return distance**2 - mean_variance(samples, successes, squares)


def mean_variance(samples: Samples, successes: Floats, squares: Floats) -> Floats:
    """Return an unbiased estimate of the variance of a probe's mean, ``s^2 / M``, (V,).

    It is NaN where M < 2. The arguments are those of :func:`squared_errors`.
    """
    scatter = squares - successes**2 / samples
    divisor = samples * (samples - 1)
    variance = np.full(np.shape(successes), np.nan)
    return np.divide(scatter, divisor, out=variance, where=np.asarray(samples) > 1)
