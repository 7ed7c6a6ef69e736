"""The plain strategy and dynamic sampling: which groups are kept, and how many prompts a round asks for."""

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import DynamicSampling, Sampling, SamplingError

NAN = np.nan


def keeps(sampling, *scores):
    return sampling.keeps(0, np.array(scores, dtype=float))


def generate(sampling, kept, rejected):
    for _ in range(kept):
        assert keeps(sampling, 1, 0)
    for _ in range(rejected):
        assert not keeps(sampling, 0, 0)


def test_the_plain_strategy_keeps_everything_and_skips_nothing():
    sampling = Sampling(4)
    assert all([keeps(sampling, 0, 0), keeps(sampling, 1, 1), keeps(sampling, NAN, NAN)])
    assert (sampling.skips(0), sampling.round_size(3), sampling.replaces) == (False, 3, False)
    assert (sampling.state(), sampling.metrics()) == ({}, {})


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1, 0, 0], True),
        ([1, 1, 1], False),
        ([0, 0, 0], False),
        ([0.1, 0.1, 0.1], False),
        ([0.1, 0.1, 0.2], True),
        ([1, NAN, 0], True),  # what is known of it varies
        ([1, NAN, 1], False),
        ([1, NAN, NAN], False),
        ([NAN, NAN, NAN], False),
    ],
)
def test_groups_that_vary_are_kept(scores, kept):
    assert keeps(DynamicSampling(4, "one_for_one", 3, 10), *scores) is kept


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1, 1, 0, 0], True),
        ([1, 0, 0, 0], False),  # the bounds are not within
        ([1, 1, 1, 0], False),
        ([0.5, 0.5, 0.5, 0.5], False),  # it has to vary, too
        ([1, 0, NAN, NAN], True),  # the mean of what is known
        ([1, 0, 0, NAN], True),
    ],
)
def test_the_mean_score_may_have_to_lie_within_a_range(scores, kept):
    assert keeps(DynamicSampling(4, "one_for_one", 3, 10, within=(0.25, 0.75)), *scores) is kept


def test_one_for_one_asks_for_what_is_missing_without_a_limit():
    sampling = DynamicSampling(4, "one_for_one", multiple=3, max_rounds=1)
    assert (sampling.replaces, sampling.round_size(4)) == (True, 4)
    generate(sampling, kept=1, rejected=100)
    assert sampling.round_size(3) == 3


def test_batches_are_multiples_up_to_a_limit():
    sampling = DynamicSampling(4, "batches", multiple=3, max_rounds=2)
    assert (sampling.replaces, sampling.round_size(4)) == (False, 12)
    generate(sampling, kept=1, rejected=11)
    assert sampling.round_size(3) == 12
    generate(sampling, kept=2, rejected=10)
    with pytest.raises(
        SamplingError,
        match=r"24 groups were generated for one step, 3 of them .* 4 are needed; .* --dynamic.max_rounds",
    ):
        sampling.round_size(1)


def test_a_batch_that_the_end_of_a_pass_cut_short_does_not_count_as_a_whole_one():
    sampling = DynamicSampling(4, "batches", multiple=3, max_rounds=2)
    generate(sampling, kept=0, rejected=5)  # of 12
    assert sampling.round_size(4) == 12
    generate(sampling, kept=3, rejected=9)
    assert sampling.round_size(1) == 24 - 5 - 12
    generate(sampling, kept=0, rejected=7)
    with pytest.raises(SamplingError, match="24 groups were generated"):
        sampling.round_size(1)


def test_the_limit_is_one_of_each_step():
    sampling = DynamicSampling(4, "batches", multiple=1, max_rounds=1)
    generate(sampling, kept=4, rejected=0)
    sampling.end_step()
    assert sampling.round_size(4) == 4


def test_0_rounds_are_no_limit():
    sampling = DynamicSampling(4, "batches", multiple=3, max_rounds=0)
    generate(sampling, kept=0, rejected=1000)
    assert sampling.round_size(4) == 12
