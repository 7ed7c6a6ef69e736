"""Held-out accuracy of a run, and whether its owner has ended, as the store tells them."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage import owner
from storage.held_out import held_out, held_out_prompts

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(store, fill):
    """A run of two steps of three prompts."""
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, (1, 2))
    return run


@pytest.fixture
def ids(store, fill):
    return np.sort(fill.prompts(store, 3))


def _record(run, step, rows, name="training"):
    run.record_evaluation(step, name, rows, model="tiny", config={})


def test_held_out_accuracy_over_steps(store, fill, run, ids):
    # of 12 responses: 3, 6 and 6 right; 6 is reached first at step 1
    for step, successes in ((0, [1, 2, 0]), (1, [4, 2, 0]), (2, [1, 1, 4])):
        _record(run, step, [fill.evaluation(ids, successes)])
    found = held_out(store, run.record)
    assert (found.step.tolist(), found.accuracy.tolist(), found.best) == ([0, 1, 2], [0.25, 0.5, 0.5], 1)
    assert (found.benchmarks, found.prompts, found.samples) == (1, 3, 4)


def test_benchmarks_weigh_the_same_and_repeated_runs_add_samples(store, fill, run, ids):
    # 1 of 4 on the one prompt of logic; 4 + 0 + 2 and 2 + 2 + 2 of 12 in the two evaluation runs of sums
    rows = [fill.evaluation(ids, [[4, 0, 2], [2, 2, 2]]), fill.evaluation(ids[:1], [1], "logic")]
    _record(run, 2, rows)
    found = held_out(store, run.record)
    assert found.accuracy.tolist() == [(0.5 + 0.25) / 2]
    assert (found.benchmarks, found.prompts, found.samples) == (2, 4, 8)


def test_only_what_was_measured_during_this_training_counts(store, fill, run, ids):
    other = fill.run(store, "other")
    _record(other, 0, [fill.evaluation(ids, [4, 4, 4])])
    _record(run, 1, [fill.evaluation(ids, [4, 4, 4])], "afterwards")
    store.record_evaluation(
        "training", [fill.evaluation(ids, [4, 4, 4])], model="tiny", config={}, run=run.record
    )  # of no step
    assert held_out(store, run.record) is None
    assert held_out_prompts(store, run.record, 1) == {}


def test_a_step_with_a_benchmark_without_a_verified_response_is_left_out(store, fill, run, ids):
    none, nan = np.zeros((1, 3), dtype=int), np.full((1, 3), np.nan)
    unverified = dataclasses.replace(
        fill.evaluation(ids, [0, 0, 0], "logic"), verified=none, successes=none + 0.0, best=nan, majority=nan
    )
    _record(run, 0, [fill.evaluation(ids, [4, 4, 4]), unverified])
    assert held_out(store, run.record) is None
    _record(run, 1, [fill.evaluation(ids, [4, 4, 4])])
    assert held_out(store, run.record).step.tolist() == [1]


def test_held_out_accuracy_of_each_prompt(store, fill, run, ids):
    sums = fill.evaluation(ids[[2, 0, 2]], [[4, 1, 0], [2, 3, 0]])  # a prompt twice, two evaluation runs
    logic = dataclasses.replace(fill.evaluation(ids[:2], [1, 0], "logic"), verified=np.array([[2, 0]]))
    logic = dataclasses.replace(logic, best=np.array([[1.0, np.nan]]), majority=np.full((1, 2), np.nan))
    _record(run, 1, [sums, logic])
    _record(run, 2, [fill.evaluation(ids, [0, 0, 0])])
    found = held_out_prompts(store, run.record, 1)
    assert list(found) == ["logic", "sums"]
    by_prompt = {name: (ids.tolist(), accuracy.tolist()) for name, (ids, accuracy) in found.items()}
    assert by_prompt["sums"] == ([ids[0], ids[2]], [4 / 8, (4 + 2 + 0 + 0) / 16])
    assert by_prompt["logic"] == ([ids[0]], [1 / 2])  # of the verified ones; nothing verified of the other prompt


def test_an_owner_on_this_host_is_looked_up(store, fill):
    mine = fill.run(store).record.owner
    assert mine == owner.Owner.of_this_process()
    assert not owner.has_ended(mine, silent_s=1e6)
    code = "import os; from storage.owner import Owner; o = Owner.of_this_process(); print(o.pid, o.started)"
    pid, started = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert owner.has_ended(owner.Owner(mine.host, int(pid), started), silent_s=0)


@pytest.mark.parametrize("elsewhere", [owner.Owner("another-host", 1, None), owner.NOBODY])
def test_an_owner_that_cannot_be_looked_up_is_judged_by_its_silence(elsewhere):
    assert not owner.has_ended(elsewhere, silent_s=3_599)
    assert owner.has_ended(elsewhere, silent_s=3_601)


def test_a_record_knows_its_owner_and_its_last_write(store, fill, run):
    found = store.find_run("run")
    assert found.owner == owner.Owner.of_this_process()
    assert found.created_at <= found.heartbeat_at
    assert found == run.record  # both change while the run stays the same
    run.release()
    assert store.find_run("run").owner == owner.NOBODY
