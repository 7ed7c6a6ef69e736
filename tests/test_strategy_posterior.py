"""Prompts drawn by the posterior: probabilities, draws, weights and group sizes, by hand and on average."""

import dataclasses
import pickle

import numpy as np
import pytest

from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import StepExtras
from openrlhf_dbb.core.strategies import Predictive, RunFacts
from openrlhf_dbb.core.strategies.posterior import (
    PosteriorSampling,
    effective_lift,
    inclusion,
    systematic,
)
from openrlhf_dbb.errors import RunError

FACTS = RunFacts(groups=2, rollouts=2, seed=5)


def predictive(*pairs):
    alpha, beta = np.array(pairs, dtype=float).T
    return Predictive(10 * np.arange(1, len(pairs) + 1), alpha, beta)


def drawn_by(strategy, expected, facts=FACTS, batches=1):
    sampler = strategy.sampler(facts)
    return [sampler.next_prompt(lambda: expected) for _ in range(batches * facts.groups)], sampler


@pytest.mark.parametrize(
    ("value", "batch", "floor", "expected"),
    [  # In proportion: 2 of 4, shares 1/10, 2/10, 3/10, 4/10, none of them above 1 when doubled.
        ([1, 2, 3, 4], 2, 1e-12, [0.2, 0.4, 0.6, 0.8]),
        # Half of the draws to all alike: 0.5 / 4 + 0.5 share, doubled.
        ([1, 2, 3, 4], 2, 0.5, [0.35, 0.45, 0.55, 0.65]),
        # 3 of 4: the two largest would be 1.2 and 0.9; with the first certain the second is 2 * 3/6 = 1, then 1 * 2/3.
        ([1, 2, 3, 4], 3, 1e-12, [1 / 3, 2 / 3, 1, 1]),
        ([1, 2, 3, 4], 4, 0.25, [1, 1, 1, 1]),
        # Nothing is expected to vary: all alike.
        ([0, 0, 0, 0], 1, 0.25, [0.25] * 4),
        # A prompt that cannot vary is drawn with floor * batch / P.
        ([0, 5, 5, 5], 2, 0.2, [0.1, 19 / 30, 19 / 30, 19 / 30]),
    ],
)
def test_inclusion_probabilities_are_in_proportion_to_the_values_above_the_floor_and_sum_to_the_batch(
    value, batch, floor, expected
):
    found = inclusion(np.array(value, dtype=float), batch, floor)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert found.sum() == pytest.approx(batch)


def draw_evenly(sampler):
    """Bring a sampler to even draws: in its first pass the posterior's draws have too few mixed groups."""
    outcomes(sampler, {20, 30, 40}, 4)
    sampler.end_pass()
    assert "drawn evenly" in sampler.note


@pytest.mark.parametrize("evenly", [False, True])
def test_a_prompt_without_any_score_is_drawn_at_the_floor(evenly):
    """Of four prompts the first would vary most; two of them are drawn, a fifth of the draws at the floor."""
    expected = predictive((1, 1), (1, 9), (1, 9), (1, 9))
    expected = dataclasses.replace(expected, unverified=np.array([True, False, False, False]))
    sampler = PosteriorSampling(floor=0.2).sampler(FACTS)
    if evenly:
        draw_evenly(sampler)
    inclusions = {}
    for _ in range(60):
        drawn = sampler.next_prompt(lambda: expected)
        inclusions[drawn.prompt_id] = drawn.inclusion
    assert inclusions == pytest.approx({10: 0.1, 20: 19 / 30, 30: 19 / 30, 40: 19 / 30})


def test_a_systematic_draw_has_its_size_no_prompt_twice_and_each_with_its_probability():
    pi = inclusion(np.array([0.0, 1, 2, 3, 4, 20, 30]), 3, 0.25)
    random = np.random.default_rng(1)
    counts = np.zeros(7)
    draws = 4000
    first = np.zeros(7)
    for _ in range(draws):
        drawn = systematic(pi, random)
        assert len(set(drawn.tolist())) == len(drawn) == 3
        counts[drawn] += 1
        first[drawn[0]] += 1
    # Five standard deviations of a share of 4,000 draws are below 0.04.
    np.testing.assert_allclose(counts / draws, pi, atol=0.04)
    np.testing.assert_allclose(first / draws, pi / 3, atol=0.04)  # in random order


def test_weights_undo_what_the_draw_prefers():
    # E[p (1 - p)]: Beta(1, 1): 1/6, Beta(9, 1): 9/110. Of 3 prompts 2 are drawn.
    expected = predictive((1, 1), (9, 1), (9, 1))
    variance = np.array([1 / 6, 9 / 110, 9 / 110])
    pi = inclusion(np.sqrt(variance), 2, 0.1)
    found, _ = drawn_by(PosteriorSampling(), expected, batches=20)
    assert {each.inclusion for each in found} <= {*inclusion(variance, 2, 0.1).tolist()}
    for power, weights in ((1.0, 2 / (3 * pi)), (0.5, np.sqrt(2 / (3 * pi))), (0.0, np.ones(3))):
        found, _ = drawn_by(PosteriorSampling(power=0.5, weight_power=power), expected, batches=20)
        for each in found:
            at = each.prompt_id // 10 - 1
            assert (each.inclusion, each.weight) == (
                pytest.approx(pi[at]),
                pytest.approx(weights[at]),
            )
        assert len({each.prompt_id for each in found[:2]}) == 2  # of one batch


ONE_VARIES = predictive((1, 1), (1e-300, 1), (1e-300, 1), (1e-300, 1))
"""v = 1/6, 0, 0, 0. Of a batch of two, with floor 1/4, the first is certain, and each other has 1/3."""


def outcomes(sampler, mixed, batches):
    for _ in range(batches):
        batch = [sampler.next_prompt(lambda: ONE_VARIES) for _ in range(2)]
        for drawn in batch:
            sampler.observe(drawn, drawn.prompt_id in mixed)
        sampler.end_step()
    return batch


def resumed_from(sampler):
    resumed = PosteriorSampling(floor=0.25).sampler(FACTS)
    resumed.load(pickle.loads(pickle.dumps(sampler.state())))
    return resumed


@pytest.fixture
def drawn_once():
    """A sampler after the draws of a first pass, one of whose four prompts was mixed: half of the drawn groups."""
    sampler = PosteriorSampling(floor=0.25).sampler(FACTS)
    outcomes(sampler, {10}, 2)
    return sampler


def test_a_pass_is_logged_with_what_even_draws_would_have_given(drawn_once):
    # Weights 1/2 and 3/2: (1/2 + 3/2)^2 / (2 (1/4 + 9/4)) = 4/5. One of four prompts is mixed, half of the drawn.
    logged = {name.partition("/")[2]: value for name, value in drawn_once.metrics().items()}
    assert logged == pytest.approx({"even": 0, "effective": 0.8, "mixed": 0.5, "mixed_even": 0.25})
    drawn_once.end_pass()  # 2 mixed groups, 2 * 1/2 with even draws
    assert drawn_once.note == ""


def test_draws_are_even_while_the_posteriors_draws_would_have_too_few_mixed_groups(drawn_once):
    drawn_once.end_pass()
    outcomes(drawn_once, {20, 30, 40}, 1)  # half of the drawn, 3/2 * 1/2 with even draws
    resumed = resumed_from(drawn_once)
    resumed.end_pass()
    assert "drawn evenly after pass 2" in resumed.note
    assert "0.67 times" in resumed.note
    for drawn in outcomes(resumed, set(), 1):
        assert (drawn.inclusion, drawn.weight) == (0.5, 1)
    resumed.end_pass()  # no mixed group tells nothing
    outcomes(resumed, {10}, 8)
    resumed.end_pass()  # each of these groups would have come twice as often
    assert "drawn by the posterior after pass 4" in resumed.note
    assert "2.00 times" in resumed.note
    inclusions = sorted(drawn.inclusion for drawn in outcomes(resumed, set(), 1))
    assert inclusions == pytest.approx([1 / 3, 1])


def test_the_memory_of_another_models_run_directs_the_draws(store):
    prompts = ["hard", "half", "easy"]
    labels = ["1", "2", "3"]
    memory = {"estimator": "point", "parameters": {"memory": "dbb"}}
    with Posteriors.create(
        store, "large", prompts, labels, model="org/large-7B", **memory
    ) as large:
        rollouts = ["hard"] * 8 + ["half"] * 8 + ["easy"] * 8
        rewards = [0] * 8 + [1, 0] * 4 + [1] * 8
        large.observe(1, rollouts, ["1"] * 8 + ["2"] * 8 + ["3"] * 8, rewards)
        large.finish()
    small = Posteriors.create(
        store, "small", prompts, labels, model="org/small-1B", warm_start="large", **memory
    )
    with small:
        expected = small.predictive()
        ids = [small.prompt_ids[key] for key in zip(prompts, labels, strict=True)]
    # Beta(1, 1) is halved before the 8 rollouts, and all of it before the next visit.
    beliefs = dict(
        zip(
            expected.prompt_ids.tolist(),
            zip(expected.alpha, expected.beta, strict=True),
            strict=True,
        )
    )
    assert [beliefs[number] for number in ids] == [(0.25, 4.25), (2.25, 2.25), (4.25, 0.25)]
    drawn, _ = drawn_by(PosteriorSampling(floor=0.1), expected, batches=200)
    counts = [sum(each.prompt_id == number for each in drawn) for number in ids]
    assert counts[1] > 1.3 * max(counts[0], counts[2])


# Two mixed groups; the forecast's draws have them with 1 and 1/3, even draws with 1/2 each.
BY_FORECAST = [(1.0, 1 / 2, 1.0), (1.0, 3 / 2, 1.0)]
BY_EVEN_DRAWS = [(1.0, 1.0, 2.0), (1.0, 1.0, 2 / 3)]
EQUAL = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("outcomes", "weight_power", "lift"),
    [
        # weights 1/2 and 3/2: worth (1/2 + 3/2)^2 / (1/4 + 9/4) = 1.6 groups, even draws have 2
        (BY_FORECAST, 1, 0.8),
        (BY_FORECAST, 0, 1.0),  # without weights as many as are mixed
        # 2 and 2/3 groups of these weights: (1 + 1)^2 / (1/2 + 3/2) = 2
        (BY_EVEN_DRAWS, 1, 1.0),
        (BY_EVEN_DRAWS, 0, 4 / 3),
        ([EQUAL, *BY_FORECAST, EQUAL], 1, 0.8),
        ([EQUAL], 1, None),
        ([], 1, None),
    ],
)
def test_unequal_weights_make_mixed_groups_worth_less(outcomes, weight_power, lift):
    assert effective_lift(outcomes, weight_power) == (None if lift is None else pytest.approx(lift))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        # X - p is 1/2, -1/2, 1/4
        ("dr_grpo", [1, -1, 1 / 8]),
        # of that the mean with the weights is 1/36; X is 1, 0, 1, its mean 5/9: they still sum to 0
        ("batch_centered", [17 / 18, -19 / 18, 1 / 9]),
        ("batch_mean", [8 / 9, -10 / 9, 2 / 9]),
    ],
)
def test_posteriors_weigh_advantages_and_store_the_probabilities(form, expected, store):
    columns = ["a", "a", "b"], ["1", "1", "2"]
    with Posteriors.create(
        store, "run", *columns, estimator="dbb", parameters={"discount": 0.5}
    ) as posteriors:
        extras = StepExtras(inclusion=[0.25, 0.25, 1.0], weights=[2.0, 2.0, 0.5])
        scored = posteriors.observe(1, *columns, [1, 0, 1], form=form, extras=extras)
        posteriors.settle()
        stored = dict(store.query("SELECT prompt_id, inclusion FROM posterior_history"))
    assert scored.advantages == pytest.approx(expected)
    assert stored == {posteriors.prompt_ids["a", "1"]: 0.25, posteriors.prompt_ids["b", "2"]: 1.0}


def test_a_batch_of_more_prompts_than_there_are_is_refused():
    with pytest.raises(RunError, match="batch of 2 prompts, but only 1 prompts differ; lower"):
        drawn_by(PosteriorSampling(), predictive((1, 1)))
