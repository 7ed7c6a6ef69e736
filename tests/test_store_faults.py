"""An outage that passes loses nothing; a reader never sees half a step."""

import contextlib
import os
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import event

from openrlhf_dbb.storage import StoreError, open_store


def test_a_reader_sees_no_half_step(store, fill):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    fill.step(run, 1, ids, [4, 4])
    seen = []
    with open_store(store.url) as reader:

        def look(*_):
            posteriors = reader.query("SELECT DISTINCT alpha, step FROM posteriors")
            history = reader.query("SELECT max(step) FROM posterior_history")
            seen.append(([tuple(row) for row in posteriors], history[0][0]))

        event.listen(store.database.engine, "before_cursor_execute", look)
        rows = fill.rows(run, ids, [4, 4])
        seen.clear()
        run.record_step(2, rows)
        event.remove(store.database.engine, "before_cursor_execute", look)
        assert len(seen) >= 4
        assert set(map(str, seen)) == {str(([(4.5, 1)], 1))}
        look()
        assert seen[-1] == ([(6.25, 2)], 2)


def test_a_training_goes_on_after_postgresql_was_stopped_and_started(own_postgres, fill, caplog):
    with open_store(own_postgres.get_uri()) as store:
        run = fill.run(store)
        ids = fill.prompts(store, 20)
        fill.train(run, ids, [1, 2])
        own_postgres.stop()
        later = threading.Timer(1, own_postgres.start)
        later.start()
        fill.train(run, ids, [3, 4])
        later.join()
        assert len(caplog.messages) == 1
        fill.check_trained(store, run, ids, 4)


def test_a_server_that_stays_away_ends_in_one_line_and_resumes_exactly(
    own_postgres, fill, monkeypatch
):
    monkeypatch.setattr("openrlhf_dbb.storage.errors.RETRY_LIMIT_S", 0.5)
    url = own_postgres.get_uri()
    with open_store(url) as store:
        run = fill.run(store)
        ids = fill.prompts(store, 20)
        fill.train(run, ids, [1, 2, 3])
        rows = fill.rows(run, ids, fill.successes(4, 20))
        own_postgres.stop()
        try:
            with pytest.raises(
                StoreError, match=r"^postgresql://\S+: .*; gave up after \d+ s; resume "
            ) as refusal:
                run.record_step(4, rows)
            # Never reached: refused at once
            with pytest.raises(StoreError, match=r"^postgresql://"):
                open_store(url)
        finally:
            own_postgres.start()
        assert "\n" not in str(refusal.value)
    with open_store(url) as store:
        run = store.claim_run(store.find_run("run").run_id)
        fill.train(run, ids, [4, 5])
        fill.check_trained(store, run, ids, 5)


def test_a_step_is_stored_once_though_the_connection_is_killed_before_any_of_its_statements(
    open_new, fill
):
    import psycopg

    store = open_new("postgresql")
    run = fill.run(store)
    ids = fill.prompts(store, 3)
    countdown = [0]

    def statement(*_):
        countdown[0] -= 1
        if countdown[0] == 0:
            with psycopg.connect(store.url, autocommit=True) as connection:
                connection.execute(
                    """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                       WHERE datname = current_database() AND pid <> pg_backend_pid()"""
                )

    event.listen(store.database.engine, "before_cursor_execute", statement)
    event.listen(store.database.engine, "commit", statement)
    step = 0
    while countdown[0] <= 0:  # until a step ended before its turn came
        step += 1
        rows = fill.rows(run, ids, fill.successes(step, 3))
        countdown[0] = step
        run.record_step(step, rows)
    assert step > 5
    countdown[0] = 0
    fill.check_trained(store, run, ids, step)


LOSSES = {
    "deleted": lambda path: [Path(f"{path}{end}").unlink() for end in ("", "-wal", "-shm")],
    "WAL deleted": lambda path: Path(f"{path}-wal").unlink(),
    "index deleted": lambda path: Path(f"{path}-shm").unlink(),
    "moved": lambda path: path.rename(path.with_name("b.db")),
    "replaced": lambda path: shutil.copy(path, path.with_name("b.db")).replace(path),
    "emptied": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "an older copy over it": lambda path: shutil.copyfile(path.with_name("older.db"), path),
    "another store over it": lambda path: shutil.copyfile(path.with_name("other.db"), path),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_sqlite_file_ends_the_run_in_one_line(tmp_path, fill, loss):
    path = tmp_path / "runs" / "a.db"
    path.parent.mkdir()
    with open_store(f"{path.parent}/other.db") as other:
        fill.train(fill.run(other), fill.prompts(other, 50), range(1, 10))
    with open_store(str(path)) as store, open_store(str(path)) as reader:
        run = fill.run(store)
        ids = fill.prompts(store, 20)
        for steps, copy in (([1, 2], "older.db"), ([3, 4], "newer.db")):
            fill.train(run, ids, steps)
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.copy(path, path.with_name(copy))
        run.record_checkpoint(4, "tag")
        assert reader.query("SELECT last_step FROM runs") == [(4,)]
        rows = fill.rows(run, ids, fill.successes(5, 20))
        LOSSES[loss](path)
        for call in (lambda: run.record_step(5, rows), run.finish):
            with pytest.raises(StoreError, match=r"resume|load the posteriors again") as refusal:
                call()
            assert "\n" not in str(refusal.value)
        if not loss.endswith(("it", "emptied", "truncated")):
            with pytest.raises(
                StoreError, match="was deleted, moved or replaced while it was open"
            ):
                reader.query("SELECT last_step FROM runs")


def overwrite(path, content, start):
    with open(path, "r+b") as file:
        file.seek(int(start * path.stat().st_size))
        file.write(content)


DAMAGES = {
    "emptied": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros over all": lambda path: overwrite(path, bytes(path.stat().st_size), 0),
    "noise over the middle": lambda path: overwrite(
        path, b"\x5a" * (path.stat().st_size // 4), 0.5
    ),
}


@pytest.mark.parametrize("moment", ["between two steps", "in a step", "before the end"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("end", ["", "-wal"])
def test_a_sqlite_file_damaged_in_place_is_not_taken_for_a_finished_run(
    tmp_path, fill, end, damage, moment
):
    path = tmp_path / "a.db"
    target = tmp_path / f"a.db{end}"
    with open_store(str(path)) as store:
        run = fill.run(store)
        ids = fill.prompts(store, 60)
        fill.train(run, ids, range(1, 10))
        if not end:  # else the WAL, which holds every page so far, would repair the file
            with contextlib.closing(sqlite3.connect(path)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        fill.train(run, ids, [10])
        inserted = []

        def at_first_insert(connection, cursor, statement, *_):
            if statement.startswith("INSERT INTO dbb_history") and not inserted:
                inserted.append(statement)
                DAMAGES[damage](target)

        if moment == "in a step":
            event.listen(store.database.engine, "after_cursor_execute", at_first_insert)
        elif moment == "between two steps":
            DAMAGES[damage](target)
        with pytest.raises(StoreError, match=r"damaged.*restore it or a backup") as refusal:
            fill.train(run, ids, [11, 12])
            if moment == "before the end":
                DAMAGES[damage](target)
            run.finish()
        assert "\n" not in str(refusal.value)
        if moment != "before the end":
            assert run.record.last_step == 10


def test_a_second_writer_does_not_hide_the_damage_of_a_wal(tmp_path, fill):
    path = tmp_path / "a.db"
    with open_store(str(path)) as one, open_store(str(path)) as two:
        runs = [fill.run(store, name) for store, name in ((one, "one"), (two, "two"))]
        ids = fill.prompts(one, 60)
        for step in range(1, 21):
            if step == 10:
                DAMAGES["noise over the middle"](tmp_path / "a.db-wal")
            for run in runs:
                fill.train(run, ids, [step])
        with pytest.raises(StoreError, match="damaged"):
            runs[0].finish()


@pytest.mark.parametrize("size", [0.5, 0.9])
def test_a_damaged_sqlite_file_is_not_resumed(tmp_path, fill, size):
    path = tmp_path / "a.db"
    with open_store(str(path)) as store:
        fill.train(fill.run(store), fill.prompts(store, 60), range(1, 30))
    overwrite(path, b"\x5a" * 4096, size)
    with open_store(str(path), create=False) as store:
        with pytest.raises(StoreError, match=r"damaged.*restore it or a backup") as refusal:
            store.claim_run(1)
        assert store.runs()[0].status == "running"
    assert "\n" not in str(refusal.value)


def test_a_touched_wal_is_no_damage(tmp_path, fill):
    with open_store(f"{tmp_path}/a.db") as store:
        run = fill.run(store)
        ids = fill.prompts(store, 20)
        for step in range(1, 5):
            fill.train(run, ids, [step])
            os.utime(tmp_path / "a.db-wal")
        run.finish()
        fill.check_trained(store, run, ids, 4)


def test_other_writers_of_a_sqlite_file_are_no_damage(tmp_path, fill):
    with open_store(f"{tmp_path}/a.db") as one, open_store(f"{tmp_path}/a.db") as two:
        runs = [fill.run(store, name) for store, name in ((one, "one"), (two, "two"))]
        ids = fill.prompts(one, 100)
        for step in range(1, 60):  # beyond a checkpoint of the WAL, which is due after 1,000 pages
            for run in runs:
                fill.train(run, ids, [step])
        os.utime(tmp_path / "a.db")
        for run, store in zip(runs, (one, two), strict=True):
            run.finish()
            fill.check_trained(store, run, ids, 59)


def test_a_training_waits_for_another_writer_of_its_sqlite_file(
    open_new, fill, caplog, monkeypatch
):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.BUSY_TIMEOUT_S", 0.05)
    store = open_new("sqlite")
    run = fill.run(store)
    ids = fill.prompts(store, 3)
    fill.train(run, ids, [1])
    other = sqlite3.connect(store.location, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    assert store.query("SELECT last_step FROM runs") == [(1,)]  # readers do not wait
    later = threading.Timer(1, other.execute, ["COMMIT"])
    later.start()
    fill.train(run, ids, [2, 3])
    later.join()
    assert ["holds the write lock; retrying" in line for line in caplog.messages] == [True]
    fill.check_trained(store, run, ids, 3)
