"""Kept rollouts and metrics: exactly once with the step, rolled back with it; what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from store_invariants import check

from storage import RolloutRows, StoreError
from storage.inspection import rollouts

HOSTILE = "NUL \0, </script><b>HTML</b>, \u202e and \u00fcnicode \U0001f600"
NAN = float("nan")


@pytest.fixture
def run(store, fill):
    return fill.run(store)


@pytest.fixture
def ids(store, fill):
    return fill.prompts(store, 3)


def kept_rows(ids):
    """Two of prompt 1, one of prompt 0, one of which could not be verified; not in order."""
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
    )


def test_they_are_read_as_written(store, run, ids, fill):
    fill.step(run, 1, ids, [1, 2, 3], kept=kept_rows(ids))
    names = ("prompt_id", "sample", "reward", "score", "advantage", "length", "truncated", "missing", "log_prob")
    found = rollouts(store, run.record, 1)
    assert [tuple(row[name] for name in names) for row in found] == [
        (ids[0], 0, None, None, 0.0, 0, None, 1, None),
        (ids[1], 1, 1.0, 1.0, 0.75, 9, 0, 0, -2.25),
        (ids[1], 3, 0.5, 1.0, -0.25, 7, 1, 0, -3.5),
    ]
    assert [row["text"] for row in found] == ["", HOSTILE.replace("\0", "\ufffd"), "long"]
    assert [row["sample"] for row in rollouts(store, run.record, 1, int(ids[1]))] == [1, 3]
    assert rollouts(store, run.record, 2) == []
    assert check(store) == []


def test_a_text_of_a_megabyte_is_kept_whole(store, run, ids, fill):
    rows = kept_rows(ids)
    fill.step(run, 1, ids, [1, 2, 3], kept=replace(rows, text=["x" * 1_000_000, "", ""]))
    assert [len(row["text"]) for row in rollouts(store, run.record, 1)] == [0, 0, 1_000_000]


def test_a_repeat_writes_nothing_twice_and_another_text_is_refused(store, run, ids, fill):
    rows = fill.rows(run, ids, [1, 2, 3], kept=kept_rows(ids))
    run.record_step(1, rows)
    run.record_step(1, rows)
    assert len(rollouts(store, run.record, 1)) == 3
    for other in (None, replace(rows.kept, text=["long", "", "other"]), replace(rows.kept, length=np.array([7, 1, 9]))):
        with pytest.raises(StoreError, match=r"step 1 .* already recorded with different content"):
            run.record_step(1, replace(rows, kept=other))


def test_a_roll_back_deletes_those_of_its_steps(store, run, ids, fill):
    for step in (1, 2, 3, 4):
        fill.step(run, step, ids, [1, 2, 3], kept=fill.rollouts(ids, [1, 2, 3]))
        run.record_metrics(step, {"kl": step / 10})
    other = fill.run(store, "other")
    fill.step(other, 1, ids, [1, 2, 3], kept=fill.rollouts(ids, [1, 2, 3]))

    def per_step():
        return store.query("SELECT run_id, step, count(*) FROM rollouts GROUP BY run_id, step ORDER BY run_id, step")

    run.roll_back(3)
    assert per_step() == [(1, 1, 6), (1, 2, 6), (1, 3, 6), (2, 1, 6)]
    # The metrics are part of the step's own row.
    metrics = store.query("SELECT step, metrics FROM steps WHERE run_id = 1 ORDER BY step")
    assert metrics == [(1, '{"kl": 0.1}'), (2, '{"kl": 0.2}'), (3, '{"kl": 0.3}')]
    assert check(store) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": np.array([3, 0, 3])}, "sample 3 of prompt . more than once"),
        ({"sample": np.array([3, -1, 1])}, r"rollouts.sample\[1\] must be at least 0, got -1"),
        ({"reward": np.array([0.5, np.inf, 1])}, "rollouts.reward of prompt ., sample 0, is inf; it must be finite"),
        ({"advantage": np.array([0.5, NAN, 1])}, "rollouts.advantage of prompt ., sample 0, is nan; it must be finite"),
        ({"length": np.array([1, 2])}, r"rollouts.length has shape \(2,\); it must be \(3,\)"),
        ({"text": ["a", "b"]}, "rollouts.text must be 3 texts"),
        ({"text": ["a", "b", None]}, "rollouts.text must be 3 texts"),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_written(open_new, fill, change, message):
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 3)
    with pytest.raises(StoreError, match=message):
        fill.step(run, 1, ids, [1, 2, 3], kept=replace(kept_rows(ids), **change))
    assert store.query("SELECT count(*) FROM rollouts") == [(0,)]
    assert store.find_run("run").last_step == 0


def test_metrics_are_numbers_with_seven_digits(store, run, ids, fill):
    fill.step(run, 1, ids, [1, 2, 3])
    metrics = {"z": np.float32(1 / 3), "a": 12345678, "bad": float("inf"), "text": "no", "none": None, "flag": True}
    for _ in range(2):  # the acknowledgement may be lost
        run.record_metrics(1, metrics)
    assert store.query("SELECT metrics FROM steps") == [
        ('{"a": 12345680.0, "bad": null, "flag": 1.0, "z": 0.3333333}',)
    ]


def test_metrics_of_a_step_that_is_not_recorded_or_by_a_former_owner_are_refused(store, run, ids, fill):
    with pytest.raises(StoreError, match="metrics are of step 1, run 'run' is at step 0; record the step first"):
        run.record_metrics(1, {"kl": 0.1})
    fill.step(run, 1, ids, [1, 2, 3])
    store.claim_run(1)
    with pytest.raises(StoreError, match="was taken over"):
        run.record_metrics(1, {"kl": 0.1})
    assert store.query("SELECT metrics FROM steps") == [(None,)]
