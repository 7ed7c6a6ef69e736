"""The plain strategy and dynamic sampling: which groups are trained on, and how many prompts a round asks for."""

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import Decision, RunFacts, get

NAN = np.nan
TRAIN, REPLACE = Decision.TRAIN, Decision.REPLACE


def judge(name, *scores, score_range=None):
    sampler = get(name)().sampler(RunFacts(groups=4, rollouts=2, score_range=score_range))
    assert (sampler.skips(0), sampler.round_size(3)) == (False, 3)
    assert (sampler.state(), sampler.metrics()) == ({}, {})
    return sampler.judge(0, np.array(scores, dtype=float))


@pytest.mark.parametrize(
    ("scores", "trained"),
    [
        ([1, 0, 0], True),
        ([1, 1, 1], False),
        ([0.1, 0.1, 0.1], False),
        ([0.1, 0.1, 0.2], True),
        ([1, NAN, 0], True),  # the known scores vary
        ([1, NAN, 1], False),
        ([NAN, NAN, NAN], False),
    ],
)
def test_only_dynamic_sampling_replaces_groups_that_do_not_vary(scores, trained):
    assert judge("plain", *scores) is TRAIN
    assert judge("dynamic", *scores) is (TRAIN if trained else REPLACE)


@pytest.mark.parametrize(
    ("scores", "trained"),
    [
        ([1, 1, 0, 0], True),
        ([1, 0, 0, 0], False),  # the bounds are not within
        ([1, 1, 1, 0], False),
        ([0.5, 0.5, 0.5, 0.5], False),  # it has to vary, too
        ([1, 0, NAN, NAN], True),  # the mean of the known scores
        ([1, 0, 0, NAN], True),
    ],
)
def test_the_mean_score_may_have_to_lie_within_a_range(scores, trained):
    assert judge("dynamic", *scores, score_range=(0.25, 0.75)) is (TRAIN if trained else REPLACE)
