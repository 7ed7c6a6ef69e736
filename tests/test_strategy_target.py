"""Draws near a target pass rate, by forecasts that are given by hand."""

from collections import Counter

import numpy as np
import pytest

from openrlhf_dbb.core.strategies import Predictive, RunFacts
from openrlhf_dbb.core.strategies.target import Target
from openrlhf_dbb.errors import RunError


def forecast(means, unverified=None):
    alpha = 10 * np.array(means)
    return Predictive(np.arange(len(means)), alpha, 10 - alpha, unverified)


def test_the_target_moves_by_equal_parts_and_then_stays():
    sampler = Target(start=0.8, end=0.2, steps=3).sampler(RunFacts(1, 4))
    targets = []
    for _ in range(5):
        targets.append(sampler.metrics()["target/pass_rate"])
        sampler.end_step()
    assert targets == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])


def test_prompts_are_drawn_in_proportion_to_their_nearness():
    """At distance 0 and one width the values are 1 and exp(-1/2); with a floor of 0.2 of one draw of two prompts."""
    sampler = Target(start=0.5, end=0.5, width=0.2, floor=0.2).sampler(RunFacts(1, 4, seed=3))
    known = forecast([0.5, 0.7])
    far = np.exp(-0.5)
    expected = 0.8 * 1 / (1 + far) + 0.1
    drawn = [sampler.next_prompt(lambda: known) for _ in range(4000)]
    assert {round(each.inclusion, 9) for each in drawn if each.prompt_id == 0} == {
        round(expected, 9)
    }
    share = Counter(each.prompt_id for each in drawn)[0] / 4000
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 4000) ** 0.5)
    assert {each.weight for each in drawn} == {1.0}


def test_a_prompt_without_scores_gets_the_floor_alone():
    sampler = Target(start=0.5, floor=0.2).sampler(RunFacts(1, 4))
    known = forecast([0.5, 0.5], np.array([True, False]))
    drawn = {
        each.prompt_id: each.inclusion
        for each in (sampler.next_prompt(lambda: known) for _ in range(200))
    }
    assert drawn[1] == pytest.approx(0.9)


def test_a_batch_of_more_prompts_than_there_are_is_refused():
    sampler = Target().sampler(RunFacts(3, 4))
    with pytest.raises(RunError, match="a batch of 3 prompts, but only 2"):
        sampler.next_prompt(lambda: forecast([0.5, 0.5]))
