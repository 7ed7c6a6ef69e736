"""Pruned history: what goes, what stays, what can still be rolled back to."""

from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import event, text

from storage import ProbeRows, StoreError, open_store
from storage.inspection import progress, prompt_history
from storage.invariants import check
from storage.retention import PruneResult, prune


@pytest.fixture
def trained(store, fill):
    """A run of 6 steps of prompts 1 and 2 (4 rollouts each), with prompt 3 in step 2 only; and the ids."""
    run = fill.run(store)
    a, b, c = fill.prompts(store, 3)
    for step in range(1, 7):
        ids = [a, b, c] if step == 2 else [a, b]
        probes = ProbeRows(np.array([a]), np.array([8]), np.array([2.0]), np.array([2.0]))
        fill.step(run, step, ids, [step % 5] * len(ids), probes=probes)
    return run, (a, b, c)


def steps_of(store, table):
    with store.database.transaction() as connection:
        return [step for (step,) in connection.execute(text(f"SELECT DISTINCT step FROM {table} ORDER BY step"))]


def test_old_history_is_deleted_and_posteriors_steps_and_totals_stay(store, trained, dump):
    run, (a, *_) = trained
    run.record_checkpoint(4, "four")
    before, totals = dump(store), progress(store, run.record)
    result = prune(store, run.record, keep_last=2)
    # Steps 1 to 4: 2 + 3 + 2 + 2 rows, as many of usage, and a probe each.
    assert (result.steps, result.history_rows, result.usage_rows, result.probes, result.checkpoints) == (4, 9, 9, 4, 0)
    assert [steps_of(store, table) for table in ("dbb_history", "dbb_probe", "dbb_usage")] == [[5, 6]] * 3
    after = dump(store)
    for table in ("dbb_posterior", "dbb_step", "dbb_checkpoint", "dbb_run"):
        assert after[table] == before[table]
    assert after["dbb_history"] == [row for row in before["dbb_history"] if row[1] >= 5]
    assert progress(store, run.record) == totals
    assert totals["probes"] == 6 and totals["samples"] == 48
    assert [visit["step"] for visit in prompt_history(store, run.record, int(a))] == [5, 6]
    assert check(store) == []


def test_a_dry_run_counts_what_the_prune_then_deletes(store, trained, dump):
    run, _ = trained
    run.record_checkpoint(2, "two")
    run.record_checkpoint(4, "four")
    before = dump(store)
    planned = prune(store, run.record, keep_last=2, drop_checkpoints=True, dry_run=True)
    assert dump(store) == before
    # as above; checkpoint "two" needs the history of step 3
    assert planned == PruneResult(5, 4, 9, 4, 9, 0, 0, 1, bytes_freed=None)
    done = prune(store, run.record, before=planned.first_kept, drop_checkpoints=True)
    assert replace(done, bytes_freed=None) == planned
    assert prune(store, run.record, keep_last=2, dry_run=True) == PruneResult(5, 0, 0, 0, 0, 0, 0, 0, bytes_freed=None)
    with pytest.raises(StoreError, match="has checkpoint 'four' of step 4, which needs the history from step 5 on"):
        prune(store, run.record, keep_last=1, dry_run=True)


def test_it_is_noted_once(store, trained):
    run, _ = trained
    run.record_checkpoint(6, "six")
    prune(store, run.record, before=3)
    assert prune(store, run.record, before=3).steps == 0
    with store.database.transaction() as connection:
        noted = connection.execute(text("SELECT kind, from_step, to_step, detail FROM dbb_event")).all()
    detail = (
        '{"before": 3, "steps": 2, "history_rows": 5, "probes": 2, "samples": 16, "usage_rows": 5, "rollouts": 0, '
        '"groups": 0, "checkpoints": 0}'
    )
    assert [tuple(row) for row in noted] == [("prune", 6, 6, detail)]


def test_many_small_parts_are_one_prune(store, trained, dump, monkeypatch):
    run, _ = trained
    run.record_checkpoint(6, "six")
    monkeypatch.setattr("storage.retention.CHUNK", 1)
    result = prune(store, run.record, keep_last=1)
    assert (result.steps, result.history_rows, result.probes) == (5, 11, 5)
    (noted,) = dump(store)["dbb_event"]
    detail = (
        '"steps": 5, "history_rows": 11, "probes": 5, "samples": 40, "usage_rows": 11, "rollouts": 0, "groups": 0, '
        '"checkpoints": 0'
    )
    assert noted[-1] == f'{{"before": 6, {detail}}}'
    assert progress(store, run.record)["samples"] == 48


def test_one_that_is_cut_short_leaves_a_valid_run_and_can_be_finished(store, trained, monkeypatch):
    run, _ = trained
    run.record_checkpoint(6, "six")
    monkeypatch.setattr("storage.retention.CHUNK", 1)
    deletions = []

    def fail(connection, cursor, statement, *_):
        if statement.startswith("DELETE FROM dbb_probe"):
            deletions.append(statement)
            if len(deletions) == 3:
                raise KeyboardInterrupt

    event.listen(store.database.engine, "before_cursor_execute", fail)
    with pytest.raises(KeyboardInterrupt):
        prune(store, run.record, keep_last=1)
    assert [steps_of(store, table) for table in ("dbb_history", "dbb_probe", "dbb_usage")] == [[3, 4, 5, 6]] * 3
    assert check(store) == []
    assert prune(store, run.record, keep_last=1).steps == 3
    assert [steps_of(store, table) for table in ("dbb_history", "dbb_probe", "dbb_usage")] == [[6]] * 3
    assert progress(store, run.record)["probes"] == 6
    assert check(store) == []


def test_roll_back_before_the_oldest_kept_step_is_refused(store, trained, dump):
    run, _ = trained
    run.record_checkpoint(4, "four")
    prune(store, run.record, before=5)
    before = dump(store)
    message = (
        r"cannot go back to step 3: the history of step 4 was pruned; choose a model checkpoint of step 4 or later$"
    )
    with pytest.raises(StoreError, match=message):
        run.roll_back(3)
    assert dump(store) == before
    assert run.roll_back(4) == 4
    assert check(store) == []


def test_after_a_prune_of_everything_only_the_last_step_is_left(store, trained):
    run, (a, *_) = trained
    run.record_checkpoint(6, "six")
    state = run.load(np.array([a])).state
    assert prune(store, run.record, keep_last=0).steps == 6
    with pytest.raises(StoreError, match=r"the history of step 6 was pruned; choose a model checkpoint of step 6 or"):
        run.roll_back(5)
    assert run.roll_back(6) == 0
    assert run.load(np.array([a])).state.tolist() == state.tolist()
    assert check(store) == []


@pytest.mark.parametrize("seed", range(6))
def test_roll_back_to_every_kept_checkpoint_is_as_without_a_prune(kind, open_new, fill, dump, seed):
    rng = np.random.default_rng(seed)
    stores = open_new(kind), open_new(kind)
    runs = [fill.run(each, fields=("alpha", "beta")) for each in stores]
    ids, _ = (fill.prompts(each, 9) for each in stores)
    last = int(rng.integers(5, 12))
    checkpoints = sorted({int(step) for step in rng.integers(1, last + 1, 4)})
    for step in range(1, last + 1):
        chosen = rng.choice(ids, rng.integers(1, 9), replace=False)
        successes = rng.integers(0, 5, len(chosen))
        for run in runs:
            fill.step(run, step, chosen, successes, shared={"clock": np.array([float(step)])})
            if step in checkpoints:
                run.record_checkpoint(step, f"at {step}")
    before = int(rng.integers(1, checkpoints[-1] + 2))
    prune(stores[0], runs[0].record, before=before, drop_checkpoints=True)
    kept = [row[1] for row in dump(stores[0])["dbb_checkpoint"]]
    assert kept == [step for step in checkpoints if step >= before - 1] and kept
    for step in reversed(kept):
        for run in runs:
            run.roll_back(step)
        pruned, whole = (dump(each) for each in stores)
        assert pruned["dbb_posterior"] == whole["dbb_posterior"]
        for table in ("dbb_history", "dbb_usage"):
            assert pruned[table] == [row for row in whole[table] if row[1] >= before]
        pruned_steps, whole_steps = ([(*row[:6], *row[7:]) for row in each["dbb_step"]] for each in (pruned, whole))
        assert pruned_steps == whole_steps  # but for their times
        assert runs[0].load_shared()["clock"].tolist() == [step]
        assert check(stores[0]) == []


def test_a_checkpoint_in_the_way_refuses_the_prune_until_it_is_given_up(store, trained, dump):
    run, _ = trained
    for step in (2, 4):
        run.record_checkpoint(step, f"global_step{step}")
    before = dump(store)
    with pytest.raises(StoreError) as refusal:
        prune(store, run.record, before=5)
    assert str(refusal.value) == (
        "run 'run' has checkpoint 'global_step2' of step 2, which needs the history from step 3 on, but the prune "
        "would keep it from step 5 on; keep more, or give up such checkpoints "
        "(drop_checkpoints=True, or --drop-checkpoints)"
    )
    assert dump(store) == before
    assert prune(store, run.record, before=3).steps == 2  # what no checkpoint needs
    assert prune(store, run.record, before=5, drop_checkpoints=True).checkpoints == 1
    assert steps_of(store, "dbb_checkpoint") == [4]


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (
            4,
            r"has checkpoint 'c' of step 4, which needs the history from step 5 on, but .* step 6 on; it is the newest",
        ),
        (
            None,
            r"has no checkpoint, so it resumes from its start, which needs the history from step 1 on, but .* step 6",
        ),
    ],
)
def test_the_newest_checkpoint_of_an_unfinished_run_is_never_given_up(store, trained, dump, checkpoint, message):
    run, _ = trained
    if checkpoint:
        run.record_checkpoint(checkpoint, "c")
    before = dump(store)
    with pytest.raises(StoreError, match=message):
        prune(store, run.record, before=6, drop_checkpoints=True)
    assert dump(store) == before


def test_a_finished_run_needs_no_history(store, trained, dump):
    run, _ = trained
    run.record_checkpoint(2, "two")
    run.finish()
    assert prune(store, run.record, keep_last=0).history_rows == 13
    assert [row[1] for row in dump(store)["dbb_checkpoint"]] == [2]
    assert check(store) == []


def test_another_process_may_prune_a_run_that_is_trained(store, trained, fill):
    run, (a, b, _) = trained
    run.record_checkpoint(6, "six")
    with open_store(store.url) as other:
        assert prune(other, other.find_run("run"), keep_last=1).steps == 5
    fill.step(run, 7, [a, b], [4, 0])
    run.record_checkpoint(7, "seven")
    assert run.roll_back(6) == 2
    assert check(store) == []


def test_other_runs_are_untouched(store, trained, fill, dump):
    run, (a, b, _) = trained
    run.record_checkpoint(6, "six")
    other = fill.run(store, "other")
    fill.step(other, 1, [a, b], [1, 2])
    prune(store, run.record, keep_last=0)
    for table in ("dbb_history", "dbb_usage"):
        assert [row[:2] for row in dump(store)[table]] == [(other.record.run_id, 1)] * 2


def test_freed_space_is_reported_where_it_is_known(store, fill, kind):
    run = fill.run(store)
    ids = fill.prompts(store, 1000)
    for step in (1, 2):
        fill.step(run, step, ids, np.ones(1000))
    run.record_checkpoint(2, "two")
    freed = prune(store, run.record, keep_last=0).bytes_freed
    # 2000 rows of more than 60 bytes
    assert freed is None if kind == "postgresql" else freed > 120_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of keep_last and before"),
        ({"keep_last": 1, "before": 1}, "exactly one of keep_last and before"),
        ({"keep_last": -1}, "keep_last is -1; it must be at least 0"),
        ({"before": 0}, "before is 0; it must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(store, trained, arguments, message):
    with pytest.raises(StoreError, match=message):
        prune(store, trained[0].record, **arguments)


def test_a_run_without_history_has_nothing_to_prune(store, fill):
    run = fill.run(store)
    result = prune(store, run.record, keep_last=0)
    assert (result.steps, result.history_rows) == (0, 0)
