"""Bring an older database to the present schema: one module per version, with Alembic's operations.

The version is the one row of ``dbb_version``, so a store needs no second version table and every release can read
the version of a database that it refuses. To change the schema: change ``storage/schema.py``, raise
``SCHEMA_VERSION`` to N and add ``version_N.py`` here, tested as in ``tests/test_store_migrations.py``. A module is not
changed once released, so it spells out what it adds and imports nothing from ``schema``:

- ``ADDS``: names of its new tables and views
- ``upgrade()``: from version N - 1 to N, by ``alembic.op``; inside the one transaction of all steps

    version_2   kept rollouts with their texts, and each step's metrics
    version_3   the ledger of groups, and policy versions
    version_4   inclusion probabilities of prompts that a strategy chose
"""

from __future__ import annotations

from importlib import import_module

from sqlalchemy import Connection, inspect, text
from sqlalchemy.schema import SetColumnComment, SetTableComment

from storage import schema
from storage.engine import Database, check_sqlite_path
from storage.errors import StoreError
from storage.owner import NOBODY, Owner
from storage.retry import retried
from storage.url import choose_url, parse_url


def migrate(url: str | None = None, *, take_over: bool = False, dry_run: bool = False) -> tuple[int, int]:
    """Bring a database to this library's schema in one transaction: all of it or nothing.

    Any number of processes may do so at once; a database that is up to date is left as it is.

    Args:
        url: as for ``open_store``.
        take_over: migrate even if an unfinished run is owned by a process on another host, which cannot be checked.
        dry_run: change nothing.

    Returns:
        The version before, and now (or as it would be).

    Raises:
        StoreError: no store there, a schema that is newer or from before the first release, a run that is being
            written, or a name that is taken.
    """
    address = parse_url(choose_url(url))
    if address.kind == "sqlite":
        check_sqlite_path(address.path, create=False)
    database = Database(address)
    try:
        return _migrate(database, take_over, dry_run)
    finally:
        database.close()


@retried
def _migrate(database: Database, take_over: bool, dry_run: bool) -> tuple[int, int]:
    with database.transaction() as connection:
        found = _found(connection, database)
    if dry_run or found == schema.SCHEMA_VERSION:
        return found, schema.SCHEMA_VERSION
    with database.transaction(write=True) as connection:
        schema.lock(connection, database)
        # Check again, now that nobody else can change it.
        found = _found(connection, database)
        if found < schema.SCHEMA_VERSION:
            _refuse_owned(connection, database, take_over)
            _upgrade(connection, database, found)
    return found, schema.SCHEMA_VERSION


def _found(connection: Connection, database: Database) -> int:
    stored = schema.stored_version(connection, database)
    if stored is None:
        raise StoreError(f"{database.location} holds no posteriors; check the URL")
    return stored[0]


def _refuse_owned(connection: Connection, database: Database, take_over: bool) -> None:
    """Raise StoreError if a process that may still be alive owns one of the runs."""
    if not database.is_sqlite:
        connection.execute(text("SET LOCAL lock_timeout = '30s'"))
        # No run can be claimed between this check and the commit.
        connection.execute(text("LOCK TABLE dbb_run IN SHARE ROW EXCLUSIVE MODE"))
    runs = text(
        """SELECT name, owner_host, owner_pid, owner_started, last_step, heartbeat_at FROM dbb_run
           WHERE status = 'running' ORDER BY run_id"""
    )
    for name, host, pid, started, last_step, heartbeat_at in connection.execute(runs):
        owner = Owner(host, pid, started)
        if owner == NOBODY or (take_over and not owner.is_local) or (owner.is_local and not owner.is_alive()):
            continue
        advice = (
            "end that process first"
            if owner.is_local
            else "which cannot be checked from here; if it has ended, migrate with take_over=True (--store.take_over)"
        )
        raise StoreError(
            f"{database.location}: run {name!r} is owned by {owner} (step {last_step}, last heard of at "
            f"{heartbeat_at}); {advice}"
        )


def _upgrade(connection: Connection, database: Database, found: int) -> None:
    # Imported here: only a migration needs Alembic.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    with Operations.context(MigrationContext.configure(connection)):
        for version in range(found + 1, schema.SCHEMA_VERSION + 1):
            module = import_module(f"storage.migrations.version_{version}")
            inspector = inspect(connection)
            taken = {*inspector.get_table_names(), *inspector.get_view_names()}
            schema.refuse_taken(taken & set(module.ADDS), database)
            module.upgrade()
    if not database.is_sqlite:
        for table in schema.metadata.sorted_tables:
            connection.execute(SetTableComment(table))
            for column in table.columns:
                connection.execute(SetColumnComment(column))
    connection.execute(
        schema.schema_version.update().values(version=schema.SCHEMA_VERSION, library_version=schema.library_version())
    )
