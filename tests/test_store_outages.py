"""Outages in the middle of training: what passes is waited for, with nothing lost or doubled; the rest is one line."""

import logging
import random
import sqlite3
import threading
import time
from contextlib import contextmanager

import pytest
from sqlalchemy import event, text

from storage import StoreError, open_store


@pytest.fixture(autouse=True)
def logged(caplog):
    """What the store logs."""
    caplog.set_level(logging.INFO, logger="storage")
    return caplog


@pytest.fixture
def own_url(own_postgres):
    return own_postgres.new_url()


@contextmanager
def meanwhile(work):
    """Run ``work`` in a thread beside the block; its errors are raised at the end."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert errors == []


def warnings_of(logged):
    return [record.getMessage() for record in logged.records if record.levelno >= logging.WARNING]


def outage(server, seconds):
    def work():
        time.sleep(0.2)
        server.stop()
        time.sleep(seconds)
        server.start()

    return work


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.long])])
def test_postgresql_stopped_and_started_in_mid_training(own_postgres, own_url, fill, logged, seconds):
    with open_store(own_url) as store:
        run, ids = fill.run(store), fill.prompts(store, 20)
        step, back = 0, threading.Event()

        def interrupt():
            outage(own_postgres, seconds)()
            back.set()

        with meanwhile(interrupt):
            while not back.is_set():
                step += 1
                fill.train(run, ids, [step])
        fill.train(run, ids, range(step + 1, step + 4))
        assert len(warnings_of(logged)) == 1
        assert warnings_of(logged)[0].endswith("; retrying for up to 120 s")
        assert [record.getMessage() for record in logged.records][-1].startswith("the store is back after ")
        fill.check_trained(store, run, ids, step + 3)


def test_a_server_that_stays_away_ends_in_one_line_and_resumes_exactly(own_postgres, own_url, fill, monkeypatch):
    monkeypatch.setattr("storage.retry.LIMIT_S", 0.5)
    with open_store(own_url) as store:
        run, ids = fill.run(store), fill.prompts(store, 20)
        fill.train(run, ids, range(1, 4))
        rows = fill.rows(run, ids, fill.successes(4, 20))
        own_postgres.stop()
        try:
            with pytest.raises(
                StoreError, match=r"^postgresql://\S+: .*; gave up after \d+ s; resume when the outage is over$"
            ) as refusal:
                run.record_step(4, rows)
        finally:
            own_postgres.start()
        assert "\n" not in str(refusal.value)
    with open_store(own_url) as store:
        run = store.claim_run(store.find_run("run").run_id)
        assert run.record.last_step == 3
        fill.train(run, ids, [4, 5])
        fill.check_trained(store, run, ids, 5)


def test_a_server_never_reached_is_refused_at_once(own_postgres, own_url, logged):
    own_postgres.stop()
    try:
        with pytest.raises(StoreError, match=r"^postgresql://"):
            open_store(own_url)
    finally:
        own_postgres.start()
    assert logged.records == []


def terminate_others(url):
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE datname = current_database() AND pid <> pg_backend_pid()"""
        )


def test_connections_killed_at_random_moments(open_new, fill, logged):
    store = open_new("postgresql")
    run, ids = fill.run(store), fill.prompts(store, 20)
    moments, done = random.Random(1), threading.Event()

    def kill():
        while not done.is_set():
            time.sleep(moments.uniform(0, 0.1))
            terminate_others(store.url)

    with meanwhile(kill):
        try:
            fill.train(run, ids, range(1, 101))
        finally:
            done.set()
    assert warnings_of(logged)
    fill.check_trained(store, run, ids, 100)


def test_the_connection_killed_before_each_statement_of_a_step(open_new, fill):
    store = open_new("postgresql")
    run, ids = fill.run(store), fill.prompts(store, 3)
    countdown = [0]

    def statement(*_):
        countdown[0] -= 1
        if countdown[0] == 0:
            terminate_others(store.url)

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


def test_a_deadlock_is_survived(open_new, fill, logged):
    import psycopg

    store = open_new("postgresql")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, [1])
    rows = fill.rows(run, ids, fill.successes(2, 3))
    with psycopg.connect(store.url) as other:
        # The step waits for the posterior, then the other for the run; the step looks first, and is ended.
        other.execute("SET deadlock_timeout = '60s'")
        other.execute("SELECT * FROM dbb_posterior FOR UPDATE")

        def cross():
            with psycopg.connect(store.url, autocommit=True) as watcher:
                while not watcher.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                    time.sleep(0.01)
            other.execute("UPDATE dbb_run SET heartbeat_at = heartbeat_at")
            other.rollback()

        with meanwhile(cross):
            run.record_step(2, rows)
    assert ["deadlock detected" in line for line in warnings_of(logged)] == [True]
    fill.check_trained(store, run, ids, 2)


def test_serialization_failures_are_repeated_and_logged_once(open_new, fill, logged):
    store = open_new("postgresql")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, [1])
    # A sequence is not undone with its transaction: the first two tries fail.
    for statement in (
        "CREATE SEQUENCE tries",
        """CREATE FUNCTION fail_twice() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF nextval('tries') <= 2 THEN
               RAISE EXCEPTION 'could not serialize access' USING ERRCODE = 'serialization_failure';
             END IF; RETURN NEW; END $$""",
        "CREATE TRIGGER fail_twice BEFORE INSERT ON dbb_step FOR EACH ROW EXECUTE FUNCTION fail_twice()",
    ):
        with store.database.transaction(write=True) as connection:
            connection.execute(text(statement))
    fill.train(run, ids, [2, 3])
    assert ["could not serialize access" in line for line in warnings_of(logged)] == [True]
    fill.check_trained(store, run, ids, 3)


def test_what_does_not_pass_is_not_repeated(open_new, fill, logged):
    store = open_new("postgresql")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, [1])
    rows = fill.rows(run, ids, fill.successes(2, 3))
    name = store.query("SELECT current_database()")[0][0]
    with store.database.engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
        connection.commit()
    store.database.engine.dispose()  # as after a switch to a standby, which is read-only
    with pytest.raises(StoreError, match=r"cannot execute UPDATE in a read-only transaction$"):
        run.record_step(2, rows)
    assert logged.records == []


def test_a_sqlite_file_locked_for_a_while_by_another_writer(open_new, fill, logged, monkeypatch):
    monkeypatch.setattr("storage.engine.BUSY_TIMEOUT_S", 0.05)
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, [1])
    other = sqlite3.connect(store.location, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")

    def let_go():
        time.sleep(1)
        other.execute("COMMIT")

    with meanwhile(let_go):
        fill.train(run, ids, [2])
    fill.train(run, ids, [3])
    assert ["held the write lock for 0.05 s" in line for line in warnings_of(logged)] == [True]
    fill.check_trained(store, run, ids, 3)


def test_a_sqlite_file_locked_for_too_long(open_new, fill, monkeypatch):
    monkeypatch.setattr("storage.engine.BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("storage.retry.LIMIT_S", 0.3)
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 3)
    fill.train(run, ids, [1])
    other = sqlite3.connect(store.location, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(
        StoreError,
        match=r"another process has held the write lock .*; gave up after \d+ s; resume when the outage is over$",
    ) as refusal:
        fill.train(run, ids, [2])
    assert "\n" not in str(refusal.value)
    other.execute("ROLLBACK")
    fill.train(run, ids, [2])
    fill.check_trained(store, run, ids, 2)
