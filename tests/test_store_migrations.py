"""Migration of databases that earlier versions wrote: all data kept, a fresh one's schema; refusals."""

import multiprocessing
import os
import re
import sqlite3

import numpy as np
import pytest

from storage import URL_VARIABLE, GroupRows, StoreError, migrate, open_store, schema
from storage.invariants import check
from storage.url import parse_url


@pytest.fixture(params=range(1, schema.SCHEMA_VERSION))
def version(request):
    """Each version before the present one."""
    return request.param


@pytest.fixture
def old(url, make_version, version):
    """URL of a database as the library wrote it at that version."""
    return make_version(url, version)


def rows_of(url, statement):
    """Rows read by the driver alone, whatever the version."""
    if url.startswith("sqlite"):
        with sqlite3.connect(parse_url(url).path) as connection:
            return connection.execute(statement).fetchall()
    import psycopg

    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def execute(url, statement):
    if url.startswith("sqlite"):
        with sqlite3.connect(parse_url(url).path) as connection:
            connection.execute(statement)
        return
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute(statement)


def schema_of(url):
    """Everything the database knows of its tables: columns in their order, types, comments, keys, indexes, views."""
    if url.startswith("sqlite"):
        rows = rows_of(url, "SELECT type, name, sql FROM sqlite_master WHERE name <> 'sqlite_sequence' ORDER BY 1, 2")
        return [(kind, name, re.sub(r"[\s\"]+", "", sql or "").lower()) for kind, name, sql in rows]
    return [
        rows_of(url, query)
        for query in (
            """SELECT c.relname, c.relkind, c.reloptions::text, obj_description(c.oid), a.attnum, a.attname,
                      format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
                      pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum)
               FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
               LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
               WHERE c.relnamespace = 'public'::regnamespace ORDER BY 1, 5""",
            """SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
               WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
            "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2",
            "SELECT viewname, definition FROM pg_views WHERE schemaname = 'public' ORDER BY 1",
        )
    ]


def tables_of(url):
    """Columns by table."""
    names = (
        """SELECT m.name, i.name FROM sqlite_master m, pragma_table_info(m.name) i
           WHERE m.type = 'table' ORDER BY 1, i.cid"""
        if url.startswith("sqlite")
        else """SELECT table_name, column_name FROM information_schema.columns
                WHERE table_schema = 'public' AND table_name LIKE 'dbb_%' ORDER BY 1, ordinal_position"""
    )
    tables = {}
    for table, column in rows_of(url, names):
        tables.setdefault(table, []).append(column)
    return {table: columns for table, columns in tables.items() if table not in ("dbb_version", "sqlite_sequence")}


def data_of(url, tables):
    return {
        table: sorted(rows_of(url, f"SELECT {', '.join(columns)} FROM {table}"), key=repr)
        for table, columns in tables.items()
    }


def test_an_upgrade_keeps_all_data_and_ends_at_the_schema_of_a_fresh_database(old, version, kind, new_url):
    tables = tables_of(old)
    before = data_of(old, tables)
    assert {table: len(before[table]) for table in ("dbb_run", "dbb_history", "dbb_usage", "dbb_probe")} == {
        "dbb_run": 3, "dbb_history": 8, "dbb_usage": 7, "dbb_probe": 1,
    }  # fmt: skip
    assert migrate(old) == (version, 4)
    assert data_of(old, tables) == before
    assert rows_of(old, "SELECT version FROM dbb_version") == [(4,)]
    fresh = new_url(kind)
    open_store(fresh).close()
    assert schema_of(old) == schema_of(fresh)
    assert migrate(old) == (4, 4)


@pytest.mark.parametrize("version", [None, 1, 2, 3])
def test_alembic_finds_no_difference_to_the_tables_in_python(url, make_version, version):
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    if version is not None:
        migrate(make_version(url, version))
    with open_store(url) as store, store.database.transaction() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []


def test_an_upgraded_database_is_used_as_any_other(old, version, fill):
    migrate(old)
    with open_store(old) as store:
        ids = store.register_prompts(["1 + 1 = ?", "2 + 2 = ?", "new"], ["2", "4", ""])
        run = store.claim_run(store.find_run("second").run_id)
        # Beta (4.5, 0.5), (1.5, 3.5) of "first", half of them at the start of "second", which has then seen 0 and 4
        # of 4 at step 1.
        run.roll_back(1)
        expected = [[1.125, 4.125], [4.375, 0.875], [np.nan, np.nan]]
        np.testing.assert_array_equal(run.load(ids).state, expected)
        assert run.load_shared()["clock"].tolist() == [1.0, 0.1]
        ordinals = run.last_ordinal() + np.arange(1, 4)
        run.record_groups(GroupRows(ordinals, np.zeros(3, int), ids, np.full(3, 4), policy_version=0))
        versions, inclusion = np.array([0.5, np.nan, 1.0]), np.array([0.25, 0.75, 1.0])  # of ids
        fill.step(run, 2, ids, [4, 4, 0], policy_version=versions, fates={"trained": ordinals}, inclusion=inclusion)
        packed = store.claim_run(store.find_run("packed").run_id)
        assert packed.load(ids[:1]).state.tolist() == [[1.0, 2.0, 3.0, 4.0]]
        assert check(store) == []
        run.record_metrics(2, {"kl": 0.5})
        metrics = "SELECT step, metrics FROM steps WHERE run_id = 2 ORDER BY step"
        of_step_1, lags = (None, []) if version == 1 else ('{"kl": 0.25, "loss": null}', [(0.0, 0.0)] * 2)
        assert store.query(metrics) == [(1, of_step_1), (2, '{"kl": 0.5}')]
        # What was there is of its step's own policy: step - 1.
        assert store.query("SELECT policy_version, lag FROM rollouts") == lags
        visits = (
            "SELECT policy_version, lag, inclusion FROM posterior_history WHERE run_id = 2 "
            "ORDER BY step, prompt_id = :first DESC"
        )
        assert store.query(visits, first=int(ids[0]))[:3] == [
            (0, 0, None), (0, 0, None), (0.5, 0.5, 0.25),
        ]  # fmt: skip
        settled = store.query("SELECT ordinal, fate, step, lag FROM groups WHERE fate <> 'abandoned' ORDER BY ordinal")
        assert settled == [(i, "trained", 2, 1.0) for i in ordinals.tolist()]


def test_opening_an_older_database_names_both_versions_and_the_command(old, version, kind):
    before = schema_of(old)
    where = re.escape(old) if kind == "sqlite" else rf"\${URL_VARIABLE}"
    for create in (True, False):
        with pytest.raises(
            StoreError,
            match=rf"has schema version {version} \(openrlhf-dbb .*\), this openrlhf-dbb \(.*\) needs version 4; "
            rf"back it up, then run: openrlhf-dbb migrate --store.url {where}$",
        ):
            open_store(old, create=create)
    assert schema_of(old) == before


def test_a_newer_database_is_refused_with_both_versions(url):
    open_store(url).close()
    execute(url, "UPDATE dbb_version SET version = 99, library_version = '9.9'")
    for refused in (migrate, open_store):
        with pytest.raises(StoreError, match=r"version 99, .* version 4; upgrade .* to 9.9 or later"):
            refused(url)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_database_from_before_the_first_release_is_refused_with_what_to_do(url, kind, version):
    execute(url, "CREATE TABLE dbb_schema (version INTEGER PRIMARY KEY, library_version TEXT NOT NULL)")
    execute(url, f"INSERT INTO dbb_schema VALUES ({version}, '0.1.0')")
    execute(url, "CREATE TABLE dbb_run (run_id INTEGER PRIMARY KEY, name TEXT)")
    before = schema_of(url)
    advice = "move the file away, or name" if kind == "sqlite" else "name"
    for refused in (open_store, lambda url: open_store(url, create=False), migrate):
        with pytest.raises(
            StoreError,
            match=rf"made by a development version .* before 0\.1\.0, .*; {advice} a new database with --sto",
        ):
            refused(url)
    assert schema_of(url) == before


def test_there_is_nothing_to_migrate(url):
    with pytest.raises(StoreError, match=r"there is no store at|holds no posteriors"):
        migrate(url)
    open_store(url).close()
    assert migrate(url) == (4, 4)


def test_a_run_that_is_being_written_is_named_and_nothing_is_changed(old, version):
    before = schema_of(old)
    execute(old, f"UPDATE dbb_run SET owner_host = '{os.uname().nodename}', owner_pid = {os.getpid()} WHERE run_id = 2")
    for take_over in (False, True):
        with pytest.raises(
            StoreError, match=rf"run 'second' is owned by process {os.getpid()} on .*; end that process"
        ):
            migrate(old, take_over=take_over)
    assert schema_of(old) == before
    execute(old, "UPDATE dbb_run SET owner_started = '1@another-boot' WHERE run_id = 2")  # it has ended
    assert migrate(old) == (version, 4)


def test_a_run_owned_on_another_host_is_migrated_only_when_asked(old, version):
    execute(old, "UPDATE dbb_run SET owner_host = 'elsewhere', owner_pid = 42 WHERE run_id = 2")
    with pytest.raises(StoreError, match=r"'second' is owned by process 42 on elsewhere .*take_over=True"):
        migrate(old)
    assert migrate(old, take_over=True) == (version, 4)


@pytest.mark.parametrize("before_groups", [1, 2])
def test_another_programs_view_is_not_overwritten(url, make_version, before_groups):
    old = make_version(url, before_groups)
    execute(old, "CREATE VIEW groups AS SELECT 1 AS x")
    before = schema_of(old)
    with pytest.raises(StoreError, match="already has a table or view 'groups' that is not openrlhf-dbb's"):
        migrate(old)
    assert schema_of(old) == before


def test_views_of_others_over_ours_stay(old, version):
    execute(
        old,
        "CREATE VIEW mine AS SELECT max(s.step) AS step FROM steps s JOIN posterior_history h ON h.run_id = s.run_id",
    )
    assert migrate(old) == (version, 4)
    assert rows_of(old, "SELECT step FROM mine") == [(2,)]


def _migrate_together(url, barrier, outcomes):
    barrier.wait()
    outcomes.put(migrate(url)[1])


def test_four_processes_may_migrate_at_once(old):
    fork = multiprocessing.get_context("fork")
    barrier, outcomes = fork.Barrier(4), fork.Queue()
    children = [fork.Process(target=_migrate_together, args=(old, barrier, outcomes)) for _ in range(4)]
    for child in children:
        child.start()
    assert [outcomes.get(timeout=60) for _ in children] == [4] * 4
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0] * 4
    open_store(old).close()


def test_no_password_is_in_the_advice(old):
    with pytest.raises(StoreError) as refusal:
        open_store(old.replace("postgres:@", "postgres:p%40ss@"))
    assert "p%40ss" not in str(refusal.value) and "p@ss" not in str(refusal.value)
