"""Advantages between the store and the trainer."""

import numpy as np
import pytest

from openrlhf_dbb.core.advantages import check_thin, thin


def test_thinning_keeps_the_expectation_of_every_advantage():
    draws = 4_000
    least = 0.75
    advantages_R = np.array([0.3, 0.3, -0.5, 0.0, 0.75, -2.0, -0.1, 0.6])
    kept_R = np.array([0.4, 0.4, 2 / 3, 1, 1, 1, 2 / 15, 0.8])  # min(1, |A| / 0.75)
    found = np.stack(
        [thin(advantages_R, least, np.random.default_rng(seed)) for seed in range(draws)]
    )
    # 0, or the advantage divided by the probability with which it is kept
    assert np.all(np.isclose(found, 0) | np.isclose(found, advantages_R / kept_R))
    error_R = np.sqrt(kept_R * (1 - kept_R) / draws) * least
    assert np.all(abs(found.mean(axis=0) - advantages_R) <= 4 * error_R + 1e-9)


def test_thinning_keeps_about_the_expected_number_of_each_group():
    """Eight advantages of 0.4 and eight of -0.3 have 3.2 and 2.4 kept as 1 and -1."""
    groups_R = np.repeat([0.4, -0.3] * 500, 8)
    sums_G = thin(groups_R, 1.0, np.random.default_rng(1)).reshape(1000, 8).sum(axis=1)
    assert set(sums_G[::2]) == {3.0, 4.0} and set(sums_G[1::2]) == {-2.0, -3.0}
    assert sums_G.reshape(500, 2).mean(axis=0) == pytest.approx([3.2, -2.4], abs=0.002)


@pytest.mark.parametrize("value", [-0.1, 101, float("nan"), True, "1", None])
def test_what_is_no_number_to_thin_by_is_refused(value):
    with pytest.raises(ValueError, match=r"thin = .*; give a number from 0, which is off, to 100"):
        check_thin(value)
