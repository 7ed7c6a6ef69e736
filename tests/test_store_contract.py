"""The contract of a store, on SQLite and PostgreSQL: prompts, steps, what goes with a step, warm starts."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from filler import check
from sqlalchemy import event

from openrlhf_dbb.storage import (
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


@pytest.fixture
def run(store, fill):
    return fill.run(store)


@pytest.fixture
def ids(store, fill):
    return np.sort(fill.prompts(store, 3))


# ---- prompts


def test_ids_follow_the_order_given_and_repeat_for_equal_prompts(store):
    b1, a1, again, b2 = store.register_prompts(["b", "a", "b", "b"], ["1", "1", "1", "2"])
    assert again == b1 and len({b1, a1, b2}) == 3
    found = store.register_prompts(["a", "new", "b"], ["1", "", "2"])
    assert found.dtype == np.int64 and found[[0, 2]].tolist() == [a1, b2]
    assert set(store.query("SELECT prompt_id, prompt, label FROM prompts")) == {
        (b1, "b", "1"), (a1, "a", "1"), (b2, "b", "2"), (found[1], "new", ""),
    }  # fmt: skip


def test_more_prompts_than_fit_in_one_statement(store):
    texts = [f"prompt {i}" for i in range(10_123)]
    ids = store.register_prompts(texts, [""] * len(texts))
    assert len(np.unique(ids)) == len(texts)
    assert store.register_prompts(texts[::-1], [""] * len(texts)).tolist() == ids[::-1].tolist()
    few = store.register_prompts([texts[7], "new", texts[3]], [""] * 3)  # looked up one by one
    assert few[[0, 2]].tolist() == ids[[7, 3]].tolist() and few[1] == ids.max() + 1


EXOTIC = "emoji \U0001f600, \u4e2d\u6587, \x1b[31m, 'quoted', \\"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("nul \0 in it", "nul \ufffd in it"),
        ("half a pair \ud83d", "half a pair \ufffd"),
        (EXOTIC, EXOTIC),
    ],
)
def test_texts_no_database_can_hold_are_replaced_but_keep_their_identity(store, given, kept):
    ids = store.register_prompts([given, kept], [given, kept])
    assert (ids[0] == ids[1]) == (given == kept)
    assert store.query(
        "SELECT prompt, label FROM prompts WHERE prompt_id = :id", id=int(ids[0])
    ) == [(kept, kept)]


# ---- steps


def test_other_state_fields_are_readable_in_sql_and_exact(store, ids, fill):
    run = fill.run(store, fields=("value", "alpha", "speed"))
    state = np.array([[5e-324, 2.0, 0.1 + 0.2], [-0.0, 5.0, 1.7976931348623157e308]])
    ids = ids[:2]
    zeros = np.zeros(2)

    def take(run, step, after):
        before = run.load(ids)
        run.record_step(
            step,
            StepRows(ids, np.array([1, 1]), zeros, zeros, zeros, after, before.state, before.step),
        )

    for step, after in enumerate((state, -state, state), 1):
        take(run, step, after)
    assert run.load(ids).state.tobytes() == state.tobytes()
    assert store.query("SELECT alpha, beta, state FROM posterior_history WHERE step = 2 ORDER BY prompt_id") == [
        (-2.0, None, "[-5e-324,null,-0.30000000000000004]"), (-5.0, None, "[0.0,null,-1.7976931348623157e308]"),
    ]  # fmt: skip
    fields = store.query(
        "SELECT field, value FROM states WHERE prompt_id = :id ORDER BY field", id=int(ids[0])
    )
    assert fields == [("alpha", 2.0), ("speed", pytest.approx(0.3)), ("value", 5e-324)]
    copy = fill.run(store, "copy", fields=run.record.state_fields)
    copy.warm_start(store, run.record, ids)
    take(copy, 1, -state)
    for of, step, expected in (
        (run, 2, -state),
        (copy, 0, state),
    ):  # of an earlier step, and of the warm start
        of.roll_back(step)
        assert of.load(ids).state.tobytes() == expected.tobytes()
    assert check(store) == []


def test_an_estimator_without_state_keeps_visits_and_history(store, ids, fill):
    run = fill.run(store, fields=())
    nothing = np.empty((3, 0))
    mean = np.array([0.25, 0.5, 1])
    variance = np.array([0.25, 1 / 3, 0])
    for step in (1, 2):
        rows = StepRows(
            ids, np.full(3, 4), 4 * mean, mean, variance, nothing, nothing, run.load(ids).step
        )
        run.record_step(step, rows)
    assert run.load(ids).state.shape == (3, 0)
    assert store.query("SELECT alpha, mean, variance, visits FROM posteriors ORDER BY prompt_id") == [
        (None, 0.25, 0.25, 2), (None, 0.5, 1 / 3, 2), (None, 1, 0, 2),
    ]  # fmt: skip
    assert run.roll_back(1) == 3
    assert store.query("SELECT DISTINCT visits FROM posteriors") == [(1,)]


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


def test_repeating_a_step_changes_nothing_and_must_repeat_its_content(store, run, ids, fill):
    probes = fill.probes(ids[:2], [8, 4], [3, 2])
    kept = _kept(ids)
    shared = {"a": np.array([2.0])}
    rows = fill.rows(
        run, ids, [4, 1, 0], probes=probes, kept=kept, shared=shared, policy_version=np.zeros(3)
    )
    run.record_step(1, rows)
    before = fill.dump(store)
    backwards = {
        name: values[::-1] for name, values in vars(rows).items() if isinstance(values, np.ndarray)
    }
    for again in (rows, dataclasses.replace(rows, **backwards)):
        run.record_step(1, again)
    for other in (
        {"successes": np.array([4.0, 1.0, 1.0])},
        {"probes": fill.probes(ids[:2], [8, 4], [3, 2], [3, 1.5])},
        {"kept": dataclasses.replace(kept, text=["long", "", "other"])},
        {"shared": {"a": np.array([np.nextafter(2, 3)])}},
        {"policy_version": np.array([0.0, 0.0, NAN])},
    ):
        with pytest.raises(StoreError, match=r"step 1 of run 'run' .*different .* to step 0"):
            run.record_step(1, dataclasses.replace(rows, **other))
    assert fill.dump(store) == before
    fill.step(run, 2, ids, [4, 1, 0])
    run.record_step(1, rows)  # an old one
    assert run.record.last_step == 2


def test_a_step_without_prompts_is_a_step_and_a_gap_is_refused(store, run, ids, fill):
    rows = fill.rows(run, ids[:0], [])
    before = fill.dump(store)
    for step in (0, 2, -1):
        with pytest.raises(StoreError, match=rf"at step 0; the next step is 1, not {step}$"):
            run.record_step(step, rows)
    assert fill.dump(store) == before
    run.record_step(1, rows)
    fill.step(run, 2, ids, [1, 2, 3])
    assert run.load(ids).step.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "state",
            np.array([[1.0, 2.0], [np.nan, 1.0]]),
            r"state of prompt 2 is \[nan, 1.0\]; it must be finite",
        ),
        (
            "previous_step",
            np.array([0, -1]),
            "previous_step of prompt 1 is 0, its posterior is of step -1",
        ),
        ("shared", {"prior": np.array([1.0, np.nan])}, "'prior' is .*it must be finite"),
    ],
)
def test_bad_rows_are_refused_and_leave_nothing(store, run, fill, name, value, message):
    rows = fill.rows(run, np.sort(fill.prompts(store, 2)), [1, 1])
    before = fill.dump(store)
    with pytest.raises(StoreError, match=message):
        run.record_step(1, dataclasses.replace(rows, **{name: value}))
    assert fill.dump(store) == before
    run.record_step(1, rows)


VISITS = [
    ([0, 1], [4, 1]),
    ([0, 2], [2, 0]),
    ([1, 2], [4, 4]),
    ([0, 1, 2], [1, 2, 3]),
]  # prompts, successes


def train_on_everything(run, ids, fill):
    """Four steps with all that a step may have; yields after each."""
    for step, (places, successes) in enumerate(VISITS, start=1):
        seen = ids[places]
        probes = fill.probes(seen, [8] * len(seen), successes)
        shared = {"clock": np.array([float(step)])}
        fill.step(
            run,
            step,
            seen,
            successes,
            kept=fill.rollouts(seen, successes),
            probes=probes,
            shared=shared,
        )
        run.record_metrics(step, {"kl": step / 10})
        for _ in range(2):  # the acknowledgement may be lost
            run.record_checkpoint(step, f"step{step}")
        run.record_evaluation(
            step, "training", [fill.evaluation(seen, successes)], model="tiny", config={}
        )
        yield step


def without_events(store, fill):
    """All rows of all tables but those of the log of events."""
    tables = fill.dump(store)
    del tables["dbb_event"]
    return tables


@pytest.fixture
def states(store, run, ids, fill):
    """The tables before and after each of four steps with all that a step may have, beside another run."""
    other = fill.run(store, "other")
    fill.step(
        other,
        1,
        ids,
        [1, 2, 3],
        kept=fill.rollouts(ids, [1, 2, 3]),
        probes=fill.probes(ids[:1], [8], [1]),
    )
    store.record_evaluation(
        "of no step", [fill.evaluation(ids, [1, 2, 3])], model="tiny", config={}, run=run.record
    )
    tables = [without_events(store, fill)]
    for _ in train_on_everything(run, ids, fill):
        tables.append(without_events(store, fill))
    return tables


def test_roll_back_restores_each_step_exactly(store, run, fill, states):
    assert run.roll_back(2) == 5  # 2 rows of step 3, 3 of step 4
    assert without_events(store, fill) == states[2]
    assert run.roll_back(2) == 0
    assert run.roll_back(1) == 2
    assert without_events(store, fill) == states[1]
    assert run.roll_back(0) == 2
    assert without_events(store, fill) == states[0]
    assert check(store) == []


def test_roll_back_restores_all_that_belongs_to_a_step(store, run, ids, states):
    run.roll_back(2)
    assert run.record.last_step == 2
    assert store.checkpoints(run.record) == [(1, "step1"), (2, "step2")]
    run.roll_back(1)
    np.testing.assert_array_equal(run.load(ids).state, [[4.5, 0.5], [1.5, 3.5], [NAN, NAN]])
    assert run.load_shared()["clock"].tolist() == [1.0]
    run.roll_back(0)
    assert run.load_shared() == {}


def test_a_roll_back_is_an_event_with_what_it_deleted(store, run, states):
    run.roll_back(2)
    [event] = store.query("SELECT kind, from_step, to_step, detail FROM dbb_event")
    assert event[:3] == ("roll_back", 4, 2)
    assert json.loads(event.detail)["dbb_rollout"] == 10


def test_a_run_is_not_rolled_back_to_a_step_that_it_does_not_have(run, states):
    run.roll_back(1)
    for step in (3, -1):
        with pytest.raises(StoreError, match=rf"is at step 1 .* step {step}\b"):
            run.roll_back(step)
    with pytest.raises(StoreError, match=r"run 'run' is at step 1 .*checkpoint 'last' of step 2"):
        run.record_checkpoint(2, "last")


def test_steps_that_were_rolled_back_can_be_taken_again(store, run, ids, fill, states):
    run.roll_back(0)
    for _ in train_on_everything(run, ids, fill):
        pass
    again = without_events(store, fill)
    for table in ("dbb_posterior", "dbb_history", "dbb_probe", "dbb_rollout"):
        assert again[table] == states[4][table]
    assert check(store) == []


def test_a_checkpoint_is_durable_and_other_commits_stay_quick(open_new, fill):
    store = open_new("sqlite")
    run = fill.run(store)
    modes = []

    def synchronous(connection):
        modes.append(
            connection.connection.dbapi_connection.execute("PRAGMA synchronous").fetchone()[0]
        )

    event.listen(store.database.engine, "commit", synchronous)
    fill.step(run, 1, fill.prompts(store, 1), [1])
    run.record_checkpoint(1, "global_step1")
    fill.step(run, 2, fill.prompts(store, 1), [1])
    # SQLite's levels: 1 is NORMAL, 2 is FULL.
    assert modes.count(2) == 1 and set(modes) == {1, 2} and modes[-1] == 1


# ---- what goes with a step


def _lists(log):
    return {name: values.tolist() for name, values in vars(log).items()}


def test_the_log_is_ordered_by_step_then_prompt(store, run, ids, fill, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.CHUNK", 3)
    other = fill.run(store, "other")
    a, b, c = ids.tolist()
    fill.step(run, 1, [b, a], [1, 4])  # b (1.5, 3.5); a (4.5, 0.5)
    fill.step(other, 1, [a], [0])
    # C (0.5, 4.5); a (4.25, 2.25)
    fill.step(run, 2, [c, a], [0, 2], policy_version=np.array([NAN, 0.25]))
    log = read_log(store, run.record)
    means = [0.9, 0.3, 4.25 / 6.5, 0.1]
    assert _lists(log) == {
        "step": [1, 1, 2, 2],
        "prompt_id": [a, b, a, c],
        "rollouts": [4, 4, 4, 4],
        "successes": [4.0, 1.0, 2.0, 0.0],
        "mean": means,
        "variance": [mean * (1 - mean) for mean in means],
        "lag": [0.0, 0.0, 0.75, 0.0],
        "alpha": [4.5, 1.5, 4.25, 0.5],
        "beta": [0.5, 3.5, 2.25, 4.5],
    }
    assert [values.dtype.name for values in vars(log).values()] == ["int64"] * 3 + ["float64"] * 6
    visits = prompt_history(store, run.record, a)
    assert [(row["step"], row["alpha"], row["lag"]) for row in visits] == [
        (1, 4.5, 0.0),
        (2, 4.25, 0.75),
    ]


def test_probes_come_with_the_estimate_of_their_step_and_are_no_training_rollouts(
    store, run, ids, fill
):
    plain = fill.run(store, "plain")
    a, b, c = ids.tolist()
    # c is probed but not trained on: there is no estimate to compare with.
    probes = [
        fill.probes([b, a], [16, 8], [4, 7.5], [4, 7.25]),
        fill.probes([c, a], [8, 8], [0, 5]),
    ]
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
    probed, unprobed = (
        progress(store, each.record) | {"last_step_at": None} for each in (run, plain)
    )
    assert (probed["probes"], probed["samples"]) == (4, 40)
    assert probed | {"probes": 0, "samples": 0} == unprobed
    assert run.load(ids[:2]).state.tolist() == plain.load(ids[:2]).state.tolist()


def test_kept_rollouts_are_read_as_written(store, run, ids, fill):
    kept = dataclasses.replace(_kept(ids), policy_version=np.array([0.0, NAN, 0.5]))
    fill.step(run, 1, ids, [1, 2, 3])
    fill.step(run, 2, ids, [1, 2, 3], kept=kept)
    columns = "prompt_id, sample, reward, score, advantage, length, truncated, missing, log_prob, lag, text, read"
    hostile = HOSTILE.replace("\0", "\ufffd")
    assert store.query(
        f"SELECT {columns} FROM rollouts WHERE step = 2 ORDER BY prompt_id, sample"
    ) == [
        (ids[0], 0, None, None, 0.0, 0, None, 1, None, 0.0, "", None),
        (ids[1], 1, 1.0, 1.0, 0.75, 9, 0, 0, -2.25, 0.5, hostile, hostile),
        (ids[1], 3, 0.5, 1.0, -0.25, 7, 1, 0, -3.5, 1.0, "long", "7"),
    ]


def test_kept_rollouts_come_with_the_posterior_before_and_after(store, run, ids, fill):
    fill.step(run, 1, ids[:1], [4])  # (4.5, 0.5)
    # (4.25, 2.25), (0.5, 4.5)
    fill.step(run, 2, ids[:2], [2, 0], kept=fill.rollouts(ids[:2], [1, 0]))
    names = (
        "response",
        "score",
        "advantage",
        "visits",
        "alpha_before",
        "mean_before",
        "alpha",
        "mean",
    )
    again = (2, 4.5, 0.9, 4.25, 4.25 / 6.5)
    first = (1, None, None, 0.5, 0.1)
    rows = kept_rollouts(store, run.record, 2, limit=3)
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("answer 0", 1, 0.5, *again), ("answer 1", 0, -0.5, *again), ("answer 0", 0, -0.5, *first),
    ]  # fmt: skip


def test_usage_is_stored_step_by_step_and_summed(store, run, ids, fill):
    fill.step(run, 1, ids, [4, 0, 2], usage=fill.usage(ids, [4, 0, 2], trained=4))
    fill.step(run, 2, ids, [1, 1, 1], usage=None)
    fill.step(run, 3, ids[:1], [1])
    columns = "step, generated, generated_total, trained, filtered, zero_variance, groups"
    assert store.query(f"SELECT {columns} FROM steps ORDER BY step") == [
        (1, 12, 12, 4, 8, 8, 3), (2, None, 12, None, None, None, None), (3, 4, 16, 4, 0, 0, 1),
    ]  # fmt: skip
    run.finish(unused_rollouts=3)
    sums = {"generated": 16, "trained": 8, "filtered": 8, "zero_variance": 8, "groups": 4}
    assert (sums | {"unused_rollouts": 3}).items() <= progress(store, run.record).items()


def test_run_wide_state_comes_back_bit_for_bit(url, fill):
    values = np.array(
        [5e-324, 0.1, 0.1 + 0.2, 1e308, np.finfo(float).max, -0.0, 0.0, 1 / 3, 2.0**53 + 2]
    )
    shared = {"prior": values, "clock": np.array([7.0]), "nothing": np.empty(0)}
    with open_store(url) as store:
        run = fill.run(store)
        assert run.load_shared() == {}
        fill.step(run, 1, fill.prompts(store, 1), [1], shared=shared)
        fill.step(run, 2, fill.prompts(store, 1), [1])  # a step without leaves it as it was
    with open_store(url) as store:
        found = store.claim_run(store.find_run("run").run_id).load_shared()
    assert found.keys() == shared.keys()
    assert all(found[name].tobytes() == shared[name].tobytes() for name in shared)


def test_metrics_are_numbers_with_seven_digits(store, run, ids, fill):
    with pytest.raises(StoreError, match=r"metrics .*step 1, run 'run' .*step 0; record the step"):
        run.record_metrics(1, {"kl": 0.1})
    fill.step(run, 1, ids, [1, 2, 3])
    metrics = {
        "z": np.float32(1 / 3),
        "a": 12345678,
        "bad": float("inf"),
        "text": "no",
        "none": None,
        "flag": True,
    }
    for _ in range(2):  # the acknowledgement may be lost
        run.record_metrics(1, metrics)
    stored = '{"a": 12345680.0, "bad": null, "flag": 1.0, "z": 0.3333333}'
    assert store.query("SELECT metrics FROM steps") == [(stored,)]


# ---- warm starts


@pytest.fixture(params=["the same", "sqlite", "postgresql"])
def begun_from_another(request, kind, open_new, fill):
    """A run with a warm start from a run of two trained prompts, in the same store or another one."""
    source_store = open_new(kind)
    store = source_store if request.param == "the same" else open_new(request.param)
    source = fill.run(source_store, "old", dataset="A")
    a, b, _ = source_store.register_prompts(["p", "q", "r"], ["1", "2", "3"])
    fill.step(source, 1, [a, b], [4, 1])  # (4.5, 0.5), (1.5, 3.5)
    fill.step(source, 2, [a], [4])  # (6.25, 0.25)
    run = fill.run(store, "new", dataset="B")
    # Another order and other ids; "q" with another label is another prompt; "r" was never trained on.
    ids = store.register_prompts(["new", "r", "q", "q", "p"], ["0", "3", "other", "2", "1"])
    outcome = run.warm_start(source_store, source.record, ids, weight=0.5)
    return SimpleNamespace(
        source_store=source_store,
        source=source,
        store=store,
        run=run,
        ids=ids,
        outcome=outcome,
        a=a,
    )


def test_shared_prompts_take_over_their_posteriors(begun_from_another):
    begun = begun_from_another
    table = begun.run.load(begun.ids)
    np.testing.assert_array_equal(
        table.state, [[NAN, NAN], [NAN, NAN], [NAN, NAN], [0.75, 1.75], [3.125, 0.125]]
    )
    assert table.step.tolist() == [-1, -1, -1, 0, 0]


def test_a_warm_start_is_counted_and_stored_with_its_source(begun_from_another):
    begun = begun_from_another
    outcome = begun.outcome
    assert (outcome.matched, outcome.unmatched) == (2, 3)
    assert (outcome.source.name, outcome.source.last_step) == ("old", 2)
    parent = {
        "name": "old",
        "uuid": begun.source.record.uuid,
        "step": 2,
        "weight": 0.5,
        "database": begun.source_store.location,
    }
    assert begun.run.record.parent == begun.store.find_run("new").parent == parent
    (event,) = begun.store.query(
        "SELECT kind, detail FROM dbb_event WHERE run_id = :run", run=begun.run.record.run_id
    )
    assert event.kind == "warm_start"
    assert '"matched": 2, "unmatched": 3' in event.detail


def test_a_warm_start_leaves_its_source_as_it_was(begun_from_another):
    begun = begun_from_another
    assert begun.source_store.find_run("old").parent is None
    assert begun.source.load(np.array([begun.a])).state.tolist() == [[6.25, 0.25]]


def test_the_run_wide_state_comes_along_and_a_roll_back_to_the_start_restores_the_warm_start(
    store, ids, fill
):
    def prior(run):
        return run.load_shared()["prior"].tolist()

    source = fill.run(store, "old")
    fill.step(source, 1, ids[:1], [4], shared={"prior": np.array([0.1 + 0.2, 2.0])})
    fill.step(source, 2, ids[:1], [4], shared={"prior": np.array([5e-324, 3.0])})
    run = fill.run(store, "new")
    third = fill.run(store, "third")
    ids = ids[:2]
    run.warm_start(store, source.record, ids)
    third.warm_start(store, run.record, ids)  # of a source that never changed it
    assert prior(run) == prior(third) == [5e-324, 3.0]
    # 4 of 4 twice: (4.5, 0.5), (6.25, 0.25); then none: (3.125, 4.125), and (0.5, 4.5) from the prior
    fill.step(run, 1, ids, [0, 0], shared={"prior": np.array([1.0, 1.0])})
    assert run.load(ids).state.tolist() == [[3.125, 4.125], [0.5, 4.5]]
    assert prior(run) == [1.0, 1.0]
    assert run.roll_back(0) == 2
    table = run.load(ids)
    np.testing.assert_array_equal(table.state, [[6.25, 0.25], [NAN, NAN]])
    assert table.step.tolist() == [0, -1]
    assert prior(run) == [5e-324, 3.0]


def test_a_warm_start_that_does_not_fit_is_refused(store, ids, fill):
    source = fill.run(store, "old")
    value = fill.run(store, "value", fields=("value",))
    fill.step(source, 1, ids, [4, 4, 4])
    run = fill.run(store, "new")
    trained = fill.run(store, "trained")
    newer = fill.run(store, "b", estimator_version=2)
    run.warm_start(store, source.record, ids)
    fill.step(trained, 1, ids, [1, 1, 1])
    for target, begun_from, options, message in (
        (run, source, {}, r"'new' has posteriors \(step 0\); only a new run"),
        (trained, source, {}, r"'trained' has posteriors \(step 1\)"),
        (value, source, {}, r"'old' keeps \['alpha', 'beta'\] .*'value' needs \['value'\]"),
        (value, value, {"weight": 0.5}, "only alpha and beta can be weighted; use weight 1"),
        (newer, source, {}, r"version 1\), run 'b' needs .*, version 2\); name a run with"),
    ):
        with pytest.raises(StoreError, match=message):
            target.warm_start(store, begun_from.record, ids, **options)
