"""Run-wide state: bit for bit, newest first, rolled back and repeated with its step."""

import dataclasses

import numpy as np
import pytest

from storage import StoreError, open_store


def _plain(shared):
    return {name: values.tolist() for name, values in shared.items()}


def test_a_run_begins_without(store, fill):
    assert fill.run(store).load_shared() is None


def test_every_value_comes_back_bit_for_bit(url, fill):
    extremes = np.array([5e-324, 0.1, 0.1 + 0.2, 1e308, np.finfo(float).max, -0.0, 0.0, 1 / 3, 2.0**53 + 2])
    shared = {"prior": extremes, "clock": np.array([7.0]), "nothing": np.empty(0)}
    with open_store(url) as store:
        fill.step(fill.run(store), 1, fill.prompts(store, 1), [1], shared=shared)
    with open_store(url) as store:
        found = store.claim_run(store.find_run("run").run_id).load_shared()
    assert {name: values.tobytes() for name, values in found.items()} == {
        name: values.tobytes() for name, values in shared.items()
    }
    assert {values.dtype for values in found.values()} == {np.dtype(np.float64)}


def test_it_goes_back_with_its_step(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    for step in (1, 2, 3):
        fill.step(run, step, ids, [1], shared={"clock": np.array([float(step)])})
    assert _plain(run.load_shared()) == {"clock": [3.0]}
    run.roll_back(2)
    assert _plain(run.load_shared()) == {"clock": [2.0]}
    run.roll_back(0)
    assert run.load_shared() is None


def test_a_step_without_leaves_it_as_it_was(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.step(run, 1, ids, [1], shared={"clock": np.array([1.0])})
    fill.step(run, 2, ids, [1])
    assert _plain(run.load_shared()) == {"clock": [1.0]}


def test_it_is_of_its_own_run(store, fill):
    one, two = fill.run(store, "one"), fill.run(store, "two")
    ids = fill.prompts(store, 1)
    fill.step(one, 1, ids, [1], shared={"clock": np.array([1.0])})
    fill.step(two, 1, ids, [1])
    assert two.load_shared() is None


def test_people_can_read_it_in_sql(store, fill):
    run = fill.run(store)
    fill.step(run, 1, fill.prompts(store, 1), [1], shared={"prior": np.array([0.1, 2]), "clock": np.array([1])})
    assert store.query("SELECT shared FROM steps") == [('{"clock": [1.0], "prior": [0.1, 2.0]}',)]


def test_it_is_part_of_what_a_repeat_must_repeat(store, fill, dump):
    run = fill.run(store)
    shared = {"a": np.array([1.0]), "b": np.array([2.0])}
    rows = fill.step(run, 1, fill.prompts(store, 1), [1], shared=shared)
    before = dump(store)
    run.record_step(1, dataclasses.replace(rows, shared=dict(reversed(shared.items()))))
    for other in ({}, {"a": np.array([1.0])}, {**shared, "b": np.array([np.nextafter(2, 3)])}):
        with pytest.raises(StoreError, match="step 1 of run 'run' is already recorded with different content"):
            run.record_step(1, dataclasses.replace(rows, shared=other))
    assert dump(store) == before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([1.0, np.nan]), r"step 1: shared\['prior'\]\[1\] is nan; it must be finite"),
        (np.array([-np.inf]), r"step 1: shared\['prior'\]\[0\] is -inf; it must be finite"),
        (np.array(1.0), r"step 1: shared\['prior'\] has shape \(\); it must be a vector"),
        (np.ones((2, 2)), r"step 1: shared\['prior'\] has shape \(2, 2\); it must be a vector"),
    ],
)
def test_what_is_no_finite_vector_is_refused(store, fill, dump, value, message):
    run = fill.run(store)
    rows = fill.rows(run, fill.prompts(store, 1), [1], shared={"prior": value})
    before = dump(store)
    with pytest.raises(StoreError, match=message):
        run.record_step(1, rows)
    assert dump(store) == before
