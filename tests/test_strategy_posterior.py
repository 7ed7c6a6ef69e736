"""Prompts drawn by the posterior: probabilities, draws, weights and group sizes, by hand and on average."""

import numpy as np
import pytest

from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import StepExtras
from openrlhf_dbb.core.strategies import Predictive, RunFacts
from openrlhf_dbb.core.strategies.posterior import PosteriorSampling, inclusion, systematic
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
    [
        # In proportion: 2 of 4, shares 1/10, 2/10, 3/10, 4/10, none of them above 1 when doubled.
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
def test_inclusion_probabilities(value, batch, floor, expected):
    found = inclusion(np.array(value, dtype=float), batch, floor)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert found.sum() == pytest.approx(batch)


def test_a_systematic_draw_has_its_size_no_prompt_twice_and_each_with_its_probability():
    pi = inclusion(np.array([0.0, 1, 2, 3, 4, 20, 30]), 3, 0.25)
    random, counts, draws = np.random.default_rng(1), np.zeros(7), 4000
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
    pi = inclusion(np.sqrt(variance), 2, 0.25)
    found, _ = drawn_by(PosteriorSampling(power=1), expected, batches=20)
    assert {each.inclusion for each in found} <= {*inclusion(variance, 2, 0.25).tolist()}
    for power, weights in ((1.0, 2 / (3 * pi)), (0.5, np.sqrt(2 / (3 * pi))), (0.0, np.ones(3))):
        found, _ = drawn_by(PosteriorSampling(weight_power=power), expected, batches=20)
        for each in found:
            at = each.prompt_id // 10 - 1
            assert (each.inclusion, each.weight) == (pytest.approx(pi[at]), pytest.approx(weights[at]))
        assert len({each.prompt_id for each in found[:2]}) == 2  # of one batch


def test_metrics_say_how_far_the_draw_is_from_an_even_one():
    expected = predictive((1, 1), (1, 1), (1, 1), (1, 1))
    _, sampler = drawn_by(PosteriorSampling(), expected)
    assert sampler.metrics() == {
        "posterior/lift": pytest.approx(1), "posterior/certain": 0, "posterior/effective": pytest.approx(1)
    }  # fmt: skip
    # One prompt that varies, three that cannot: v = 1/6, 0, 0, 0. The first is certain, the other of the batch any.
    expected = predictive((1, 1), (1e-300, 1), (1e-300, 1), (1e-300, 1))
    _, sampler = drawn_by(PosteriorSampling(power=1, floor=0.25), expected)
    # Weights 2 / (4 * 1) = 1/2 and 2 / (4 / 3) = 3/2: (1/2 + 3/2)^2 / (2 * (1/4 + 9/4)) = 4 / 5; lift (1/12) / (1/24).
    assert sampler.metrics() == {
        "posterior/lift": pytest.approx(2), "posterior/certain": 0.25, "posterior/effective": pytest.approx(0.8)
    }  # fmt: skip


def test_more_prompts_a_batch_than_there_are():
    with pytest.raises(RunError, match="batch of 2 prompts, but only 1 prompts differ; lower"):
        drawn_by(PosteriorSampling(), predictive((1, 1)))


def test_posteriors_weigh_advantages_and_store_the_probabilities(store):
    prompts, labels = ["a", "b"], ["1", "2"]
    with Posteriors.create(store, "run", prompts, labels, estimator="dbb") as posteriors:
        before = posteriors.predictive()
        # The prior (1, 1), discounted by 0.5.
        assert (before.alpha.tolist(), before.beta.tolist()) == ([0.5, 0.5], [0.5, 0.5])
        rows = (["a", "a", "b"], ["1", "1", "2"], [1, 0, 1])
        extras = StepExtras(inclusion=[0.25, 0.25, 1.0], weights=[2.0, 2.0, 0.5])
        scored = posteriors.observe(1, *rows, form="dr_grpo", extras=extras)
        # a: 1.5 / 3; b: 1.5 / 2.
        assert scored.advantages.tolist() == [1.0, -1.0, 0.125]
        after = posteriors.predictive()  # prompt ids ascend in the order of the prompts
        assert (after.alpha.tolist(), after.beta.tolist()) == ([0.75, 0.75], [0.75, 0.25])
        posteriors.settle()
        stored = dict(store.query("SELECT prompt_id, inclusion FROM posterior_history"))
        assert stored == {posteriors.prompt_ids["a", "1"]: 0.25, posteriors.prompt_ids["b", "2"]: 1.0}
