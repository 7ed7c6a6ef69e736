"""Rollout usage: where the rollouts of every step went, prompt by prompt, and its totals."""

import dataclasses

import numpy as np
import pytest
from sqlalchemy import text
from store_invariants import check

from storage import StoreError, UsageRows, read_usage
from storage.inspection import progress, usage_by_step
from storage.usage import COUNTS, TOTALS


def _usage(ids, **counts):
    """All counts 0 but those given, with 10 tokens to each rollout."""
    columns = {name: np.array(counts.get(name, [0] * len(ids)), dtype=int) for name in COUNTS}
    for name in ("generated", "trained", "replayed"):
        columns[f"{name}_tokens"] = 10 * columns[name]
    return UsageRows(prompt_ids=np.array(ids, dtype=int), **columns)


def _columns(log):
    return {name: values.tolist() for name, values in vars(log).items()}


@pytest.fixture
def counted(store, fill):
    """A run whose steps 1 and 3 have usage, and step 2 has none; and the ids a < b < c.

    Step 1: a is generated twice (two groups of 4), once in vain; b has zero variance, is rescued; c is skipped twice.
    Step 3: a alone is generated and filtered out; b is replayed.
    """
    run, (a, b, c) = fill.run(store, method="dapo"), np.sort(fill.prompts(store, 3)).tolist()
    first = _usage(
        [c, b, a], generated=[0, 4, 8], trained=[0, 4, 4], zero_variance=[0, 4, 4], informative=[0, 4, 4],
        rescued=[0, 4, 0], skipped=[2, 0, 0],
    )  # fmt: skip
    fill.step(run, 1, [a, b], [1, 4], usage=first)
    fill.step(run, 2, [a, b], [1, 4], usage=None)
    fill.step(run, 3, [a], [4], usage=_usage([a, b], generated=[4, 0], zero_variance=[4, 0], replayed=[0, 2]))
    return run, (a, b, c)


def test_usage_comes_back_prompt_by_prompt(store, counted):
    run, (a, b, c) = counted
    found = read_usage(store, run.record)
    assert _columns(found) == {
        "step": [1, 1, 1, 3, 3],
        "prompt_id": [a, b, c, a, b],
        "generated": [8, 4, 0, 4, 0],
        "generated_tokens": [80, 40, 0, 40, 0],
        "trained": [4, 4, 0, 0, 0],
        "trained_tokens": [40, 40, 0, 0, 0],
        "zero_variance": [4, 4, 0, 4, 0],
        "informative": [4, 4, 0, 0, 0],
        "rescued": [0, 4, 0, 0, 0],
        "replayed": [0, 0, 0, 0, 2],
        "replayed_tokens": [0, 0, 0, 0, 20],
        "skipped": [0, 0, 2, 0, 0],
    }
    assert {values.dtype.name for values in vars(found).values()} == {"int64"}
    assert check(store) == []


def test_the_views_hold_it_with_what_was_filtered_out(store, counted):
    run, (a, b, c) = counted
    rows = store.query("SELECT * FROM usage ORDER BY step, prompt_id")
    run_id = run.record.run_id
    assert [tuple(row) for row in rows] == [
        (run_id, 1, a, 8, 80, 4, 40, 4, 4, 0, 0, 0, 0, 4),
        (run_id, 1, b, 4, 40, 4, 40, 4, 4, 4, 0, 0, 0, 0),
        (run_id, 1, c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0),
        (run_id, 3, a, 4, 40, 0, 0, 4, 0, 0, 0, 0, 0, 4),
        (run_id, 3, b, 0, 0, 0, 0, 0, 0, 0, 2, 20, 0, 0),
    ]
    steps = store.query(
        """SELECT step, generated, trained, filtered, zero_variance, informative, rescued, replayed, skipped,
                  groups, informative_groups, generated_total FROM steps ORDER BY step"""
    )
    assert [tuple(row) for row in steps] == [
        (1, 12, 8, 4, 8, 8, 4, 0, 2, 2, 2, 12),
        (2, *[None] * 10, 12),
        (3, 4, 0, 4, 4, 0, 0, 2, 0, 1, 0, 16),
    ]


def test_the_running_total_is_of_each_run_by_itself(store, fill):
    one, two = fill.run(store, "one"), fill.run(store, "two")
    ids = fill.prompts(store, 2)
    for step in (1, 2):
        fill.step(one, step, ids, [1, 2])
        fill.step(two, step, ids[:1], [1])
    totals = store.query("SELECT run_id, step, generated_total FROM steps ORDER BY run_id, step")
    assert [tuple(row) for row in totals] == [(1, 1, 8), (1, 2, 16), (2, 1, 4), (2, 2, 8)]


def test_totals_of_the_run_and_of_its_steps(store, counted):
    run, _ = counted
    expected = {
        "generated": [12, 4], "generated_tokens": [120, 40], "trained": [8, 0], "trained_tokens": [80, 0],
        "zero_variance": [8, 4], "informative": [8, 0], "rescued": [4, 0], "replayed": [0, 2],
        "replayed_tokens": [0, 20], "skipped": [2, 0], "groups": [2, 1], "informative_groups": [2, 0],
        "filtered": [4, 4],
    }  # fmt: skip
    steps = usage_by_step(store, run.record)
    assert _columns(steps) == {"step": [1, 3], **expected}
    assert {values.dtype.name for values in vars(steps).values()} == {"int64"}
    totals = progress(store, run.record)
    assert {name: totals[name] for name in expected} == {name: sum(values) for name, values in expected.items()}
    assert all(type(totals[name]) is int for name in expected)


def test_a_run_without_usage_has_none(store, fill):
    run = fill.run(store)
    fill.step(run, 1, fill.prompts(store, 1), [1], usage=None)
    totals = progress(store, run.record)
    assert {totals[name] for name in (*TOTALS, "filtered")} == {None}
    assert (totals["unused_rollouts"], totals["unused_tokens"]) == (0, 0)
    assert {len(values) for values in vars(usage_by_step(store, run.record)).values()} == {0}
    assert {len(values) for values in vars(read_usage(store, run.record)).values()} == {0}
    assert store.query("SELECT generated, groups, filtered, generated_total FROM steps") == [(None,) * 4]
    assert check(store) == []


def test_a_step_that_used_nothing_is_counted_as_0(store, fill):
    run = fill.run(store)
    fill.step(run, 1, [], [], usage=_usage([]))
    assert store.query("SELECT generated, groups, generated_total FROM steps") == [(0, 0, 0)]
    assert read_usage(store, run.record).step.tolist() == []
    assert progress(store, run.record)["generated"] == 0
    assert check(store) == []


def test_a_repeat_must_repeat_the_usage(store, fill, dump):
    run, ids = fill.run(store), fill.prompts(store, 2)
    rows = fill.step(run, 1, ids, [4, 1])
    before, usage = dump(store), rows.usage
    backwards = UsageRows(**{name: values[::-1] for name, values in vars(usage).items()})
    run.record_step(1, dataclasses.replace(rows, usage=backwards))
    skipped_more, less_replayed = (
        dataclasses.replace(usage, **{name: np.array([1, 2])}) for name in ("skipped", "replayed")
    )
    for other in (skipped_more, less_replayed, None):
        with pytest.raises(StoreError, match="step 1 of run 'run' is already recorded with different content"):
            run.record_step(1, dataclasses.replace(rows, usage=other))
    assert dump(store) == before
    empty = fill.run(store, "empty")
    nothing = fill.step(empty, 1, [], [], usage=None)
    with pytest.raises(StoreError, match="recorded with different content"):
        empty.record_step(1, dataclasses.replace(nothing, usage=_usage([])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [1, 1]}, "step 1: usage.prompt_ids holds prompt 1 more than once"),
        ({"prompt_ids": [1.0, 2.0]}, "usage.prompt_ids has type float64"),
        ({"trained": [4.0, 4.0]}, "usage.trained has type float64; integers"),
        ({"generated": [4]}, r"step 1: usage.generated has shape \(1,\); it must be \(2,\)"),
        ({"skipped": [0, -1]}, r"step 1: usage.skipped\[1\] must be at least 0, got -1"),
        ({"generated_tokens": [-1, 0]}, r"step 1: usage.generated_tokens\[0\] must be at least 0, got -1"),
        (
            {"trained": [4, 5]},
            r"step 1: usage.trained of prompt 2 is 5, its usage.generated is 4; it must be at most usage.generated$",
        ),
        ({"zero_variance": [5, 0]}, "usage.zero_variance of prompt 1 is 5, its usage.generated is 4"),
        ({"trained": [2, 4]}, "usage.informative of prompt 1 is 4, its usage.trained is 2"),
        ({"rescued": [4, 0], "informative": [2, 0]}, "usage.rescued of prompt 1 is 4, its usage.informative is 2"),
        ({"rescued": [4, 0], "zero_variance": [0, 0]}, "usage.rescued of prompt 1 is 4, its usage.zero_variance is 0"),
        (
            {"trained": [4, 0], "informative": [4, 0]},
            r"usage.trained_tokens of prompt 2 is 40, its usage.trained is 0; it must be 0 without rollouts$",
        ),
        ({"replayed_tokens": [0, 1]}, "usage.replayed_tokens of prompt 2 is 1, its usage.replayed is 0"),
    ],
)
def test_counts_that_cannot_be_are_refused_and_leave_nothing(store, fill, dump, changes, message):
    run, before = fill.run(store), dump(store)
    usage = _usage([1, 2], generated=[4, 4], trained=[4, 4], zero_variance=[4, 0], informative=[4, 4], rescued=[4, 0])
    rows = fill.rows(run, [1, 2], [1, 1])
    changed = dataclasses.replace(usage, **{name: np.array(values) for name, values in changes.items()})
    with pytest.raises(StoreError, match=message):
        run.record_step(1, dataclasses.replace(rows, usage=changed))
    assert dump(store) == before
    run.record_step(1, dataclasses.replace(rows, usage=usage))


def test_tokens_may_be_0(store, fill):
    run, (a,) = fill.run(store), fill.prompts(store, 1)
    empty = dataclasses.replace(_usage([a], generated=[4]), generated_tokens=np.array([0]))
    fill.step(run, 1, [a], [1], usage=empty)
    assert read_usage(store, run.record).generated_tokens.tolist() == [0]


@pytest.mark.parametrize(("prompts", "found"), [([1, 2], 3), ([1, 3], 0)])
def test_rollouts_that_nobody_generated_are_refused(store, fill, prompts, found):
    run, usage = fill.run(store), _usage(prompts, generated=[4, 3])
    with pytest.raises(
        StoreError, match=rf"step 1: prompt 2 has 4 rollouts, but usage.generated is {found}; count every rollout"
    ):
        fill.step(run, 1, [1, 2], [1, 1], usage=usage)


def test_roll_back_deletes_the_usage_of_undone_steps(store, counted, fill):
    run, (a, *_) = counted
    other = fill.run(store, "other")
    fill.step(other, 1, [a], [1])
    run.roll_back(1)
    assert read_usage(store, run.record).step.tolist() == [1, 1, 1]
    assert usage_by_step(store, run.record).generated.tolist() == [12]
    run.roll_back(0)
    assert read_usage(store, run.record).step.tolist() == []
    assert progress(store, run.record)["generated"] is None
    assert read_usage(store, other.record).step.tolist() == [1]
    details = store.query("SELECT detail FROM dbb_event WHERE run_id = :run ORDER BY event_id", run=run.record.run_id)
    # Steps 2 and 3: 2 + 1 rows of history and 2 of usage; step 1: 2 and 3.
    assert [detail for (detail,) in details] == [
        '{"history_rows": 3, "steps": 2, "checkpoints": 0, "probes": 0, "usage_rows": 2, "rollouts": 0, '
        '"evaluations": 0}',
        '{"history_rows": 2, "steps": 1, "checkpoints": 0, "probes": 0, "usage_rows": 3, "rollouts": 0, '
        '"evaluations": 0}',
    ]


def test_a_warm_start_copies_no_usage(store, counted, fill):
    source, ids = counted
    run = fill.run(store, "new")
    run.warm_start(store, source.record, np.array(ids))
    assert read_usage(store, run.record).step.tolist() == []
    assert progress(store, run.record)["generated"] is None


def test_a_long_usage_is_read_in_parts(store, fill, monkeypatch):
    monkeypatch.setattr("storage.engine.CHUNK", 3)
    run, ids = fill.run(store), np.sort(fill.prompts(store, 8))
    for step in (1, 2):
        fill.step(run, step, ids, np.arange(8) % 5)
    usage = read_usage(store, run.record)
    assert usage.step.tolist() == [1] * 8 + [2] * 8
    assert usage.prompt_id.tolist() == ids.tolist() * 2
    assert usage.replayed.tolist() == [0, 1, 2, 3, 4, 0, 1, 2] * 2
    assert usage_by_step(store, run.record).generated.tolist() == [32, 32]


def test_rollouts_left_over_at_the_end_are_noted(store, fill):
    run, plain = fill.run(store), fill.run(store, "plain")
    fill.step(run, 1, fill.prompts(store, 1), [1])
    run.finish(unused_rollouts=np.int64(3), unused_tokens=np.int64(21))
    run.finish(unused_rollouts=3, unused_tokens=21)
    plain.finish()
    with store.database.transaction() as connection:
        noted = connection.execute(text("SELECT kind, detail FROM dbb_event ORDER BY event_id")).all()
    assert [tuple(row) for row in noted] == [
        ("finish", '{"unused_rollouts": 3, "unused_tokens": 21}'), ("finish", "{}"),
    ]  # fmt: skip
    totals = [progress(store, record) for record in store.runs()]
    assert [(each["unused_rollouts"], each["unused_tokens"]) for each in totals] == [(3, 21), (0, 0)]
    assert totals[0]["generated"] == 4


@pytest.mark.parametrize("unused", [(-1, 0), (1, -1), (0, 5)])
def test_a_left_over_that_cannot_be_is_refused(store, fill, unused):
    run = fill.run(store)
    with pytest.raises(
        StoreError, match=rf"run 'run' .* unused_rollouts {unused[0]} and unused_tokens {unused[1]}; both must be at"
    ):
        run.finish(*unused)
    assert store.find_run("run").status == "running"


def test_the_method_of_a_run(store, fill):
    assert fill.run(store, "given", method="repo").record.method == "repo"
    assert fill.run(store, "none").record.method == ""
    assert [run.method for run in store.runs()] == ["repo", ""]
    assert store.query("SELECT name, method FROM runs ORDER BY run_id") == [("given", "repo"), ("none", None)]
