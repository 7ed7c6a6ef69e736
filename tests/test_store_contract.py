"""The contract of a store, on SQLite and PostgreSQL: prompts, steps, what goes with a step, warm starts."""

import dataclasses
import json

import numpy as np
import pytest
from sqlalchemy import event
from store_invariants import check

from openrlhf_dbb.storage import (
    ProbeRows,
    RolloutRows,
    StepRows,
    StoreError,
    open_store,
    read_log,
    read_probes,
)
from openrlhf_dbb.storage.read import kept_rollouts, progress, prompt_history

NAN = float("nan")
HOSTILE = "NUL \0, </script><b>HTML</b>, \u202e and \u00fcnicode \U0001f600"
PAIRS = [("sqlite", None), ("postgresql", None), ("sqlite", "postgresql"), ("postgresql", "sqlite")]


@pytest.fixture
def run(store, fill):
    return fill.run(store)


@pytest.fixture
def ids(store, fill):
    return np.sort(fill.prompts(store, 3))


# ---- prompts


def test_ids_follow_the_order_given_and_repeat_for_equal_prompts(store):
    ids = store.register_prompts(["b", "a", "b", "b"], ["1", "1", "1", "2"])
    assert ids.dtype == np.int64
    assert ids[0] == ids[2]
    assert len({*ids.tolist()}) == 3
    again = store.register_prompts(["a", "new", "b"], ["1", "", "2"])
    assert again[0] == ids[1] and again[2] == ids[3] and again[1] not in ids
    rows = store.query("SELECT prompt_id, prompt, label FROM prompts ORDER BY prompt_id")
    assert {tuple(row) for row in rows} == {
        (ids[0], "b", "1"), (ids[1], "a", "1"), (ids[3], "b", "2"), (again[1], "new", ""),
    }  # fmt: skip


def test_more_prompts_than_fit_in_one_statement(store):
    texts = [f"prompt {i}" for i in range(10_123)]
    ids = store.register_prompts(texts, [""] * len(texts))
    assert len(np.unique(ids)) == len(texts)
    assert store.register_prompts(texts[::-1], [""] * len(texts)).tolist() == ids[::-1].tolist()
    few = store.register_prompts([texts[7], "new", texts[3]], [""] * 3)  # looked up one by one
    assert few[[0, 2]].tolist() == ids[[7, 3]].tolist() and few[1] == ids.max() + 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("nul \0 in it", "nul \ufffd in it"),
        ("half a pair \ud83d", "half a pair \ufffd"),
        (
            "emoji \U0001f600, \u4e2d\u6587, \x1b[31m, 'quoted', \\",
            "emoji \U0001f600, \u4e2d\u6587, \x1b[31m, 'quoted', \\",
        ),
    ],
)
def test_texts_no_database_can_hold_are_replaced_but_keep_their_identity(store, given, kept):
    ids = store.register_prompts([given, kept], [given, kept])
    assert (ids[0] == ids[1]) == (given == kept)
    rows = store.query("SELECT prompt, label FROM prompts WHERE prompt_id = :id", id=int(ids[0]))
    assert [tuple(row) for row in rows] == [(kept, kept)]


# ---- steps


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


# ---- what goes with a step


def _probes(ids):
    return ProbeRows(ids[:2], np.array([8, 4]), np.array([3.0, 2.0]), np.array([3.0, 2.0]))


def _kept(ids):
    """Two of prompt 1, one of prompt 0 that could not be verified; not in order."""
    return RolloutRows(
        prompt_ids=ids[[1, 0, 1]],
        sample=np.array([3, 0, 1]),
        reward=np.array([0.5, NAN, 1.0]),
        score=np.array([1.0, NAN, 1.0]),
        advantage=np.array([-0.25, 0.0, 0.75]),
        length=np.array([7, 0, 9]),
        truncated=np.array([1.0, NAN, 0.0]),
        log_prob=np.array([-3.5, NAN, -2.25]),
        text=["long", "", HOSTILE],
        read=["7", None, HOSTILE],
    )


def _read(store, run, step):
    query = "SELECT * FROM rollouts WHERE run_id = :run AND step = :step ORDER BY prompt_id, sample"
    return [row._mapping for row in store.query(query, run=run.record.run_id, step=step)]


def _lists(log):
    return {name: values.tolist() for name, values in vars(log).items()}


def test_the_log_is_ordered_by_step_then_prompt(store, run, ids, fill, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.CHUNK", 3)
    other, (a, b, c) = fill.run(store, "other"), ids.tolist()
    fill.step(run, 1, [b, a], [1, 4])  # b (1.5, 3.5); a (4.5, 0.5)
    fill.step(other, 1, [a], [0])
    fill.step(run, 2, [c, a], [0, 2], policy_version=np.array([NAN, 0.25]))  # c (0.5, 4.5); a (4.25, 2.25)
    log = read_log(store, run.record)
    assert _lists(log) == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "rollouts": [4, 4, 4, 4],
        "successes": [4.0, 1.0, 2.0, 0.0],
        "mean": [0.9, 0.3, 4.25 / 6.5, 0.1],
        "variance": [0.9 * (1 - 0.9), 0.3 * (1 - 0.3), 4.25 / 6.5 * (1 - 4.25 / 6.5), 0.1 * (1 - 0.1)],
        "lag": [0.0, 0.0, 0.75, 0.0],
        "alpha": [4.5, 1.5, 4.25, 0.5],
        "beta": [0.5, 3.5, 2.25, 4.5],
    }
    assert [values.dtype.name for values in vars(log).values()] == ["int64"] * 3 + ["float64"] * 6
    assert [(row["step"], row["alpha"], row["lag"]) for row in prompt_history(store, run.record, a)] == [
        (1, 4.5, 0.0), (2, 4.25, 0.75),
    ]  # fmt: skip


def test_probes_come_with_the_estimate_of_their_step_and_are_no_training_rollouts(store, run, ids, fill):
    plain, (a, b, c) = fill.run(store, "plain"), ids.tolist()
    # c is probed but not trained on: there is no estimate to compare with.
    probes = [fill.probes([b, a], [16, 8], [4, 7.5], [4, 7.25]), fill.probes([c, a], [8, 8], [0, 5])]
    for step, trained in ((1, [a, b]), (2, [a])):
        fill.step(run, step, trained, [4, 1][: len(trained)], probes=probes[step - 1])
        fill.step(plain, step, trained, [4, 1][: len(trained)])
    found = _lists(read_probes(store, run.record))
    assert np.isnan([found["mean"].pop(), found["variance"].pop()]).all()
    assert found == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "samples": [8, 16, 8, 8],
        "successes": [7.5, 4.0, 5.0, 0.0],
        "squares": [7.25, 4.0, 5.0, 0.0],
        "mean": [0.9, 0.3, 6.25 / 6.5],
        "variance": [0.9 * (1 - 0.9), 0.3 * (1 - 0.3), 6.25 / 6.5 * (1 - 6.25 / 6.5)],
    }
    totals = [progress(store, each.record) for each in (run, plain)]
    assert [(one.pop("probes"), one.pop("samples"), one.pop("last_step_at")[:2]) for one in totals] == [
        (4, 40, "20"), (0, 0, "20"),
    ]  # fmt: skip
    assert totals[0] == totals[1]
    assert run.load(ids[:2]).state.tolist() == plain.load(ids[:2]).state.tolist()


def test_kept_rollouts_are_read_as_written(store, run, ids, fill):
    kept = dataclasses.replace(_kept(ids), policy_version=np.array([0.0, NAN, 0.5]))
    fill.step(run, 1, ids, [1, 2, 3])
    fill.step(run, 2, ids, [1, 2, 3], kept=kept)
    names = ("prompt_id", "sample", "reward", "score", "advantage", "length", "truncated", "missing", "log_prob", "lag")
    found = _read(store, run, 2)
    assert [tuple(row[name] for name in names) for row in found] == [
        (ids[0], 0, None, None, 0.0, 0, None, 1, None, 0.0),
        (ids[1], 1, 1.0, 1.0, 0.75, 9, 0, 0, -2.25, 0.5),
        (ids[1], 3, 0.5, 1.0, -0.25, 7, 1, 0, -3.5, 1.0),
    ]
    assert [row["text"] for row in found] == ["", HOSTILE.replace("\0", "\ufffd"), "long"]
    assert [row["read"] for row in found] == [None, HOSTILE.replace("\0", "\ufffd"), "7"]


def test_kept_rollouts_come_with_the_posterior_before_and_after(store, run, ids, fill):
    fill.step(run, 1, ids[:1], [4])  # (4.5, 0.5)
    fill.step(run, 2, ids[:2], [2, 0], kept=fill.rollouts(ids[:2], [1, 0]))  # (4.25, 2.25), (0.5, 4.5)
    rows = kept_rollouts(store, run.record, 2, limit=3)
    assert list(rows[0]) == [
        "prompt", "label", "response", "read", "score", "reward", "advantage", "visits", "alpha_before", "beta_before",
        "mean_before", "alpha", "beta", "mean",
    ]  # fmt: skip
    again, first = (2, 4.5, 0.5, 0.9, 4.25, 2.25, 4.25 / 6.5), (1, None, None, None, 0.5, 4.5, 0.1)
    assert [tuple(row.values())[2:] for row in rows] == [
        ("answer 0", None, 1, 1, 0.5, *again), ("answer 1", None, 0, 0, -0.5, *again),
        ("answer 0", None, 0, 0, -0.5, *first),
    ]  # fmt: skip


def test_usage_is_stored_step_by_step_and_summed(store, run, ids, fill):
    fill.step(run, 1, ids, [4, 0, 2], usage=fill.usage(ids, [4, 0, 2], trained=4, trained_tokens=40))
    fill.step(run, 2, ids, [1, 1, 1], usage=None)
    fill.step(run, 3, ids[:1], [1])
    columns = "step, generated, generated_total, trained, filtered, zero_variance, replayed, groups"
    assert store.query(f"SELECT {columns} FROM steps ORDER BY step") == [
        (1, 12, 12, 4, 8, 8, 6, 3), (2, None, 12, None, None, None, None, None), (3, 4, 16, 4, 0, 0, 1, 1),
    ]  # fmt: skip
    run.finish(unused_rollouts=3)
    totals = progress(store, run.record)
    assert [totals[name] for name in ("generated", "trained", "filtered", "zero_variance", "replayed", "groups")] == [
        16, 8, 8, 8, 7, 4,
    ]  # fmt: skip
    assert totals["unused_rollouts"] == 3


def test_run_wide_state_comes_back_bit_for_bit(url, fill):
    values = np.array([5e-324, 0.1, 0.1 + 0.2, 1e308, np.finfo(float).max, -0.0, 0.0, 1 / 3, 2.0**53 + 2])
    shared = {"prior": values, "clock": np.array([7.0]), "nothing": np.empty(0)}
    with open_store(url) as store:
        run = fill.run(store)
        assert run.load_shared() is None
        fill.step(run, 1, fill.prompts(store, 1), [1], shared=shared)
        fill.step(run, 2, fill.prompts(store, 1), [1])  # a step without leaves it as it was
    with open_store(url) as store:
        found = store.claim_run(store.find_run("run").run_id).load_shared()
    assert {name: vector.tobytes() for name, vector in found.items()} == {
        name: vector.tobytes() for name, vector in shared.items()
    }


CONTENT = {
    "probes": (_probes, lambda ids: dataclasses.replace(_probes(ids), squares=np.array([3.0, 1.5]))),
    "kept": (_kept, lambda ids: dataclasses.replace(_kept(ids), text=["long", "", "other"])),
    "shared": (lambda ids: {"a": np.array([2.0])}, lambda ids: {"a": np.array([np.nextafter(2, 3)])}),
    "policy_version": (lambda ids: np.array([0.0, 0.0, 0.0]), lambda ids: np.array([0.0, 0.0, NAN])),
}


@pytest.mark.parametrize("name", CONTENT)
def test_a_repeat_writes_nothing_twice_and_must_repeat_everything(store, run, ids, fill, dump, name):
    same, other = (make(ids) for make in CONTENT[name])
    rows = fill.step(run, 1, ids, [1, 2, 3], **{name: same})
    before = dump(store)
    run.record_step(1, rows)
    for changed in (other, {} if name == "shared" else None):
        with pytest.raises(StoreError, match=r"step 1 of run 'run' is already recorded with different content"):
            run.record_step(1, dataclasses.replace(rows, **{name: changed}))
    assert dump(store) == before


def test_metrics_are_numbers_with_seven_digits(store, run, ids, fill):
    with pytest.raises(StoreError, match="metrics are of step 1, run 'run' is at step 0; record the step first"):
        run.record_metrics(1, {"kl": 0.1})
    fill.step(run, 1, ids, [1, 2, 3])
    metrics = {"z": np.float32(1 / 3), "a": 12345678, "bad": float("inf"), "text": "no", "none": None, "flag": True}
    for _ in range(2):  # the acknowledgement may be lost
        run.record_metrics(1, metrics)
    assert store.query("SELECT metrics FROM steps") == [
        ('{"a": 12345680.0, "bad": null, "flag": 1.0, "z": 0.3333333}',)
    ]


# ---- warm starts


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1] or 'itself'}")
def two_stores(request, open_new):
    """Source and target store; the same one if the pair names no target."""
    source = open_new(request.param[0])
    return source, open_new(request.param[1]) if request.param[1] else source


def test_shared_prompts_take_over_their_posteriors(two_stores, fill):
    source_store, store = two_stores
    source = fill.run(source_store, "old", dataset="A")
    a, b, _ = source_store.register_prompts(["p", "q", "r"], ["1", "2", "3"])
    fill.step(source, 1, [a, b], [4, 1])  # (4.5, 0.5), (1.5, 3.5)
    fill.step(source, 2, [a], [4])  # (6.25, 0.25)
    run = fill.run(store, "new", dataset="B")
    # Another order and other ids; "q" with another label is another prompt; "r" was never trained on.
    ids = store.register_prompts(["new", "r", "q", "q", "p"], ["0", "3", "other", "2", "1"])
    outcome = run.warm_start(source_store, source.record, ids, weight=0.5)
    assert (outcome.matched, outcome.unmatched) == (2, 3)
    assert outcome.source.name == "old" and outcome.source.last_step == 2
    table = run.load(ids)
    nan = np.nan
    np.testing.assert_array_equal(table.state, [[nan, nan], [nan, nan], [nan, nan], [0.75, 1.75], [3.125, 0.125]])
    assert table.step.tolist() == [-1, -1, -1, 0, 0]
    assert table.visits.tolist() == [0] * 5
    parent = {"name": "old", "uuid": source.record.uuid, "step": 2, "weight": 0.5, "database": source_store.location}
    assert run.record.parent == parent
    assert store.find_run("new").parent == parent
    (event,) = store.query("SELECT kind, detail FROM dbb_event WHERE run_id = :run", run=run.record.run_id)
    assert event.kind == "warm_start" and '"matched": 2, "unmatched": 3' in event.detail
    # the source is as it was
    assert source_store.find_run("old").parent is None
    assert source.load(np.array([a])).state.tolist() == [[6.25, 0.25]]


def test_the_run_wide_state_comes_along_and_a_roll_back_to_the_start_restores_the_warm_start(two_stores, fill):
    source_store, store = two_stores
    source = fill.run(source_store, "old")
    fill.step(source, 1, fill.prompts(source_store, 1), [4], shared={"prior": np.array([0.1 + 0.2, 2.0])})
    fill.step(source, 2, fill.prompts(source_store, 1), [4], shared={"prior": np.array([5e-324, 3.0])})
    run = fill.run(store, "new")
    ids = fill.prompts(store, 2)
    run.warm_start(source_store, source.record, ids)
    assert _lists_of(run.load_shared()) == {"prior": [5e-324, 3.0]}
    third = fill.run(store, "third")
    third.warm_start(store, run.record, ids)  # of a source that never changed it
    assert _lists_of(third.load_shared()) == {"prior": [5e-324, 3.0]}
    # 4 of 4 twice: (4.5, 0.5), (6.25, 0.25); then none: (3.125, 4.125), and (0.5, 4.5) from the prior
    fill.step(run, 1, ids, [0, 0], shared={"prior": np.array([1.0, 1.0])})
    assert run.load(ids).state.tolist() == [[3.125, 4.125], [0.5, 4.5]]
    assert _lists_of(run.load_shared()) == {"prior": [1.0, 1.0]}
    assert run.roll_back(0) == 2
    table = run.load(ids)
    np.testing.assert_array_equal(table.state, [[6.25, 0.25], [np.nan, np.nan]])
    assert (table.step.tolist(), table.visits.tolist()) == ([0, -1], [0, 0])
    assert _lists_of(run.load_shared()) == {"prior": [5e-324, 3.0]}


def _lists_of(shared):
    return {name: values.tolist() for name, values in shared.items()}


def test_only_a_new_run_can_be_warm_started(store, fill):
    source = fill.run(store, "old")
    ids = fill.prompts(store, 2)
    fill.step(source, 1, ids, [4, 4])
    run = fill.run(store, "new")
    run.warm_start(store, source.record, ids)
    with pytest.raises(StoreError, match=r"'new' has posteriors \(step 0\); only a new run"):
        run.warm_start(store, source.record, ids)
    trained = fill.run(store, "trained")
    fill.step(trained, 1, ids, [1, 1])
    with pytest.raises(StoreError, match=r"'trained' has posteriors \(step 1\)"):
        trained.warm_start(store, source.record, ids)


def test_states_that_do_not_fit_are_refused(store, fill):
    ids = fill.prompts(store, 1)
    dbb, value = fill.run(store, "dbb"), fill.run(store, "value", fields=("value",))
    with pytest.raises(StoreError, match=r"'dbb' keeps \['alpha', 'beta'\] .*'value' needs \['value'\]"):
        value.warm_start(store, dbb.record, ids)
    with pytest.raises(StoreError, match="only alpha and beta can be weighted; use weight 1"):
        fill.run(store, "value 2", fields=("value",)).warm_start(store, value.record, ids, weight=0.5)
    newer = fill.run(store, "newer", estimator_version=2)
    with pytest.raises(StoreError, match=r"version 1\), run 'newer' needs .*, version 2\); name a run with"):
        newer.warm_start(store, dbb.record, ids)
