"""Steps of a run: states by hand, repeats, gaps, bad rows, roll back, checkpoints."""

import dataclasses
import json

import numpy as np
import pytest
from sqlalchemy import event
from store_invariants import check

from openrlhf_dbb.storage import StepRows, StoreError


@pytest.fixture
def run(store, fill):
    return fill.run(store)


def test_states_after_two_steps(store, run, fill):
    a, b, c = fill.prompts(store, 3)
    # Prior (1, 1), discount 0.5, 4 rollouts: a: 4 of 4 -> (0.5 + 4, 0.5 + 0); b: 1 of 4 -> (1.5, 3.5).
    fill.step(run, 1, [a, b], [4, 1])
    # a again, 2 of 4: (2.25 + 2, 0.25 + 2); c for the first time, 0 of 4: (0.5, 4.5).
    fill.step(run, 2, [a, c], [2, 0])
    table = run.load(np.array([c, b, a, c]))
    assert table.state.tolist() == [[0.5, 4.5], [1.5, 3.5], [4.25, 2.25], [0.5, 4.5]]
    assert table.visits.tolist() == [1, 1, 2, 1]
    assert table.step.tolist() == [2, 1, 2, 2]
    assert run.record.last_step == 2
    assert store.find_run("run").last_step == 2


def test_other_state_fields_are_readable_in_sql_and_exact(store, fill):
    run = fill.run(store, fields=("value", "alpha", "speed"))
    ids = np.sort(fill.prompts(store, 2))
    state = np.array([[5e-324, 2.0, 0.1 + 0.2], [-0.0, 5.0, 1.7976931348623157e308]])
    zeros = np.zeros(2)
    for step, values in enumerate((state, -state, state), 1):
        before = run.load(ids)
        run.record_step(step, StepRows(ids, np.array([1, 1]), zeros, zeros, zeros, values, before.state, before.step))
    assert run.load(ids).state.tobytes() == state.tobytes()
    rows = store.query("SELECT alpha, beta, state FROM posterior_history WHERE step = 2 ORDER BY prompt_id")
    assert [tuple(row) for row in rows] == [
        (-2.0, None, "[-5e-324,null,-0.30000000000000004]"), (-5.0, None, "[0.0,null,-1.7976931348623157e308]"),
    ]  # fmt: skip
    fields = store.query("SELECT field, value FROM states WHERE prompt_id = :id ORDER BY field", id=int(ids[0]))
    assert [tuple(row) for row in fields] == [("alpha", 2.0), ("speed", pytest.approx(0.3)), ("value", 5e-324)]
    copy = fill.run(store, "copy", fields=run.record.state_fields)
    copy.warm_start(store, run.record, ids)
    before = copy.load(ids)
    copy.record_step(1, StepRows(ids, np.array([1, 1]), zeros, zeros, zeros, -state, before.state, before.step))
    for of, step, expected in ((run, 2, -state), (copy, 0, state)):  # of an earlier step, and of the warm start
        of.roll_back(step)
        assert of.load(ids).state.tobytes() == expected.tobytes()
    assert check(store) == []


def test_an_estimator_without_state_keeps_visits_and_history(store, fill):
    run = fill.run(store, fields=())
    ids = fill.prompts(store, 2)
    nothing = np.empty((2, 0))
    for step in (1, 2):
        before = run.load(ids)
        run.record_step(
            step,
            StepRows(ids, np.array([4, 4]), np.array([1.0, 2.0]), np.array([0.25, 0.5]),
                     np.array([0.25, 1 / 3]), nothing, nothing, before.step),
        )  # fmt: skip
    table = run.load(ids)
    assert table.state.shape == (2, 0)
    assert table.visits.tolist() == [2, 2]
    rows = store.query("SELECT alpha, mean, variance FROM posteriors ORDER BY prompt_id")
    assert rows == [(None, 0.25, 0.25), (None, 0.5, 1 / 3)]
    assert run.roll_back(1) == 2
    assert run.load(ids).visits.tolist() == [1, 1]


def test_repeating_a_step_changes_nothing_and_must_repeat_its_content(store, run, fill, dump):
    ids = fill.prompts(store, 3)
    rows = fill.step(run, 1, ids, [4, 1, 0])
    before = dump(store)
    run.record_step(1, rows)
    backwards = {name: values[::-1] for name, values in vars(rows).items() if isinstance(values, np.ndarray)}
    run.record_step(1, StepRows(**backwards, usage=rows.usage))
    with pytest.raises(StoreError, match=r"step 1 of run 'run' is already recorded with different .* to step 0"):
        run.record_step(1, dataclasses.replace(rows, successes=rows.successes - 1))
    assert dump(store) == before
    fill.step(run, 2, ids, [4, 1, 0])
    run.record_step(1, rows)  # an old one
    assert run.record.last_step == 2


def _empty(rows):
    return StepRows(**{name: values[:0] for name, values in vars(rows).items() if isinstance(values, np.ndarray)})


@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_gap_is_refused(store, run, fill, dump, step):
    rows = _empty(fill.rows(run, fill.prompts(store, 1), [1]))
    before = dump(store)
    with pytest.raises(StoreError, match=rf"at step 0; the next step is 1, not {step}$"):
        run.record_step(step, rows)
    assert dump(store) == before


def test_a_step_without_prompts_is_a_step(store, run, fill):
    ids = fill.prompts(store, 1)
    run.record_step(1, _empty(fill.rows(run, ids, [1])))
    fill.step(run, 2, ids, [4])
    assert run.load(ids).step.tolist() == [2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt_ids", np.array([1, 1]), "holds prompt 1 more than once"),
        ("state", np.array([[1.0, 2.0], [np.nan, 1.0]]), r"state of prompt 2 is \[nan, 1.0\]; it must be finite"),
        ("previous_step", np.array([0, -1]), "previous_step of prompt 1 is 0, its posterior is of step -1"),
        ("shared", {"prior": np.array([1.0, np.nan])}, "'prior' is .*it must be a vector of finite numbers"),
    ],
)
def test_bad_rows_are_refused_and_leave_nothing(store, run, fill, dump, name, value, message):
    assert fill.prompts(store, 2).tolist() in ([1, 2], [2, 1])
    rows = fill.rows(run, np.array([1, 2]), [1, 1])
    before = dump(store)
    with pytest.raises(StoreError, match=message):
        run.record_step(1, dataclasses.replace(rows, **{name: value}))
    assert dump(store) == before
    run.record_step(1, rows)


VISITS = [([0, 1], [4, 1]), ([0, 2], [2, 0]), ([1, 2], [4, 4]), ([0, 1, 2], [1, 2, 3])]  # prompts, successes


def train_on_everything(run, ids, fill):
    """Four steps with all that a step may have; yields after each."""
    for step, (places, successes) in enumerate(VISITS, start=1):
        seen = ids[places]
        probes = fill.probes(seen, [8] * len(seen), successes)
        shared = {"clock": np.array([float(step)])}
        fill.step(run, step, seen, successes, kept=fill.rollouts(seen, successes), probes=probes, shared=shared)
        run.record_metrics(step, {"kl": step / 10})
        run.record_checkpoint(step, f"step{step}")
        run.record_evaluation(step, "training", [fill.evaluation(seen, successes)], model="tiny", config={})
        yield step


def test_roll_back_restores_each_step_exactly_with_all_that_belongs_to_it(store, run, fill, dump):
    ids, other = np.sort(fill.prompts(store, 3)), fill.run(store, "other")
    fill.step(other, 1, ids, [1, 2, 3], kept=fill.rollouts(ids, [1, 2, 3]), probes=fill.probes(ids[:1], [8], [1]))
    store.record_evaluation("of no step", [fill.evaluation(ids, [1, 2, 3])], model="tiny", config={}, run=run.record)
    states = [_progress(dump(store)), *(_progress(dump(store)) for _ in train_on_everything(run, ids, fill))]
    assert run.roll_back(2) == 5  # 2 rows of step 3, 3 of step 4
    assert _progress(dump(store)) == states[2] and run.record.last_step == 2
    detail = {
        "dbb_history": 5,
        "dbb_step": 2,
        "dbb_checkpoint": 2,
        "dbb_probe": 5,
        "dbb_rollout": 10,
        "dbb_evaluation": 2,
    }
    (event,) = store.query("SELECT kind, from_step, to_step, detail FROM dbb_event")
    assert (event.kind, event.from_step, event.to_step, json.loads(event.detail)) == ("roll_back", 4, 2, detail)
    assert store.checkpoints(run.record) == [(1, "step1"), (2, "step2")]
    assert run.roll_back(2) == 0
    assert run.roll_back(1) == 2
    assert _progress(dump(store)) == states[1]
    table = run.load(ids)
    np.testing.assert_array_equal(table.state, [[4.5, 0.5], [1.5, 3.5], [np.nan, np.nan]])
    assert table.visits.tolist() == [1, 1, 0] and run.load_shared()["clock"].tolist() == [1.0]
    assert run.roll_back(0) == 2
    assert _progress(dump(store)) == states[0] and run.load_shared() is None and check(store) == []
    for _ in train_on_everything(run, ids, fill):  # and the steps can be taken again
        pass
    for table in ("dbb_posterior", "dbb_history", "dbb_probe", "dbb_rollout"):
        assert _progress(dump(store))[table] == states[4][table]
    assert check(store) == []


def _progress(tables):
    """Without the events."""
    return {table: rows for table, rows in tables.items() if table != "dbb_event"}


@pytest.mark.parametrize("step", [3, -1])
def test_roll_back_beyond_the_run_is_refused(store, run, fill, step):
    fill.step(run, 1, fill.prompts(store, 1), [1])
    with pytest.raises(StoreError, match=rf"is at step 1 and cannot go back to step {step};"):
        run.roll_back(step)


def test_a_checkpoint_is_noted_once_and_only_of_a_recorded_step(store, run, fill):
    fill.step(run, 1, fill.prompts(store, 1), [1])
    run.record_checkpoint(1, "best")
    run.record_checkpoint(1, "best")
    with pytest.raises(StoreError, match="run 'run' is at step 1 and cannot record checkpoint 'last' of step 2"):
        run.record_checkpoint(2, "last")
    assert store.checkpoints(run.record) == [(1, "best")]


def test_a_checkpoint_is_durable_and_other_commits_stay_quick(open_new, fill):
    store = open_new("sqlite")
    run = fill.run(store)
    modes = []

    def synchronous(connection):
        modes.append(connection.connection.dbapi_connection.execute("PRAGMA synchronous").fetchone()[0])

    event.listen(store.database.engine, "commit", synchronous)
    fill.step(run, 1, fill.prompts(store, 1), [1])
    run.record_checkpoint(1, "global_step1")
    fill.step(run, 2, fill.prompts(store, 1), [1])
    # SQLite's levels: 1 is NORMAL, 2 is FULL.
    assert modes.count(2) == 1 and set(modes) == {1, 2} and modes[-1] == 1
