"""The plain strategy and dynamic sampling: which groups are trained on, and how many prompts a round asks for."""

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import Decision, RunFacts, get

NAN = np.nan
TRAIN, REPLACE = Decision.TRAIN, Decision.REPLACE


def judge(name, scores, score_range):
    sampler = get(name)().sampler(RunFacts(groups=4, rollouts=2, score_range=score_range))
    assert (sampler.skips(0), sampler.round_size(3)) == (False, 3)
    assert (sampler.state(), sampler.metrics()) == ({}, {})
    return sampler.judge(0, np.array(scores, dtype=float))


ANY, WITHIN = None, (0.25, 0.75)


@pytest.mark.parametrize(
    ("score_range", "scores", "trained"),
    [
        # The known scores vary.
        (ANY, [1, 0, 0], True), (ANY, [1, 1, 1], False), (ANY, [0.1, 0.1, 0.2], True), (ANY, [1, NAN, 0], True),
        (ANY, [NAN, NAN, NAN], False),
        # Their mean is within, the bounds are not.
        (WITHIN, [1, 1, 0, 0], True), (WITHIN, [1, 0, 0, 0], False), (WITHIN, [0.5] * 4, False),
        (WITHIN, [1, 0, NAN, NAN], True),
    ],
)  # fmt: skip
def test_only_dynamic_sampling_replaces_groups_that_do_not_vary_or_whose_mean_is_out_of_range(
    score_range, scores, trained
):
    assert judge("plain", scores, score_range) is TRAIN
    assert judge("dynamic", scores, score_range) is (TRAIN if trained else REPLACE)
