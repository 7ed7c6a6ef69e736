"""An outage that passes loses nothing; a reader never sees half a step."""

import logging
import sqlite3
import threading

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


def _warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_postgresql_stopped_and_started_in_mid_training(own_postgres, fill, caplog):
    caplog.set_level(logging.INFO, logger="openrlhf_dbb.storage")
    with open_store(own_postgres.new_url()) as store:
        run, ids = fill.run(store), fill.prompts(store, 20)
        fill.train(run, ids, [1, 2])
        own_postgres.stop()
        later = threading.Timer(1, own_postgres.start)
        later.start()
        fill.train(run, ids, [3, 4])
        later.join()
        assert len(_warnings(caplog)) == 1
        assert caplog.records[-1].getMessage().startswith("the store is back after ")
        fill.check_trained(store, run, ids, 4)


def test_a_server_that_stays_away_ends_in_one_line_and_resumes_exactly(own_postgres, fill, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.RETRY_LIMIT_S", 0.5)
    url = own_postgres.new_url()
    with open_store(url) as store:
        run, ids = fill.run(store), fill.prompts(store, 20)
        fill.train(run, ids, [1, 2, 3])
        rows = fill.rows(run, ids, fill.successes(4, 20))
        own_postgres.stop()
        try:
            with pytest.raises(StoreError, match=r"^postgresql://\S+: .*; gave up after \d+ s; resume ") as refusal:
                run.record_step(4, rows)
            with pytest.raises(StoreError, match=r"^postgresql://"):  # never reached: refused at once
                open_store(url)
        finally:
            own_postgres.start()
        assert "\n" not in str(refusal.value)
    with open_store(url) as store:
        run = store.claim_run(store.find_run("run").run_id)
        fill.train(run, ids, [4, 5])
        fill.check_trained(store, run, ids, 5)


def test_the_connection_killed_before_each_statement_of_a_step(open_new, fill):
    import psycopg

    store = open_new("postgresql")
    run, ids = fill.run(store), fill.prompts(store, 3)
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


def test_a_sqlite_file_locked_for_a_while_by_another_writer(open_new, fill, caplog, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.storage.engine.BUSY_TIMEOUT_S", 0.05)
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, [1])
    other = sqlite3.connect(store.location, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    assert store.query("SELECT last_step FROM runs") == [(1,)]  # readers do not wait
    later = threading.Timer(1, other.execute, ["COMMIT"])
    later.start()
    fill.train(run, ids, [2, 3])
    later.join()
    assert ["held the write lock for 0.05 s" in line for line in _warnings(caplog)] == [True]
    fill.check_trained(store, run, ids, 3)
