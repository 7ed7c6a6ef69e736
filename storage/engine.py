"""Transactions on SQLite and PostgreSQL: settings, locks, large results in parts, one-line errors."""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, CursorResult, Engine, create_engine, event, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from storage.errors import StoreError
from storage.retry import Interrupted, retried
from storage.url import Address

BUSY_TIMEOUT_S = 30.0
"""How long a SQLite writer waits for another one, in seconds."""

_READER_TIMEOUT_S = 2.0
_READERS = 4

CHUNK = 50_000
"""Rows fetched or inserted at a time in unbounded copies; bounds memory, not results."""

NETWORK_FS_VARIABLE = "OPENRLHF_DBB_ALLOW_NETWORK_FS"

# SQLite's WAL needs memory shared by all its processes, which these do not offer across hosts.
# Source: sqlite.org/wal.html; names as in the third column of /proc/mounts.
_NETWORK_FILE_SYSTEMS = {
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs",
    "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip

# SQLSTATEs worth a retry: serialization failure, deadlock, and a server that shuts down, crashes or starts.
# Source: PostgreSQL documentation, appendix A.
_TRANSIENT_STATES = {"40001", "40P01", "57P01", "57P02", "57P03"}

_SQLITE_SETTINGS = (
    "PRAGMA synchronous = NORMAL",  # safe against a crash of the process; record_checkpoint guards power loss
    "PRAGMA foreign_keys = ON",
    "PRAGMA cache_size = -65536",  # 64 MiB
    "PRAGMA temp_store = MEMORY",
)

_cursor_numbers = itertools.count(1)
_Result = TypeVar("_Result")


class Database:
    """One database, as used by one process.

    Cannot be pickled or used in a forked child: a connection shared by two processes corrupts both.
    """

    def __init__(self, address: Address, *, read_only: bool = False) -> None:
        self.kind = address.kind
        self.location = address.location
        self.is_sqlite = address.kind == "sqlite"
        self.engine = (_sqlite_engine if self.is_sqlite else _postgresql_engine)(address, read_only)
        self._read_only = read_only
        self._path = address.path
        self._pid = os.getpid()
        self._reached = False
        self._errors = (SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error)
        event.listen(self.engine, "begin", _begin_sqlite if self.is_sqlite else _begin_nothing)

    def __reduce__(self) -> NoReturn:
        raise StoreError(f"an open store cannot be pickled; send its URL and open {self.location} there")

    @contextmanager
    def transaction(self, *, write: bool = False, durable: bool = False) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, rolled back if the block raises.

        Args:
            write: take SQLite's write lock at the start, so that what was read stays true until the commit.
                A transaction that only reads sees one snapshot of the database.
            durable: the commit and all before it survive a power loss.

        Raises:
            Interrupted: an outage that may pass; see :func:`storage.retry.retried`.
            StoreError: any other error of the database or its driver.
        """
        if os.getpid() != self._pid:
            raise StoreError(f"{self.location} was opened in process {self._pid}; open it again in this process")
        if write and self._read_only:
            raise StoreError(f"{self.location} was opened for reading only; open it again to write")
        try:
            with self.engine.connect() as connection:
                self._reached = True
                options: dict[str, Any] = {"dbb_write": write}
                if not self.is_sqlite and not write:
                    options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
                connection = connection.execution_options(**options)
                with self._durable(connection, durable), connection.begin():
                    yield connection
        except self._errors as error:
            # Not chained: the driver's own exception may show statements and their values.
            kind = Interrupted if self._is_transient(error) else StoreError
            raise kind(f"{self.location}: {self._explain(error)}") from None

    def write_once(
        self, work: Callable[[Connection], _Result], committed: Callable[[Connection, _Result], bool]
    ) -> _Result:
        """The result of ``work`` in a write transaction; repeated after an outage, but committed only once.

        Args:
            work: what to read and write.
            committed: whether an earlier attempt, which had this result, was committed and only the acknowledgement
                was lost. Called in the transaction of the next attempt.

        Raises:
            StoreError: as :func:`storage.retry.retried`.
        """
        results: list[_Result] = []

        @retried
        def attempt() -> None:
            with self.transaction(write=True) as connection:
                if not (results and committed(connection, results[-1])):
                    results.append(work(connection))

        attempt()
        return results[-1]

    def _is_transient(self, error: BaseException) -> bool:
        """Whether the same transaction may succeed when retried."""
        cause: Any = error.orig if isinstance(error, DBAPIError) else error
        if self.is_sqlite:
            return "database is locked" in str(cause)
        state = getattr(cause, "sqlstate", None)
        if state is not None:
            return state in _TRANSIENT_STATES or state.startswith("08")
        # No SQLSTATE: the client has no connection. If it never had one, the URL is wrong.
        lost = isinstance(cause, self.engine.dialect.loaded_dbapi.OperationalError)
        return lost and (self._reached or "the database system is" in str(cause))

    @contextmanager
    def _durable(self, connection: Connection, durable: bool) -> Iterator[None]:
        if not (durable and self.is_sqlite):
            yield
            return
        # On the driver's connection: SQLite ignores this pragma inside a transaction.
        driver_connection: Any = connection.connection.dbapi_connection
        driver_connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            driver_connection.rollback()  # a failed commit leaves its transaction open
            driver_connection.execute("PRAGMA synchronous = NORMAL")

    def _explain(self, error: BaseException) -> str:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        message = " ".join(str(cause).split()) or type(cause).__name__
        if "file is not a database" in message:
            return "this file is not a SQLite database; name another file"
        if "unable to open database file" in message:
            return "the file cannot be opened; check that its folder exists and is writable"
        if "readonly database" in message:
            return "the file or its folder is read-only; make both writable or name another file"
        if "database is locked" in message:
            waited = _READER_TIMEOUT_S if self._read_only else BUSY_TIMEOUT_S
            return f"another process has held the write lock for {waited:g} s"
        if "disk is full" in message or "disk I/O error" in message or getattr(cause, "sqlstate", "") == "53100":
            return f"{message}: the disk is full, over quota or failing; the transaction was rolled back, make room"
        return message

    def among(self, column: str, ids: NDArray[np.int64], *, or_more: bool = False) -> tuple[str, dict[str, Any]]:
        """SQL that is true where the column is one of the ids, and its parameters.

        Args:
            ids: unique, ascending. Those of one data set mostly have no gaps, and a range is fastest.
            or_more: the SQL may also be true of other ids, at most as many.
        """
        if len(ids) and ids[-1] - ids[0] < len(ids) * (2 if or_more else 1):
            return f"{column} BETWEEN :lowest AND :highest", {"lowest": int(ids[0]), "highest": int(ids[-1])}
        return self.one_of(column), {"ids": self.ids(ids)}

    def one_of(self, column: str) -> str:
        """SQL that is true where the column is in the parameter ``:ids``, made by :meth:`ids`."""
        if self.is_sqlite:
            return f"{column} IN (SELECT value FROM json_each(:ids))"
        return f"{column} = ANY(CAST(:ids AS BIGINT[]))"

    def ids(self, values: NDArray[np.int64]) -> Any:
        """Any number of ids as ONE statement parameter."""
        listed = np.unique(values).tolist()
        return str(listed) if self.is_sqlite else listed

    def use_wal(self) -> None:
        """Let SQLite's readers and its writer work side by side; the setting stays in the file."""
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
                    # SQLite's busy timeout does not apply to a change of mode.
                    if "locked" not in str(error) or time.monotonic() > deadline:
                        raise StoreError(f"{self.location}: {self._explain(error)}") from None
                    time.sleep(0.02)
        if mode != "wal":
            raise StoreError(f"{self.location}: this file system does not allow SQLite's WAL mode; use a local disk")

    @cached_property
    def identity(self) -> str:
        """Equal for two stores if and only if they share their tables."""
        if self.is_sqlite:
            return os.path.realpath(self._path)
        with self.transaction() as connection:
            # One database may hold several stores, one per schema (the URL's search_path option).
            return f"{self.location} {connection.scalar(text('SELECT current_schema()'))}"

    def close(self) -> None:
        self.engine.dispose()


def execute(connection: Connection, sql: str, parameters: dict[str, Any]) -> CursorResult[Any]:
    """``connection.execute(text(sql), parameters)`` in half the time, for the statements of every step."""
    return connection.exec_driver_sql(_driver_sql(connection, sql), parameters)


def chunks(connection: Connection, sql: str, parameters: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """The result in lists of at most ``CHUNK`` rows (tuples), never all in memory at once."""
    # On the driver's connection: SQLAlchemy's rows take four times as long.
    driver_connection: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        cursor = driver_connection.cursor()
    else:
        # Named, hence a server-side cursor: rows that are not fetched yet stay on the server.
        cursor = driver_connection.cursor(f"dbb_{next(_cursor_numbers)}", binary=True)
    with closing(cursor):
        cursor.execute(_driver_sql(connection, sql), parameters)
        while rows := cursor.fetchmany(CHUNK):
            yield rows


def _driver_sql(connection: Connection, sql: str) -> str:
    return sql if connection.dialect.name == "sqlite" else _psycopg_sql(sql)


@cache
def _psycopg_sql(sql: str) -> str:
    """With parameters in psycopg's style: %(name)s."""
    return str(text(sql).compile(dialect=postgresql.psycopg.dialect()))  # type: ignore[no-untyped-call]


def check_sqlite_path(path: str, *, create: bool) -> None:
    """Raise StoreError if the file cannot be a store: it or its folder does not exist or is read-only, it is a
    folder, or it is on a network file system."""
    file, folder = Path(path), Path(path).parent
    if file.is_dir():
        raise StoreError(f"{path} is a folder; name a file in it")
    if not create and not file.exists():
        raise StoreError(f"there is no store at {path}; check the path, or start a run to create it")
    if not folder.is_dir():
        raise StoreError(f"the folder {folder} does not exist; create it or name another file")
    # SQLite writes two more files next to the database.
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
    """Type of the file system of an absolute path, given the text of /proc/mounts; "" if unknown."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        _, point, mount_kind, *_ = [*line.split(" "), "", "", ""]
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, character)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # ">=": of two mounts on the same point, the later one hides the earlier.
        if point and inside and len(point) >= longest:
            kind, longest = mount_kind, len(point)
    return kind


def _sqlite_engine(address: Address, read_only: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        # Threads may share it: the pool below lends a connection to one user at a time.
        # Isolation level None: the driver leaves BEGIN to _begin_sqlite.
        timeout = _READER_TIMEOUT_S if read_only else BUSY_TIMEOUT_S
        connection = sqlite3.connect(address.path, timeout=timeout, isolation_level=None, check_same_thread=False)
        for setting in (*_SQLITE_SETTINGS, *(["PRAGMA query_only = ON"] if read_only else [])):
            connection.execute(setting)
        return connection

    size = _READERS if read_only else 1
    return create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=size, max_overflow=0, hide_parameters=True
    )


# A peer that vanished silently is given up after a minute; the system's defaults wait for hours.
_KEEPALIVES = {"keepalives_idle": 20, "keepalives_interval": 10, "keepalives_count": 4, "tcp_user_timeout": 60_000}


def _postgresql_engine(address: Address, read_only: bool) -> Engine:
    assert address.url is not None
    options = {"connect_timeout": 10, "application_name": "openrlhf-dbb"} | _KEEPALIVES | address.secrets
    options = {key: value for key, value in options.items() if key not in address.url.query}
    try:
        # Pre-ping: minutes pass between two steps, and servers and poolers drop idle connections.
        return create_engine(
            address.url,
            connect_args=options,
            isolation_level="READ COMMITTED",
            pool_size=_READERS if read_only else 1,
            max_overflow=1,
            pool_pre_ping=True,
            hide_parameters=True,
        )
    except ImportError:
        raise StoreError(
            f"{address.location} needs the driver psycopg; run: pip install 'openrlhf-dbb[postgres]'"
        ) from None


def _begin_sqlite(connection: Connection) -> None:
    # Immediate: a transaction that turns from reader into writer fails at once if another has written.
    write = connection.get_execution_options().get("dbb_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _begin_nothing(connection: Connection) -> None:
    """PostgreSQL's driver begins transactions itself."""
