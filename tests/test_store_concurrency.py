"""Many processes training at once on one database, and several that want the same run."""

import multiprocessing
import os
import signal
import threading
import traceback

import numpy as np
import pytest
from store_invariants import check

from openrlhf_dbb.storage import StoreError, open_store

PROMPTS, BATCH, SAVE_EVERY = 20, 4, 5


def in_processes(count, work):
    """Exit codes of ``count`` forks that call ``work(number)``; each opens the store itself."""
    children = []
    for number in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_eight_processes_may_open_a_new_store_at_once(kind, new_url):
    url, together = new_url(kind), multiprocessing.get_context("fork").Barrier(8)

    def work(number):
        together.wait()
        with open_store(url) as store:
            store.register_prompts([f"p{i}" for i in range(50)], [""] * 50)

    assert in_processes(8, work) == [0] * 8
    with open_store(url, create=False) as store:
        assert store.query("SELECT count(*) FROM prompts") == [(50,)]
        assert store.query("SELECT count(*) FROM dbb_version") == [(1,)]


def test_a_store_belongs_to_its_process(store):
    def work(number):
        with pytest.raises(StoreError, match=f"was opened in process {os.getppid()}; open it again in this process"):
            store.runs()

    assert in_processes(1, work) == [0]


def batch_of(step, ids):
    """(prompts, successes) of a step: the data set in turns, another reward each time round."""
    at = (np.arange(BATCH) + step * BATCH) % len(ids)
    return ids[at], (at + step) % 5


def train(url, number, steps, fill):
    """As a training does: steps, checkpoints, and once a return to the last checkpoint by a new owner."""
    with open_store(url) as store:
        run, ids = fill.run(store, f"run {number}"), np.sort(fill.prompts(store, PROMPTS))
        step, killed_at = 0, steps // 2 + number % SAVE_EVERY
        while step < steps:
            step += 1
            fill.step(run, step, *batch_of(step, ids))
            if step % SAVE_EVERY == 0:
                run.record_checkpoint(step, f"step{step}")
            if step == killed_at:
                run = store.claim_run(run.record.run_id)
                step -= step % SAVE_EVERY
                run.roll_back(step)
                killed_at = 0
        run.finish()


def expected_posteriors(ids, steps):
    state = {int(prompt): (1.0, 1.0) for prompt in ids}
    for step in range(1, steps + 1):
        for prompt, successes in zip(*batch_of(step, ids), strict=True):
            alpha, beta = state[int(prompt)]
            state[int(prompt)] = (0.5 * alpha + successes, 0.5 * beta + 4 - successes)
    return state


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize(("processes", "steps"), [(3, 15), pytest.param(16, 200, marks=pytest.mark.long)])
def test_processes_that_train_at_once_lose_and_double_nothing(new_url, fill, kind, processes, steps):
    url = new_url(kind)
    assert in_processes(processes, lambda number: train(url, number, steps, fill)) == [0] * processes
    with open_store(url, create=False) as store:
        assert store.query("SELECT count(*) FROM prompts") == [(PROMPTS,)]
        assert check(store) == []
        runs = store.runs()
        assert [(run.status, run.last_step) for run in runs] == [("finished", steps)] * processes
        counted = "SELECT run_id, count(*), sum(rollouts) FROM posterior_history GROUP BY run_id ORDER BY 1"
        assert store.query(counted) == [(run.run_id, steps * BATCH, 4 * steps * BATCH) for run in runs]
        expected = expected_posteriors(np.sort(fill.prompts(store, PROMPTS)), steps)
        for run in runs:
            rows = store.query("SELECT prompt_id, alpha, beta FROM posteriors WHERE run_id = :r", r=run.run_id)
            assert {prompt: (alpha, beta) for prompt, alpha, beta in rows} == expected


def test_of_processes_that_claim_a_run_at_once_one_owns_it_until_it_ends(url, fill, dump):
    with open_store(url) as store:
        fill.run(store).release()
    context = multiprocessing.get_context("fork")
    together, said = context.Barrier(4), context.Queue()

    def claim():
        with open_store(url) as store:
            together.wait()
            try:
                store.claim_run(1, wait_s=0)
                said.put((os.getpid(), "owner"))
            except StoreError as error:
                said.put((os.getpid(), str(error)))
            signal.pause()

    children = [context.Process(target=claim) for _ in range(4)]
    try:
        for child in children:
            child.start()
        lines = dict(said.get(timeout=60) for _ in children)
        (owner,) = [process for process, line in lines.items() if line == "owner"]
        held = f"run 'run' is still being written by process {owner} on "
        assert all(lines[other].startswith(held) for other in lines.keys() - {owner})
        with open_store(url) as store:
            before = dump(store)
            store.check_claimable(1, take_over=True)
            for claim in (lambda: store.claim_run(1, wait_s=0.3), lambda: store.check_claimable(1)):
                with pytest.raises(StoreError, match=held):
                    claim()
            assert dump(store) == before
            # A claim waits for an owner that is about to end, and not until that one is reaped.
            threading.Timer(0.3, os.kill, (owner, signal.SIGKILL)).start()
            run = store.claim_run(1, wait_s=60)
            os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)
            fill.step(run, 1, fill.prompts(store, 1), [1])
    finally:
        for child in children:
            child.kill()


def test_a_training_that_is_taken_over_stops_at_its_next_step(url, fill):
    """Two processes write one run in turns: only the newest owner's steps are there."""
    with open_store(url) as store:
        run, ids = fill.run(store), fill.prompts(store, 3)
        fill.step(run, 1, ids, [1, 2, 3])
    together = multiprocessing.get_context("fork").Barrier(4)

    def take_over(number):
        with open_store(url) as store:
            together.wait()
            run = store.claim_run(1, take_over=True)
            try:
                for step in range(run.record.last_step + 1, 80):
                    fill.step(run, step, ids, [step % 5, 1, 2])
            except StoreError as error:
                assert "was taken over by process" in str(error)

    assert in_processes(4, take_over) == [0] * 4
    with open_store(url) as store:
        assert store.query("SELECT last_step FROM runs") == [(79,)]
        assert check(store) == []
