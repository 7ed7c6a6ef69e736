"""Who may write a run: fence, take-over, release, finish; how runs are found; many processes at once."""

import multiprocessing
import os
import re
import signal
import socket
import threading

import numpy as np
import pytest
from filler import check
from sqlalchemy import text

from openrlhf_dbb.storage import StoreError, open_store

PROMPTS = 20
SAVE_EVERY = 5


def test_a_second_claim_fences_the_first_owner(url, fill):
    with open_store(url) as one, open_store(url) as two:
        old = fill.run(one)
        ids = fill.prompts(one, 1)
        rows = fill.step(old, 1, ids, [4])
        late = fill.rows(old, ids, [4])
        new = two.claim_run(old.record.run_id)
        before = fill.dump(one)
        for call in (
            lambda: old.load(ids),  # the posteriors are another's
            lambda: old.load_shared(),
            lambda: old.record_step(2, late),
            lambda: old.record_step(1, rows),  # not even a repeat
            lambda: old.record_checkpoint(1, "tag"),
            lambda: old.record_evaluation(
                1, "training", [fill.evaluation(ids, [4])], model="", config={}
            ),
            lambda: old.roll_back(0),
            lambda: old.finish(),
            lambda: old.release(),
            lambda: old.warm_start(one, old.record, ids),
        ):
            with pytest.raises(
                StoreError, match=rf"'run' .*taken over by process {os.getpid()} on .*nothing"
            ):
                call()
        assert fill.dump(one) == before
        assert new.record.last_step == 1
        fill.step(new, 2, ids, [4])


def _pretend(store, **columns):
    assignments = ", ".join(f"{name} = :{name}" for name in columns)
    with store.database.transaction(write=True) as connection:
        connection.execute(text(f"UPDATE dbb_run SET {assignments}"), columns)


@pytest.mark.parametrize(
    ("host", "replaced"), [("elsewhere", 0), (socket.gethostname(), 1), (socket.gethostname(), 2)],
    ids=["host", "boot", "PID namespace"],
)  # fmt: skip
def test_an_owner_in_another_place_must_be_taken_over(store, fill, host, replaced):
    """Two machines may share a host name, and so may two containers; neither knows the other's processes."""
    record = fill.run(store).record
    place = record.owner.started.split("@")
    place[replaced] = "another"
    _pretend(store, owner_host=host, owner_pid=2**22 + 1, owner_started="@".join(place))
    message = rf"owned by process {2**22 + 1} on {host}, last .* \(another host, boot or container\).*take_over"
    for claim in (lambda: store.claim_run(record.run_id), lambda: store.delete_run(record)):
        with pytest.raises(StoreError, match=message):
            claim()
    store.claim_run(record.run_id, take_over=True)
    [(kind, detail)] = store.query("SELECT kind, detail FROM dbb_event")
    assert kind == "take_over"
    assert f'"from": {{"host": "{host}", "pid": {2**22 + 1}}}' in detail


def test_a_process_id_given_out_again_is_not_the_owner(store, fill):
    run_id = fill.run(store).record.run_id
    started = store.runs()[0].owner.started.partition("@")[2]
    # Lives, but started at another time
    _pretend(store, owner_pid=os.getppid(), owner_started=f"1@{started}")
    store.claim_run(run_id, wait_s=0)


def test_a_released_run_is_free_for_every_host(store, fill):
    run = fill.run(store)
    run.release()
    assert store.query("SELECT status FROM runs") == [("stale",)]
    with pytest.raises(StoreError, match="'run' was released; claim it again"):
        fill.step(run, 1, fill.prompts(store, 1), [1])
    again = store.claim_run(run.record.run_id, wait_s=0)
    assert store.query("SELECT status FROM runs") == [("running",)]
    fill.step(again, 1, fill.prompts(store, 1), [1])


def test_a_finished_run_can_neither_be_written_nor_claimed(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    fill.step(run, 1, ids, [1])
    run.finish()
    run.finish()
    assert run.record.status == "finished"
    message = "run 'run' finished at step 1; start a new run, which may begin from its posteriors"
    with pytest.raises(StoreError, match=message):
        fill.step(run, 2, ids, [1])
    with pytest.raises(StoreError, match=message):
        run.roll_back(0)
    with pytest.raises(StoreError, match=message):
        run.record_evaluation(1, "training", [fill.evaluation(ids, [4])], model="", config={})
    evaluation = {"model": "", "config": {}, "run": run.record}
    assert store.record_evaluation("after it", [fill.evaluation(ids, [4])], **evaluation) > 0
    with pytest.raises(StoreError, match=message):
        store.claim_run(run.record.run_id)


def test_find_run_by_name_then_uuid_then_id_and_the_latest(store, fill):
    assert store.latest_run() is None
    one = fill.run(store, "one").record
    two = fill.run(store, "two").record
    other = fill.run(store, str(one.run_id)).record  # its name is the id of another run
    assert store.find_run("two") == two
    assert store.find_run(two.uuid) == two
    assert store.find_run(str(two.run_id)) == two
    assert store.find_run(str(one.run_id)) == other
    assert [run.name for run in store.runs()] == ["one", "two", str(one.run_id)]
    fill.run(store, "last").finish()
    assert store.latest_run().name == "last" and store.latest_run(unfinished=True) == other


def test_a_run_that_never_trained_leaves_its_name_to_the_next(store, fill):
    ids = fill.prompts(store, 1)
    fill.run(store, "again").release()  # its start failed
    run = fill.run(store, "again")
    run.record_evaluation(0, "training", [fill.evaluation(ids, [4])], model="", config={})
    run.release()
    with pytest.raises(StoreError, match="there is a run named 'again'"):
        fill.run(store, "again")
    assert [kept.uuid for kept in store.runs()] == [run.record.uuid]


def test_a_deleted_run_leaves_nothing_but_its_prompts(store, fill):
    source = fill.run(store, "source")
    ids = fill.prompts(store, 2)
    fill.step(source, 1, ids, [4, 1])
    before = fill.dump(store)
    run = fill.run(store)
    run.warm_start(store, source.record, ids)
    fill.step(
        run,
        1,
        ids,
        [1, 2],
        kept=fill.rollouts(ids, [1, 2]),
        probes=fill.probes(ids, [8, 8], [1, 2]),
    )
    run.record_checkpoint(1, "tag")
    run.record_evaluation(1, "training", [fill.evaluation(ids, [4, 4])], model="", config={})
    run.finish()
    store.delete_run(run.record)
    assert fill.dump(store) == before
    with pytest.raises(StoreError, match="'run' is no longer in"):
        store.delete_run(run.record)


# ---- many processes


FORKED = multiprocessing.get_context("fork")


def in_processes(count, work):
    """Exit codes of ``count`` forks that call ``work(number)``; each opens the store itself."""
    children = [FORKED.Process(target=work, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]


def test_eight_processes_may_open_a_new_store_at_once(kind, new_url):
    url = new_url(kind)
    together = FORKED.Barrier(8)

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
        with pytest.raises(StoreError, match=rf"process {os.getppid()}; open it again"):
            store.runs()

    assert in_processes(1, work) == [0]


def train(url, number, steps, fill):
    """Write steps and checkpoints as a training does; once a new owner returns to the last checkpoint."""
    with open_store(url) as store:
        run = fill.run(store, f"run {number}")
        ids = np.sort(fill.prompts(store, PROMPTS))
        step = 0
        killed_at = steps // 2 + number % SAVE_EVERY
        while step < steps:
            step += 1
            fill.train(run, ids, [step])
            if step % SAVE_EVERY == 0:
                run.record_checkpoint(step, f"step{step}")
            if step == killed_at:
                run = store.claim_run(run.record.run_id)
                step -= step % SAVE_EVERY
                run.roll_back(step)
                killed_at = 0
        fill.check_trained(store, run, ids, steps)
        run.finish()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    ("processes", "steps"), [(3, 15), pytest.param(16, 200, marks=pytest.mark.long)]
)
def test_processes_that_train_at_once_lose_and_double_nothing(
    new_url, fill, kind, processes, steps
):
    url = new_url(kind)
    assert (
        in_processes(processes, lambda number: train(url, number, steps, fill)) == [0] * processes
    )
    with open_store(url, create=False) as store:
        assert store.query("SELECT count(*) FROM prompts") == [(PROMPTS,)]
        assert check(store) == []
        assert [(run.status, run.last_step) for run in store.runs()] == [
            ("finished", steps)
        ] * processes


def claim_and_wait(url, together, said):
    """In a process: claim the run with others, say who owns it, and wait for the end."""
    with open_store(url) as store:
        together.wait()
        try:
            store.claim_run(1, wait_s=0)
            said.put((os.getpid(), "owner"))
        except StoreError as error:
            said.put((os.getpid(), str(error)))
        signal.pause()


@pytest.fixture
def one_of_four(url, fill):
    """Four processes that claim a run at once: the owner, and by process what each has said."""
    with open_store(url) as store:
        fill.run(store).release()
    together = FORKED.Barrier(4)
    said = FORKED.Queue()
    children = [FORKED.Process(target=claim_and_wait, args=(url, together, said)) for _ in range(4)]
    try:
        for child in children:
            child.start()
        lines = dict(said.get(timeout=300) for _ in children)
        (owner,) = [process for process, line in lines.items() if line == "owner"]
        yield owner, lines
    finally:
        for child in children:
            child.kill()


def test_of_processes_that_claim_a_run_at_once_one_owns_it_until_it_ends(url, fill, one_of_four):
    owner, lines = one_of_four
    held = rf"run 'run' .* process {owner} on "
    for other in lines.keys() - {owner}:
        assert re.match(held, lines[other])
    with open_store(url) as store:
        before = fill.dump(store)
        store.check_claimable(1, take_over=True)
        with pytest.raises(StoreError, match=held):
            store.claim_run(1, wait_s=0.3)
        with pytest.raises(StoreError, match=held):
            store.check_claimable(1)
        assert fill.dump(store) == before
        # A claim waits for an owner that is about to end, and not until that one is reaped.
        threading.Timer(0.3, os.kill, (owner, signal.SIGKILL)).start()
        run = store.claim_run(1, wait_s=300)
        os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)
        fill.step(run, 1, fill.prompts(store, 1), [1])


def test_a_training_that_is_taken_over_stops_at_its_next_step(url, fill):
    with open_store(url) as store:
        run = fill.run(store)
        ids = fill.prompts(store, 3)
        fill.step(run, 1, ids, [1, 2, 3])
    together = FORKED.Barrier(4)

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
