"""Evaluations: written whole, replaced when made again, gone with their steps; held-out accuracy of a run."""

import dataclasses
import functools

import numpy as np
import pytest
from filler import check

from openrlhf_dbb.storage import EvaluationRows, StoreError
from openrlhf_dbb.storage.read import held_out, held_out_prompts

NAN = np.nan


def _rows(ids, benchmark="algebra"):
    """Two evaluation runs of three prompts, four responses each.

    Run 0: 3 of 4 right, most give the right answer; 1 right of 2 verified; none verified.
    Run 1: all 4 right; none right; 2 of 4 right, and two answers tie.
    """
    return EvaluationRows(
        benchmark,
        np.asarray(ids),
        samples=np.full((2, 3), 4),
        verified=np.array([[4, 2, 0], [4, 4, 4]]),
        successes=np.array([[3.0, 1.0, 0.0], [4.0, 0.0, 2.0]]),
        best=np.array([[1.0, 1.0, NAN], [1.0, 0.0, 1.0]]),
        majority=np.array([[1.0, 0.5, NAN], [1.0, 0.0, 0.5]]),
        tokens=np.array([[40, 44, 48], [40, 20, 24]]),
        truncated=np.array([[0, 2, 4], [0, 0, 0]]),
    )


def _evaluate(run, step, *rows, name="training", model="tiny", config=None, **more):
    return run.record_evaluation(step, name, rows, model=model, config=config or {}, **more)


@pytest.fixture
def ids(store, fill):
    return np.sort(fill.prompts(store, 3))


@pytest.fixture
def run(store, fill, ids):
    """A run of two steps of three prompts."""
    run = fill.run(store)
    fill.train(run, ids, (1, 2))
    return run


def test_the_view_holds_the_measures_of_each_benchmark(store, run, ids):
    _evaluate(run, 2, _rows(ids), _rows(ids[::-1], "g\u00e9om\u00e9trie"), generated_total=24)
    row, other = store.query("SELECT * FROM evaluations ORDER BY benchmark")
    assert other.benchmark == "g\u00e9om\u00e9trie"
    # Means over prompts with a verified response in each evaluation run, then over these.
    accuracy = ((3 / 4 + 1 / 2) / 2 + (1 + 0 + 2 / 4) / 3) / 2
    best = ((1 + 1) / 2 + (1 + 0 + 1) / 3) / 2
    majority = ((1 + 0.5) / 2 + (1 + 0 + 0.5) / 3) / 2
    length = (132 / 12 + 84 / 12) / 2
    share = (6 / 12 + 0) / 2  # of missing ones and of truncated ones
    assert tuple(row)[1:9] == (run.record.run_id, 2, "training", "tiny", "algebra", 2, 3, 4)
    assert row[9:15] == pytest.approx((accuracy, best, majority, length, share, share), rel=1e-15)
    assert row.generated_total == 24
    results = store.query(
        "SELECT * FROM evaluation_results WHERE benchmark = 'algebra' ORDER BY repeat, place"
    )
    key = (row.evaluation_id, run.record.run_id, 2, "training", "algebra")
    assert results[1:4] == [
        (*key, 0, 1, ids[1], 4, 2, 1.0, 1.0, 0.5, 44, 2),
        (*key, 0, 2, ids[2], 4, 0, 0.0, None, None, 48, 4),
        (*key, 1, 0, ids[0], 4, 4, 4.0, 1.0, 1.0, 40, 0),
    ]


def test_the_same_evaluation_again_takes_the_place_of_the_first(store, run, ids):
    first = _evaluate(run, 2, _rows(ids), generated_total=24)
    other = _evaluate(run, 1, _rows(ids))
    fewer = dataclasses.replace(_rows(ids, "geometry"), prompt_ids=ids[::-1])
    assert (
        _evaluate(run, 2, fewer, model="larger", config={"n": 4}, generated_total=25)
        == first
        != other
    )
    found = "SELECT evaluation_id, benchmark, prompt_id FROM evaluation_results WHERE repeat = 0 ORDER BY 1, place"
    expected = [(first, "geometry", each) for each in ids[::-1]] + [
        (other, "algebra", each) for each in ids
    ]
    assert store.query(found) == expected
    about = "SELECT model, config, generated_total FROM dbb_evaluation WHERE evaluation_id = :id"
    assert store.query(about, id=first) == [("larger", '{"n": 4}', 25)]
    assert check(store) == []


def test_results_that_do_not_fit_are_refused_and_leave_nothing(store, run):
    rows = dataclasses.replace(_rows([1, 2, 3]), prompt_ids=np.array([1, 2]))
    with pytest.raises(ValueError, match="could not be broadcast"):
        _evaluate(run, 2, _rows([1, 2, 3], "fine"), rows)
    for record in (
        run.record_evaluation,
        functools.partial(store.record_evaluation, run=run.record),
    ):
        with pytest.raises(
            StoreError, match=r"run 'run' is at step 2 and cannot store .*evaluation .* step 3"
        ):
            record(name="training", rows=[_rows([1, 2, 3])], model="tiny", config={}, step=3)
    assert (
        store.query("SELECT * FROM dbb_evaluation")
        == store.query("SELECT * FROM dbb_evaluation_result")
        == []
    )


def test_held_out_accuracy_over_steps(store, fill, run, ids):
    # of 12 responses: 3, 6 and 6 right; 6 is reached first at step 1
    for step, successes in ((0, [1, 2, 0]), (1, [4, 2, 0]), (2, [1, 1, 4])):
        _evaluate(run, step, fill.evaluation(ids, successes))
    found = held_out(store, run.record)
    assert (found.step.tolist(), found.accuracy.tolist(), found.best) == (
        [0, 1, 2],
        [0.25, 0.5, 0.5],
        1,
    )
    assert (found.benchmarks, found.prompts, found.samples) == (1, 3, 4)
    # Again, of two benchmarks, which weigh the same: 1 of 4 on the one prompt of logic; 4 + 0 + 2 and 2 + 2 + 2 of 12
    # in two evaluation runs of sums, which add samples.
    _evaluate(
        run, 2, fill.evaluation(ids, [[4, 0, 2], [2, 2, 2]]), fill.evaluation(ids[:1], [1], "logic")
    )
    found = held_out(store, run.record)
    assert found.accuracy.tolist() == [0.25, 0.5, (0.5 + 0.25) / 2]
    assert (found.benchmarks, found.prompts, found.samples) == (2, 4, 8)


def test_only_what_was_measured_during_this_training_counts(store, fill, run, ids):
    rows = fill.evaluation(ids, [4, 4, 4])
    _evaluate(fill.run(store, "other"), 0, rows)
    _evaluate(run, 1, rows, name="afterwards")
    # Of no step
    store.record_evaluation("training", [rows], model="tiny", config={}, run=run.record)
    assert store.query("SELECT count(*) FROM evaluations WHERE step IS NULL") == [(1,)]
    assert held_out(store, run.record) is None
    assert held_out_prompts(store, run.record, 1) == {}


def test_a_benchmark_without_a_verified_response_has_no_measures_and_its_step_is_left_out(
    store, fill, run, ids
):
    none = np.zeros((1, 3), dtype=int)
    nan = np.full((1, 3), NAN)
    unverified = dataclasses.replace(
        fill.evaluation(ids, [0, 0, 0], "logic"), verified=none, best=nan, majority=nan
    )
    _evaluate(run, 0, fill.evaluation(ids, [4, 4, 4]), unverified)
    found = store.query(
        "SELECT accuracy, best, majority, missing, length FROM evaluations WHERE benchmark = 'logic'"
    )
    assert found == [(None, None, None, 1.0, 10.0)]
    assert check(store) == []
    assert held_out(store, run.record) is None
    _evaluate(run, 1, fill.evaluation(ids, [4, 4, 4]))
    assert held_out(store, run.record).step.tolist() == [1]


def test_held_out_accuracy_of_each_prompt(store, fill, run, ids):
    # A prompt twice, two evaluation runs
    sums = fill.evaluation(ids[[2, 0, 2]], [[4, 1, 0], [2, 3, 0]])
    partly = {"verified": np.array([[2, 0]]), "best": np.array([[1.0, NAN]])}
    logic = dataclasses.replace(fill.evaluation(ids[:2], [1, 0], "logic"), **partly)
    _evaluate(run, 1, sums, logic)
    _evaluate(run, 2, fill.evaluation(ids, [0, 0, 0]))
    found = held_out_prompts(store, run.record, 1)
    by_prompt = {name: [column.tolist() for column in columns] for name, columns in found.items()}
    assert by_prompt == {
        "sums": [[ids[0], ids[2]], [4 / 8, (4 + 2 + 0 + 0) / 16], [[8, 4], [16, 6]]],
        "logic": [
            [ids[0]],
            [1 / 2],
            [[2, 1]],
        ],  # of the verified ones; nothing verified of the other prompt
    }
