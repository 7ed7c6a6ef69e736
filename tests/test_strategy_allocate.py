"""Rollouts by prompt: their numbers by hand, batches of them, and weights with which every prompt counts alike."""

import itertools
import pickle

import numpy as np
import pytest

from openrlhf_dbb.core.filling import Answer, AtOnce, BudgetSpent, Filler, ShuffledPrompts
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.rules import Plan, refusal
from openrlhf_dbb.core.strategies import Predictive, RunFacts
from openrlhf_dbb.core.strategies.allocate import Allocate, allocation
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.estimators import build

FACTS = RunFacts(groups=2, rollouts=4, seed=3)


def forecast(*means, unverified=None):
    """Nearly certain forecasts: E[p (1 - p)] is mean (1 - mean)."""
    alpha = 1e9 * np.array(means)
    return Predictive(np.arange(len(means)), alpha + 1e-9, 1e9 - alpha + 1e-9, unverified)


@pytest.mark.parametrize(
    ("variance", "mean", "least", "most", "expected"),
    [
        # deviations 1 : 2 : 1 of 16 rollouts
        ([1, 4, 1, 0], 4, 0 + 1, 16, [4, 7, 4, 1]),
        ([1, 4, 1], 4, 2, 16, [3, 6, 3]),
        ([1, 1, 1], 5, 2, 8, [5, 5, 5]),
        ([0, 0, 0], 5, 2, 8, [5, 5, 5]),
        # The second may not have more, and the others share what is left, the hopeless one too.
        ([1, 100, 0], 4, 2, 5, [5, 5, 2]),
        ([0, 100, 0], 4, 2, 5, [4, 5, 3]),
        ([1, 9], 2, 2, 8, [2, 2]),
        ([1, 9], 8, 2, 8, [8, 8]),
    ],
)
def test_rollouts_are_in_proportion_to_the_deviation_within_the_limits(
    variance, mean, least, most, expected
):
    found = allocation(np.array(variance, dtype=float), mean, least, most)
    assert found.tolist() == expected


def test_no_other_whole_numbers_have_a_smaller_variance():
    random = np.random.default_rng(5)
    for _ in range(20):
        variance = random.random(4)
        found = allocation(variance, 4, 2, 7)
        others = [n for n in itertools.product(range(2, 8), repeat=4) if sum(n) == 16]
        best = min((variance / np.array(n)).sum() for n in others)
        assert (variance / found).sum() == pytest.approx(best)


def test_a_batch_has_its_budget_and_weights_that_make_prompts_count_alike():
    sampler = Allocate().sampler(FACTS)
    known = forecast(0.5, 0.0)
    batch = sorted(sampler.next_prompt(lambda: known) for _ in range(2))
    assert [(drawn.prompt_id, drawn.rollouts, drawn.weight) for drawn in batch] == [
        (0, 6, 4 / 6), (1, 2, 4 / 2),
    ]  # fmt: skip
    assert sampler.metrics() == {
        "allocate/largest": 6.0, "allocate/variance": pytest.approx(4 / 6, abs=1e-6),
    }  # fmt: skip


def test_a_prompt_without_scores_gets_the_least():
    sampler = Allocate(min=3).sampler(FACTS)
    known = forecast(0.5, 0.5, unverified=np.array([True, False]))
    batch = {
        drawn.prompt_id: drawn.rollouts
        for drawn in (sampler.next_prompt(lambda: known) for _ in range(2))
    }
    assert batch == {0: 3, 1: 5}


def test_each_prompt_comes_once_a_pass_and_never_twice_in_a_batch():
    sampler = Allocate().sampler(RunFacts(groups=3, rollouts=4))
    known = forecast(*[0.5] * 5)
    drawn = [sampler.next_prompt(lambda: known).prompt_id for _ in range(15)]
    batches = [drawn[place : place + 3] for place in range(0, 15, 3)]
    assert all(len(set(batch)) == 3 for batch in batches)
    assert [drawn.count(prompt) for prompt in range(5)] == [3] * 5


def filler(sampler, prompts, known, limit=None):
    asked = []

    def generate(requests):
        asked.append({request.prompt: request.rollouts for request in requests})
        return [
            Answer([request.prompt] * request.rollouts, np.arange(request.rollouts) % 2.0)
            for request in requests
        ]

    made = Filler(
        ShuffledPrompts(range(prompts), 0), AtOnce(generate), sampler,
        predictive=lambda: known, max_rollouts=limit,
    )  # fmt: skip
    return made, asked


def test_the_host_is_asked_for_each_prompts_own_number():
    made, asked = filler(Allocate().sampler(FACTS), 2, forecast(0.5, 0.0))
    batch = made.fill()
    assert asked == [{0: 6, 1: 2}]
    assert made.generated == 8
    sizes = {group.prompt_id: len(group.rollouts) for group in batch.trained}
    assert sizes == {0: 6, 1: 2}
    weights = batch.extras(batch.groups_of_each()).weights
    assert sorted(weights) == [4 / 6] * 6 + [2.0] * 2


@pytest.mark.parametrize("limit", [24, 25, 31])
def test_a_limit_of_rollouts_is_kept_and_used_also_where_a_batch_goes_over_the_end_of_a_pass(limit):
    """Five prompts in batches of two: the third batch begins in one pass and ends in the next one."""
    made, _ = filler(Allocate().sampler(FACTS), 5, forecast(0.5, 0.0, 0.5, 0.0, 0.1), limit)
    batches = 0
    with pytest.raises(BudgetSpent):
        while True:
            batches += made.fill() is not None
    assert (batches, made.generated) == (3, 24)


def test_a_resume_asks_for_waiting_groups_with_their_numbers():
    """The checkpoint lies in a batch of which the pass has given the first prompt alone."""
    known = forecast(0.5, 0.0, 0.5, 0.0, 0.1)

    def sizes(made, count):
        found = []
        while len(found) < count:
            batch = made.fill()
            if batch is not None:
                found.append([(group.prompt_id, len(group.rollouts)) for group in batch.trained])
        return found

    whole, _ = filler(Allocate().sampler(FACTS), 5, known)
    expected = sizes(whole, 6)
    assert all(sum(size for _, size in step) == 8 for step in expected)
    made, _ = filler(Allocate().sampler(FACTS), 5, known)
    sizes(made, 2)
    assert made.fill() is None
    state = pickle.loads(pickle.dumps(made.state()))
    assert len(state["again"]) == 1
    again, _ = filler(Allocate().sampler(FACTS), 5, known)
    again.load(state)
    assert sizes(again, 4) == expected[2:]
    assert again.generated == whole.generated


@pytest.mark.parametrize("form", ["dr_grpo", "group_norm"])
def test_every_prompt_counts_alike_in_a_mean_over_rollouts(store, form):
    """A prompt with 6 rollouts, and one with 2: their shares of the loss are those of equal groups."""
    columns = ["a"] * 6 + ["b"] * 2, ["1"] * 6 + ["2"] * 2
    made, _ = filler(Allocate().sampler(FACTS), 2, forecast(0.5, 0.0))
    batch = made.fill()
    extras = batch.extras(batch.groups_of_each())
    by_prompt = [group.prompt for group, _ in batch.groups_of_each()]
    columns = [["ab"[prompt] for prompt in by_prompt], [str(prompt + 1) for prompt in by_prompt]]
    with Posteriors.create(store, "run", ["a", "b"], ["1", "2"], estimator="point") as posteriors:
        scored = posteriors.observe(1, *columns, [0, 1] * 4, form=form, extras=extras)
        plain = scored.advantages / np.array(extras.weights)
        posteriors.settle()
        counts = store.query("SELECT rollouts FROM posterior_history ORDER BY prompt_id")
    for name in (0, 1):
        is_prompt = np.array(by_prompt) == name
        share = np.abs(scored.advantages[is_prompt]).sum() / 8
        assert share == pytest.approx(np.abs(plain[is_prompt]).mean() / 2)
    assert sorted(counts) == [(2,), (6,)]


def test_limits_without_room_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"allocate\.min = 9 is above allocate\.max = 8"):
        Allocate(min=9, max=8)
    too_many = Plan(build("point"), strategy=Allocate(max=8), group=9)
    assert "9 rollouts a prompt" in refusal(too_many)
    assert "allocate.max = 8; raise it" in refusal(too_many)
    assert "give 3 or more" in refusal(Plan(build("point"), strategy=Allocate(), group=2))
    assert refusal(Plan(build("point"), strategy=Allocate(max=8), group=8)) is None


def test_a_batch_of_more_prompts_than_there_are_is_refused():
    with pytest.raises(RunError, match="a batch of 2 prompts, but only 1"):
        Allocate().sampler(FACTS).next_prompt(lambda: forecast(0.5))
