"""Squared errors measured by probes: values by hand, unbiased over all outcomes of a probe."""

import math

import numpy as np
import pytest

from estimators.probe_error import mean_variance, squared_errors


def test_by_hand():
    # Scores 1 0 0 0, then 0.2 and 0.6, then 1 1 1 1.
    samples, successes, squares = np.array([4, 2, 4]), np.array([1, 0.8, 4]), np.array([1, 0.4, 4])
    # Variances of the means: 0.25 * 0.75 / 3, then 0.08 / 2, then 0.
    assert mean_variance(samples, successes, squares) == pytest.approx([0.0625, 0.04, 0])
    # (0.5 - 0.25)^2 - 0.0625;  (0.4 - 0.4)^2 - 0.04;  (0.9 - 1)^2 - 0
    errors = squared_errors(np.array([0.5, 0.4, 0.9]), samples, successes, squares)
    assert errors == pytest.approx([0, -0.04, 0.01])


def test_unbiased():
    p, samples, estimate = 0.3, 5, 0.45
    successes = np.arange(samples + 1.0)
    weights = [math.comb(samples, s) * p**s * (1 - p) ** (samples - s) for s in range(samples + 1)]
    errors = squared_errors(np.full(samples + 1, estimate), np.full(samples + 1, samples), successes, successes)
    assert np.dot(weights, errors) == pytest.approx((estimate - p) ** 2)


def test_the_noise_of_a_single_score_is_unknown():
    one = np.ones(1)
    assert np.isnan(squared_errors(0.5 * one, one, one, one)).all()
