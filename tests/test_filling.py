"""Batches that are filled by a strategy, without any trainer: prompt i is row i, its label tells the scores."""

import json

import numpy as np
import pytest

from openrlhf_dbb.core import exact_json
from openrlhf_dbb.core.filling import Answer, AtOnce, BudgetSpent, Filler, ShuffledPrompts
from openrlhf_dbb.core.strategies import STRATEGIES, Predictive, RunFacts
from openrlhf_dbb.errors import RunError

N = 4
MIXED = "1010"
LATE = "0010"
EASY = "1111"
HARD = "0000"


class Rows(ShuffledPrompts):
    """In the order of the data, not shuffled."""

    def rest_of_pass(self):
        while self._drawn < len(self):
            self._drawn += 1
            yield self._drawn - 1, self._drawn - 1
        self._drawn = 0


def filler(labels, strategy="two_stage", groups=2, predictive=None, **options):
    """A filler and the requests that its host was asked for, a list of (prompt, rollouts) each time."""
    asked = []

    def generate(requests):
        asked.append([(request.prompt, request.rollouts) for request in requests])
        answers = []
        for request in requests:
            text = labels[request.prompt][request.begun : request.begun + request.rollouts]
            answers.append(Answer([*text], np.array([float(score) for score in text])))
        if not requests:
            raise AssertionError("nothing was asked for")
        return answers

    limit = options.pop("max_rollouts", None)
    sampler = STRATEGIES.build(strategy, **options).sampler(RunFacts(groups, N, seed=1))
    rows = Rows(range(len(labels)), seed=0)
    made = Filler(rows, AtOnce(generate), sampler, predictive=predictive, max_rollouts=limit)
    return made, asked


def prompts(groups):
    return [group.prompt for group in groups]


@pytest.fixture
def two_stages():
    """A filler, what it has asked for, and its batch.

    0 agrees and 2 takes its place, which agrees as well, and so on; LATE's first two agree, too.
    """
    made, asked = filler([EASY, MIXED, HARD, LATE, MIXED])
    return made, asked, made.fill()


def test_two_stages_train_on_whole_groups_and_set_aside_the_first_rollouts_of_others(two_stages):
    _, _, batch = two_stages
    assert prompts(batch.trained) == [1, 4]
    assert ["".join(group.rollouts) for group in batch.trained] == [MIXED, MIXED]
    assert sorted(prompts(batch.filtered)) == [0, 2, 3]
    assert [len(group.rollouts) for group in batch.filtered] == [2, 2, 2]


def test_two_stages_generate_the_rest_of_a_group_only_where_the_first_rollouts_differ(two_stages):
    made, asked, _ = two_stages
    assert made.generated == 3 * 2 + 2 * N
    assert asked[0] == [(0, 2), (1, 2)]
    assert sorted(asked[1]) == [(1, 2), (2, 2)]  # the rest of 1, and 2 in the place of 0
    assert made.sampler.metrics()["two_stage/passed"] == 2 / 5


def test_what_a_step_stores_of_two_stages_is_in_the_order_of_the_rollouts():
    made, _ = filler([EASY, MIXED, MIXED])
    batch = made.fill()
    extras = batch.extras(batch.groups_of_each())
    assert extras.trained.tolist() == [True] * 8 + [False] * 2
    assert (extras.weights, extras.inclusion, extras.policy_versions) == (None, None, None)


def test_a_budget_keeps_what_the_second_stages_of_begun_groups_may_need():
    """18 rollouts: 2 + 2 for the first two, and 2 that differ need 2 more each."""
    made, _ = filler([MIXED, EASY, EASY, EASY, EASY, EASY, MIXED, MIXED], max_rollouts=13)
    with pytest.raises(BudgetSpent):
        for _ in range(9):
            made.fill()
    assert made.generated <= 13


def test_two_stages_give_up_where_first_rollouts_always_agree():
    made, _ = filler([EASY, HARD])
    with pytest.raises(RunError, match="agreed in 20 passes"):
        for _ in range(50):
            made.fill()


@pytest.mark.parametrize("draw", ["even", "posterior"])
def test_a_checkpoint_continues_with_the_same_batches(draw):
    labels = [MIXED, EASY, MIXED, HARD, MIXED, LATE, MIXED, MIXED]
    forecast = Predictive(np.arange(8), np.linspace(1, 4, 8), np.linspace(5, 1, 8))
    options = {"draw": draw, "predictive": (lambda: forecast) if draw == "posterior" else None}

    def batches(made, count):
        found = []
        while len(found) < count:
            batch = made.fill()
            if batch is not None:
                found.append(
                    (prompts(batch.trained), sorted(prompts(batch.filtered)), made.generated)
                )
        return found

    expected = batches(filler(labels, **options)[0], 7)
    stopped, _ = filler(labels, **options)
    batches(stopped, 3)
    state = exact_json.loads(exact_json.dumps(stopped.state(), "the filler's state"))
    json.dumps(stopped.sampler.metrics())
    resumed, _ = filler(labels, **options)
    resumed.load(state)
    assert batches(resumed, 4) == expected[3:]


def test_a_checkpoint_at_the_end_of_a_pass_goes_on_with_the_order_of_the_next_one():
    def made():
        sampler = STRATEGIES.build("dynamic").sampler(RunFacts(2, N, seed=1))
        engine = AtOnce(
            lambda requests: [Answer([*MIXED], np.array([1.0, 0, 1, 0])) for _ in requests]
        )
        return Filler(ShuffledPrompts(range(20), seed=5), engine, sampler)

    def rows_of(filler):
        batch = filler.fill() or filler.fill()
        return prompts(batch.trained)

    whole = made()
    steps = [rows_of(whole) for _ in range(20)]
    assert sorted(np.ravel(steps[:10]).tolist()) == list(range(20)) and steps[10:] != steps[:10]
    for stop in (9, 10, 11):
        stopped = made()
        for _ in range(stop):
            rows_of(stopped)
        if stop == 10:
            assert stopped.fill() is None  # the pass is over
        resumed = made()
        resumed.load(exact_json.loads(exact_json.dumps(stopped.state(), "the filler's state")))
        assert [rows_of(resumed) for _ in range(stop, 20)] == steps[stop:]


def test_draws_by_the_posterior_hear_of_the_prompts_that_were_passed_over():
    """All prompts are drawn with certainty: of five first stages two differ."""
    labels = [EASY, MIXED, HARD, EASY, MIXED]
    forecast = Predictive(np.arange(5), np.ones(5), np.ones(5))
    made, _ = filler(labels, draw="posterior", predictive=lambda: forecast, groups=2)
    batch = made.fill()
    groups = batch.trained + batch.filtered
    assert {group.drawn.prompt_id for group in batch.trained} <= {1, 4}
    mixed = 2 / len(groups)
    assert made.sampler.metrics()["posterior/mixed"] == pytest.approx(mixed)


def test_shuffled_prompts_come_once_a_pass_and_continue_from_a_place():
    rows = ShuffledPrompts([10, 11, 12, 10], seed=3)
    assert rows.by_id == {10: 0, 11: 1, 12: 2}
    whole = list(rows.rest_of_pass())
    assert sorted(row for _, row in whole) == [0, 1, 2, 3]
    assert all(prompt_id == [10, 11, 12, 10][row] for prompt_id, row in whole)
    second = list(rows.rest_of_pass())
    assert second != whole
    other = ShuffledPrompts([10, 11, 12, 10], seed=3)
    rest = other.rest_of_pass()
    begun = [next(rest), next(rest)]
    third = ShuffledPrompts([10, 11, 12, 10], seed=3)
    third.go_to(other.place())
    assert begun + list(third.rest_of_pass()) + list(third.rest_of_pass()) == whole + second
