"""Transactions on SQLite and PostgreSQL: settings, locks, bulk insert, errors in one line."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, Table, create_engine, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from storage.errors import StoreError
from storage.url import Address

BUSY_TIMEOUT_S = 30.0
"""How long a SQLite writer waits for another one."""

CHUNK = 50_000
"""Rows fetched or inserted at a time in unbounded copies; bounds memory, not results."""

NETWORK_FS_VARIABLE = "OPENRLHF_DBB_ALLOW_NETWORK_FS"

# SQLite's WAL needs memory shared by all its processes, which these do not give across hosts.
# Source: sqlite.org/wal.html; names as in the third column of /proc/mounts.
_NETWORK_FILE_SYSTEMS = {
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs",
    "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip

_SQLITE_SETTINGS = (
    "PRAGMA synchronous = NORMAL",  # safe against a crash of the process; record_checkpoint guards power loss
    "PRAGMA foreign_keys = ON",
    "PRAGMA cache_size = -65536",  # 64 MiB
    "PRAGMA temp_store = MEMORY",
)


class Database:
    """One database as one process uses it.

    Not to be pickled or used in a forked child: a connection shared by two processes corrupts both.
    """

    def __init__(self, address: Address) -> None:
        self.kind = address.kind
        self.location = address.location
        self.is_sqlite = address.kind == "sqlite"
        self.engine = _sqlite_engine(address.path) if self.is_sqlite else _postgresql_engine(address)
        self._path = address.path
        self._pid = os.getpid()
        self._errors = (SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error)
        event.listen(self.engine, "begin", _begin_sqlite if self.is_sqlite else _begin_nothing)

    def __reduce__(self) -> NoReturn:
        raise StoreError(f"an open store cannot be pickled; send its URL and open {self.location} in the other process")

    @contextmanager
    def transaction(self, *, write: bool = False, durable: bool = False) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, undone if the block raises.

        Args:
            write: take SQLite's write lock at the start, so that what is read stays true until the commit.
                A transaction that only reads sees one state of the database throughout.
            durable: the commit, and all before it, survive a power loss.

        Raises:
            StoreError: anything the database or its driver refuses.
        """
        if os.getpid() != self._pid:
            raise StoreError(f"{self.location} was opened in process {self._pid}; open it again in this one")
        try:
            with self.engine.connect() as connection:
                options: dict[str, Any] = {"dbb_write": write}
                if not self.is_sqlite and not write:
                    options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
                connection = connection.execution_options(**options)
                with self._durable(connection, durable), connection.begin():
                    yield connection
        except self._errors as error:
            # Not chained: the driver's own exception may show statements and their values.
            raise StoreError(f"{self.location}: {self._explain(error)}") from None

    @contextmanager
    def _durable(self, connection: Connection, durable: bool) -> Iterator[None]:
        if not (durable and self.is_sqlite):
            yield
            return
        # On the driver's connection, since SQLite ignores it inside a transaction.
        driver_connection: Any = connection.connection.dbapi_connection
        driver_connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            driver_connection.rollback()  # a commit that failed leaves its transaction open
            driver_connection.execute("PRAGMA synchronous = NORMAL")

    def _explain(self, error: BaseException) -> str:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        message = " ".join(str(cause).split()) or type(cause).__name__
        if "file is not a database" in message:
            return "this file is not a SQLite database; name another one"
        if "unable to open database file" in message:
            return "the file cannot be opened; check that its folder exists and is writable"
        if "readonly database" in message:
            return "the file or its folder is read-only; make both writable or name another file"
        if "database is locked" in message:
            return f"another process has held the write lock for {BUSY_TIMEOUT_S:g} s; try again when it is done"
        return message

    def insert_rows(self, connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows given in the order of the table's columns, with one bulk statement."""
        if not rows:
            return
        columns = ", ".join(column.name for column in table.columns)
        if self.is_sqlite:
            marks = ", ".join("?" for _ in table.columns)
            connection.exec_driver_sql(f"INSERT INTO {table.name} ({columns}) VALUES ({marks})", list(rows))
            return
        driver_connection: Any = connection.connection.dbapi_connection
        with (
            driver_connection.cursor() as cursor,
            cursor.copy(f"COPY {table.name} ({columns}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)

    def one_of(self, column: str) -> str:
        """SQL that is true where the column is among the parameter ``:ids`` made by :meth:`ids`."""
        if self.is_sqlite:
            return f"{column} IN (SELECT value FROM json_each(:ids))"
        return f"{column} = ANY(CAST(:ids AS BIGINT[]))"

    def ids(self, values: NDArray[np.int64]) -> Any:
        """Any number of ids as ONE statement parameter."""
        listed = np.unique(values).tolist()
        return str(listed) if self.is_sqlite else listed

    def use_wal(self) -> None:
        """Let SQLite readers and the writer work side by side; kept in the file, so done once."""
        if not self.is_sqlite:
            return
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        with self.engine.connect() as connection:
            driver_connection: Any = connection.connection.dbapi_connection
            while True:
                try:
                    mode = driver_connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                    break
                except sqlite3.OperationalError as error:
                    # SQLite does not apply its busy timeout to this change of mode.
                    if "locked" not in str(error) or time.monotonic() > deadline:
                        raise StoreError(f"{self.location}: {self._explain(error)}") from None
                    time.sleep(0.02)
        if mode != "wal":
            raise StoreError(f"{self.location}: this file system does not allow SQLite's WAL mode; use a local disk")

    @cached_property
    def identity(self) -> str:
        """Equal for two stores only if their tables are the same ones."""
        if self.is_sqlite:
            return os.path.realpath(self._path)
        with self.transaction() as connection:
            # One database may hold several sets of tables, told apart by the URL's search_path option.
            return f"{self.location} {connection.scalar(text('SELECT current_schema()'))}"

    def close(self) -> None:
        self.engine.dispose()


def chunks(connection: Connection, sql: str, parameters: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """The result in lists of at most ``CHUNK`` rows, never all of it in memory at once."""
    return connection.execute(text(sql).execution_options(yield_per=CHUNK), parameters).partitions()


def check_sqlite_path(path: str, *, create: bool) -> None:
    """Refuse a file that cannot work as a store, in words a user can act on.

    Raises:
        StoreError: no such file or folder, no permission, a folder, or a network file system.
    """
    file, folder = Path(path), Path(path).parent
    if file.is_dir():
        raise StoreError(f"{path} is a folder; name a file in it")
    if not create and not file.exists():
        raise StoreError(f"there is no store at {path}; check the path, or start a run to create it")
    if not folder.is_dir():
        raise StoreError(f"the folder {folder} does not exist; create it or name another file")
    # SQLite writes two more files beside the database.
    if create and not (os.access(folder, os.W_OK) and (not file.exists() or os.access(file, os.W_OK))):
        raise StoreError(f"{path} cannot be written: the file or its folder is read-only; name another file")
    mounts = Path("/proc/mounts")
    if mounts.exists() and os.environ.get(NETWORK_FS_VARIABLE) != "1":
        kind = file_system(os.path.realpath(path), mounts.read_text(errors="surrogateescape"))
        if kind in _NETWORK_FILE_SYSTEMS:
            raise StoreError(
                f"{path} is on a network file system ({kind}), where SQLite may lose data; use a local disk "
                f"or PostgreSQL, or set {NETWORK_FS_VARIABLE}=1 if only this host ever opens the file"
            )


def file_system(path: str, mounts: str) -> str:
    """Type of the file system that holds an absolute path, given the text of /proc/mounts; "" if unknown."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        _, point, mount_kind, *_ = [*line.split(" "), "", "", ""]
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, character)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # ">=": of two mounts on one point, the later one hides the earlier.
        if point and inside and len(point) >= longest:
            kind, longest = mount_kind, len(point)
    return kind


def _sqlite_engine(path: str) -> Engine:
    def connect() -> sqlite3.Connection:
        # Threads may share it, one at a time: the pool below lends its only connection to one user.
        # Isolation level None: the driver leaves BEGIN to _begin_sqlite.
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        for setting in _SQLITE_SETTINGS:
            connection.execute(setting)
        return connection

    return create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=1, max_overflow=0, hide_parameters=True
    )


def _postgresql_engine(address: Address) -> Engine:
    assert address.url is not None
    options = {"connect_timeout": 10, "application_name": "openrlhf-dbb"} | address.secrets
    options = {key: value for key, value in options.items() if key not in address.url.query}
    try:
        # Pre-ping: minutes pass between two steps, and servers and poolers drop idle connections.
        return create_engine(
            address.url,
            connect_args=options,
            isolation_level="READ COMMITTED",
            pool_size=1,
            max_overflow=1,
            pool_pre_ping=True,
            hide_parameters=True,
        )
    except ImportError:
        raise StoreError(
            f"{address.location} needs the driver psycopg; run: pip install 'openrlhf-dbb[postgres]'"
        ) from None


def _begin_sqlite(connection: Connection) -> None:
    # Immediate: a transaction that turns from reader to writer fails at once when another has written.
    write = connection.get_execution_options().get("dbb_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _begin_nothing(connection: Connection) -> None:
    """PostgreSQL's driver begins by itself."""
