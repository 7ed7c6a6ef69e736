"""Prompts outside the limits rest and come back, by forecasts that are given by hand."""

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import Predictive, RunFacts
from openrlhf_dbb.core.strategies.limit import Limit

FACTS = RunFacts(groups=2, rollouts=4, seed=1)


def forecast(*means, unverified=None):
    alpha = 10 * np.array(means)
    return Predictive(np.arange(1, len(means) + 1), alpha, 10 - alpha, unverified)


def a_pass(sampler, predictive, count):
    """The ids of a pass of so many prompts."""
    return sorted(sampler.next_prompt(lambda: predictive).prompt_id for _ in range(count))


def test_a_prompt_outside_the_limits_rests_and_is_tried_again_every_third_pass():
    sampler = Limit(low=0.1, high=0.8, every=3).sampler(FACTS)
    known = forecast(0.05, 0.5, 0.9, 0.8)
    passes = [a_pass(sampler, known, count) for count in (2, 2, 4, 2, 2, 4)]
    assert passes == [[2, 4], [2, 4], [1, 2, 3, 4], [2, 4], [2, 4], [1, 2, 3, 4]]
    assert sampler.metrics() == {"limit/resting": 0.0}


def test_a_prompt_that_comes_back_within_the_limits_stays():
    sampler = Limit(high=0.8, every=4).sampler(FACTS)
    assert a_pass(sampler, forecast(0.9, 0.5), 1) == [2]
    assert sampler.metrics() == {"limit/resting": 1.0}
    assert a_pass(sampler, forecast(0.7, 0.5), 2) == [1, 2]
    assert a_pass(sampler, forecast(0.9, 0.5), 1) == [2]  # three passes of rest begin anew
    assert a_pass(sampler, forecast(0.9, 0.5), 1) == [2]


def test_a_prompt_without_scores_rests():
    sampler = Limit(every=2).sampler(FACTS)
    assert a_pass(sampler, forecast(0.5, 0.5, unverified=np.array([True, False])), 1) == [2]


def test_where_all_prompts_would_rest_all_are_drawn_and_it_is_said():
    sampler = Limit(high=0.5).sampler(FACTS)
    assert a_pass(sampler, forecast(0.9, 0.8), 2) == [1, 2]
    assert "all are drawn" in sampler.note


def test_limits_that_leave_no_prompt_are_refused():
    with pytest.raises(ValueError, match="no prompt lies between"):
        Limit(low=0.8, high=0.2)
