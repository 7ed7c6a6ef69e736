"""SIGKILL at every statement boundary: a store is always in the state before a transaction or after it.

The child is a fork that opens the store itself, and ends itself before each statement and commit,
and after the last.
"""

import itertools
import multiprocessing
import os
import re
import signal

import numpy as np
import pytest
from filler import check
from sqlalchemy import event
from sqlalchemy.pool import Pool

from openrlhf_dbb.storage import open_store


def rows_of_step(run, ids, fill):
    probes = fill.probes(ids[:1], [8], [2])
    return fill.rows(run, ids, [4, 0, 2][: len(ids)], shared={"clock": np.ones(1)}, probes=probes)


def prepare_training(url, fill):
    """A run "old" of three steps, a checkpoint at the first, owned by nobody; an empty run "new"."""
    with open_store(url) as store:
        run = fill.run(store, "old")
        ids = fill.prompts(store, 3)
        fill.step(run, 1, ids[:2], [4, 1], shared={"clock": np.zeros(1)})
        run.record_checkpoint(1, "one")
        fill.step(run, 2, ids, [1, 2, 3])
        run.record_step(3, rows_of_step(run, ids[1:], fill))
        run.record_evaluation(
            3, "training", [fill.evaluation(ids, [4, 1, 0])], model="tiny", config={}
        )
        run.release()
        fill.run(store, "new").release()


def take_step(store, fill, at_ready):
    run = store.claim_run(1)
    rows = rows_of_step(run, fill.prompts(store, 3), fill)
    at_ready()
    run.record_step(4, rows)


def resume(store, fill, at_ready):
    at_ready()
    run = store.claim_run(1)
    run.roll_back(1)


def warm_start(store, fill, at_ready):
    run = store.claim_run(2)
    ids = fill.prompts(store, 3)
    at_ready()
    run.warm_start(store, store.find_run("old"), ids, weight=0.5)


def mark_checkpoint(store, fill, at_ready):
    run = store.claim_run(1)
    at_ready()
    run.record_checkpoint(3, "three")


def evaluate(store, fill, at_ready):
    run = store.claim_run(1)
    ids = fill.prompts(store, 3)
    rows = [fill.evaluation(ids, [[4, 1, 0], [3, 1, 0]]), fill.evaluation(ids[:1], [4], "one")]
    at_ready()
    run.record_evaluation(3, "training", rows, model="tiny", config={}, generated_total=12)


def watch_driver(url, pass_boundary):
    """Call ``pass_boundary`` around everything that this process sends to a database, whatever sends it."""
    if url.startswith("sqlite"):
        # Also called for BEGIN and COMMIT, and for each row of a bulk statement.
        event.listen(
            Pool, "connect", lambda connection, _: connection.set_trace_callback(pass_boundary)
        )
        return
    import psycopg

    def watched(send):
        def call(*arguments, **options):
            pass_boundary()
            answer = send(*arguments, **options)
            pass_boundary()
            return answer

        return call

    psycopg.Cursor.execute = watched(psycopg.Cursor.execute)
    psycopg.Cursor.copy = watched(psycopg.Cursor.copy)
    psycopg.ServerCursor.execute = watched(psycopg.ServerCursor.execute)
    psycopg.Connection.commit = watched(psycopg.Connection.commit)


def killed_child(url, action, fill, boundary):
    """Whether the action got as far as this boundary, and was killed there."""
    left = [None]

    def pass_boundary(*_):
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def at_ready():
        left[0] = boundary

    def act():
        watch_driver(url, pass_boundary)
        event.listen(Pool, "checkin", pass_boundary)  # after the commit
        with open_store(url) as store:
            action(store, fill, at_ready)
        left[0] = None

    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


# The number of transactions that change something, from the first boundary on; and the least of boundaries.
@pytest.mark.parametrize(
    ("action", "changes", "kind", "least"),
    [
        (take_step, 1, "sqlite", 10),
        (take_step, 1, "postgresql", 15),
        (resume, 2, "sqlite", 20),
        (resume, 2, "postgresql", 30),
        (warm_start, 1, "sqlite", 8),
        (warm_start, 1, "postgresql", 8),
        (mark_checkpoint, 1, "sqlite", 6),
        (evaluate, 1, "sqlite", 8),
        (evaluate, 1, "postgresql", 12),
    ],
)
def test_a_kill_at_any_boundary_leaves_the_old_or_the_new_state(
    new_url, fill, action, changes, kind, least
):
    seen = []
    resumed = []
    killed = True

    def look(url):
        with open_store(url) as store:
            assert check(store) == []
            tables = fill.dump(store)
            # One database is used for many kills, as new ones are slow there: claims add up
            if kind == "postgresql":
                tables["dbb_event"] = [row[1:] for row in tables["dbb_event"] if "claim" not in row]
            elif action is resume:
                resumed.append(resumed_again(store))
            # without times, random ids and process ids
            shown = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z|[0-9a-f]{32}|\"pid\": \d+", "-", repr(tables))
            return shown.replace(store.location, "here")

    def resumed_again(store):
        run = store.claim_run(1)
        run.roll_back(1)
        fill.step(run, 2, fill.prompts(store, 3), [1, 2, 3])
        assert check(store) == []
        tables = fill.dump(store)
        return tables["dbb_posterior"], tables["dbb_history"]

    while killed:  # at each boundary, and at last at none
        if kind == "sqlite" or not seen or seen[-1] != seen[0]:
            url = new_url(kind, tables=True)
            prepare_training(url, fill)
        killed = killed_child(url, action, fill, boundary=len(seen))
        seen.append(look(url))
    assert len(seen) > least
    # One state after the other, in order, each from the moment of its commit on.
    assert len([state for state, _ in itertools.groupby(seen)]) == len(set(seen)) == changes + 1
    assert all(state == resumed[0] for state in resumed)
