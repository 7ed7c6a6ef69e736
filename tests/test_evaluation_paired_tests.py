"""Paired statistics: by hand, and against scipy."""

import numpy as np
import pytest
from scipy import stats

from openrlhf_dbb.evaluation import paired_tests


def test_test_and_interval_are_scipys():
    difference_P = np.random.default_rng(0).normal(0.02, 0.1, 60)
    scipys = stats.ttest_1samp(difference_P, 0)
    one_sided = paired_tests.stratified_t([difference_P])
    two_sided = paired_tests.stratified_t([difference_P], two_sided=True)
    assert two_sided.p == pytest.approx(scipys.pvalue, rel=1e-9)
    assert one_sided.p == pytest.approx(stats.ttest_1samp(difference_P, 0, alternative="greater").pvalue, rel=1e-9)
    assert (one_sided.low, one_sided.high) == pytest.approx(scipys.confidence_interval())


def test_differences_without_variance_and_one_prompt_test_nothing():
    base = np.array([0.1, 0.3, 0.7])
    same = paired_tests.stratified_t([base + 0.25 - base])  # 0.1 + 0.25 - 0.1 is not 0.25 in binary
    assert (same.difference, same.error) == (0.25, 0)
    assert np.isnan([same.t, same.p]).all()
    assert (same.low, same.high) == (0.25, 0.25)
    single = paired_tests.stratified_t([np.array([0.5])])
    assert single.difference == 0.5
    assert np.isnan(single[1:]).all()


def test_average_by_hand():
    # Means 0.2 and 0.6; variances of the means 0.04 / 2 = 0.02 and 0.12 / 3 = 0.04.
    # Error sqrt(0.06) / 2; degrees 0.06^2 / (0.02^2 / 1 + 0.04^2 / 2) = 0.0036 / 0.0012 = 3.
    first, second = np.array([0.2 - np.sqrt(0.02), 0.2 + np.sqrt(0.02)]), 0.6 + np.sqrt(0.12) * np.array([-1, 0, 1])
    test = paired_tests.stratified_t([first, second])
    t = 0.8 / np.sqrt(0.06)
    assert (test.difference, *test[3:]) == pytest.approx((0.4, np.sqrt(0.06) / 2, 3, t, stats.t.sf(t, 3)))


def test_holm_by_hand():
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 = 0.06 is not below the one before; 0.5 x 1
    assert paired_tests.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert paired_tests.holm([0.6, 0.7]) == pytest.approx([1, 1])
    np.testing.assert_allclose(paired_tests.holm([np.nan, 0.01, 0.02]), [np.nan, 0.02, 0.02])
    assert len(paired_tests.holm([])) == 0
