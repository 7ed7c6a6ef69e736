"""The plain strategy and dynamic sampling: which groups are kept, and how many prompts a round asks for."""

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import Decision, RunFacts, SamplingError
from openrlhf_dbb.core.strategies.dynamic import DynamicSampling
from openrlhf_dbb.core.strategies.plain import Plain

NAN = np.nan
TRAIN, DISCARD, REPLACE = Decision.TRAIN, Decision.DISCARD, Decision.REPLACE


def dynamic(refill="one_for_one", multiple=3, max_rounds=10, score_range=None):
    strategy = DynamicSampling(refill=refill, multiple=multiple, max_rounds=max_rounds)
    return strategy.sampler(RunFacts(groups=4, rollouts=2, score_range=score_range))


def judge(sampler, *scores):
    return sampler.judge(0, np.array(scores, dtype=float))


def generate(sampler, accepted, rejected):
    for _ in range(accepted):
        assert judge(sampler, 1, 0) is TRAIN
    for _ in range(rejected):
        assert judge(sampler, 0, 0) is DISCARD


def test_the_plain_strategy_trains_on_everything_and_skips_nothing():
    sampler = Plain().sampler(RunFacts(groups=4, rollouts=2))
    assert {judge(sampler, 0, 0), judge(sampler, 1, 1), judge(sampler, NAN, NAN)} == {TRAIN}
    assert (sampler.rollouts(0), sampler.round_size(3)) == (2, 3)
    assert (sampler.state(), sampler.metrics()) == ({}, {})


@pytest.mark.parametrize(
    ("scores", "trained"),
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
def test_groups_that_vary_are_trained_on(scores, trained):
    assert judge(dynamic(), *scores) is (TRAIN if trained else REPLACE)
    assert judge(dynamic("batches"), *scores) is (TRAIN if trained else DISCARD)


@pytest.mark.parametrize(
    ("scores", "trained"),
    [
        ([1, 1, 0, 0], True),
        ([1, 0, 0, 0], False),  # the bounds are not within
        ([1, 1, 1, 0], False),
        ([0.5, 0.5, 0.5, 0.5], False),  # it has to vary, too
        ([1, 0, NAN, NAN], True),  # the mean of what is known
        ([1, 0, 0, NAN], True),
    ],
)
def test_the_mean_score_may_have_to_lie_within_a_range(scores, trained):
    assert judge(dynamic(score_range=(0.25, 0.75)), *scores) is (TRAIN if trained else REPLACE)


def test_one_for_one_asks_for_what_is_missing_without_a_limit():
    sampler = dynamic(max_rounds=1)
    assert sampler.round_size(4) == 4
    assert judge(sampler, 1, 0) is TRAIN
    assert {judge(sampler, 0, 0) for _ in range(100)} == {REPLACE}
    assert sampler.round_size(3) == 3


def test_batches_are_multiples_up_to_a_limit():
    sampler = dynamic("batches", multiple=3, max_rounds=2)
    assert sampler.round_size(4) == 12
    generate(sampler, accepted=1, rejected=11)
    assert sampler.round_size(3) == 12
    generate(sampler, accepted=2, rejected=10)
    with pytest.raises(
        SamplingError,
        match=r"24 groups were generated for one step, 3 of them .* 4 are needed; .* --dynamic.max_rounds",
    ):
        sampler.round_size(1)


def test_a_batch_that_the_end_of_a_pass_cut_short_does_not_count_as_a_whole_one():
    sampler = dynamic("batches", multiple=3, max_rounds=2)
    generate(sampler, accepted=0, rejected=5)  # of 12
    assert sampler.round_size(4) == 12
    generate(sampler, accepted=3, rejected=9)
    assert sampler.round_size(1) == 24 - 5 - 12
    generate(sampler, accepted=0, rejected=7)
    with pytest.raises(SamplingError, match="24 groups were generated"):
        sampler.round_size(1)


def test_the_limit_is_one_of_each_step():
    sampler = dynamic("batches", multiple=1, max_rounds=1)
    generate(sampler, accepted=4, rejected=0)
    sampler.end_step()
    assert sampler.round_size(4) == 4


def test_0_rounds_are_no_limit():
    sampler = dynamic("batches", multiple=3, max_rounds=0)
    generate(sampler, accepted=0, rejected=1000)
    assert sampler.round_size(4) == 12
