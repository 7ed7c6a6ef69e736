"""Databases, SQLite and PostgreSQL: connections, transactions, errors in words, large results."""

import functools
import os
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import URL, Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from openrlhf_dbb.storage import decode
from openrlhf_dbb.storage.address import Address
from openrlhf_dbb.storage.errors import Interrupted, StoreError
from openrlhf_dbb.storage.files import DAMAGES, RESTORE, Files, has_wal, is_writable

BUSY_TIMEOUT_S = 30.0  # that a SQLite writer waits for another one
CHUNK = 50_000  # rows fetched at a time; bounds the memory of large results
_READER_TIMEOUT_S = 2.0
_READERS = 4

# SQLSTATEs after which a repeat may succeed: serialization failure, deadlock, and a server that
# shuts down, crashes or starts. Source: PostgreSQL documentation, appendix A.
_TRANSIENT_STATES = {"40001", "40P01", "57P01", "57P02", "57P03"}


class Database:
    """One database, as used by one process."""

    def __init__(self, address: Address, *, read_only: bool = False) -> None:
        self.location = address.location
        self.is_sqlite = address.url is None
        make_engine = _sqlite_engine if self.is_sqlite else _postgresql_engine
        self.engine = make_engine(address, read_only)
        self._read_only = read_only
        self._pid = os.getpid()
        self._reached = False
        self._files = Files(address.path) if self.is_sqlite else None
        driver_error = self.engine.dialect.loaded_dbapi.Error
        # The drivers raise the last two for texts and numbers that a column cannot hold.
        self._errors = (SQLAlchemyError, driver_error, UnicodeError, OverflowError)

    @contextmanager
    def transaction(self, *, write: bool = False, durable: bool = False) -> Iterator[Connection]:
        """Open one transaction: committed at the end of the block, rolled back if the block raises.

        Args:
            write: take SQLite's write lock at the start, so that what was read stays true until the
                commit. A transaction that only reads sees one snapshot of the database.
            durable: the commit and all before it survive a power loss.

        Raises:
            Interrupted: an outage that may pass; see :func:`retried`.
            StoreError: any other error of the database or its driver, or a SQLite file that was
                lost.
        """
        # A connection that two processes share corrupts the data of both.
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.location} was opened in process {self._pid}; open it again in this process"
            )
        try:
            with self.engine.connect() as connection:
                self._reached = True
                if self._files is not None:
                    if self._read_only:
                        self._files.follow(connection)
                    with _sqlite_transaction(connection, self._files, write, durable):
                        yield connection
                else:
                    if self._read_only or not write:
                        connection.execution_options(
                            isolation_level="REPEATABLE READ",
                            postgresql_readonly=True,
                        )
                    with connection.begin():
                        yield connection
        except self._errors as error:
            # Not from error: the driver's own exception may show statements and values.
            raise self._store_error(error) from None

    def check_content(self) -> None:
        """Raise StoreError if a SQLite file is damaged; 200 MB take some 2 s."""
        if self._files is not None:
            try:
                self._files.check_content("quick_check")
            except self._errors as error:
                raise self._store_error(error) from None

    def _store_error(self, error: BaseException) -> StoreError:
        cause: Any = error
        if isinstance(error, DBAPIError) and error.orig is not None:
            cause = error.orig
        message = " ".join(str(cause).split()) or type(cause).__name__
        problem = f"{self.location}: {self._in_words(message)}"
        if self._is_transient(cause, message) and not self._read_only:
            return Interrupted(problem)
        return StoreError(problem)

    def _in_words(self, message: str) -> str:
        """Return an error of the database with what to do about it, where that is known."""
        if "file is not a database" in message:
            return "this file is not a SQLite database; name another file"
        if "unable to open database file" in message or "readonly database" in message:
            return self._cannot_write()
        if "database is locked" in message:
            return "another process holds the write lock"
        if "no such table" in message:
            return f"it holds no posteriors ({message}); restore it or a backup"
        if any(part in message for part in DAMAGES):
            return (
                f"{message}: the disk is over quota or failing, or the file was damaged; "
                f"make room, or {RESTORE}"
            )
        return message

    def _cannot_write(self) -> str:
        """Return why a SQLite file could not be opened or written, and what to do."""
        if os.path.isdir(self.location):
            return "this is a folder; name a file"
        if not os.path.exists(self.location):
            if self._read_only:
                return "the file was deleted or moved; put it back, or restore a backup"
            return "the file cannot be opened; check that its folder exists and is writable"
        if is_writable(self.location):
            if self._read_only:
                return "the store was opened read-only; open it for writing"
            return "the file cannot be written; check that its -wal and -shm file are writable"
        advice = "make the file and its folder writable, or copy them to a folder that is"
        if has_wal(self.location):
            return (
                "the file or its folder is read-only here, and "
                f"its last steps are in {self.location}-wal; {advice}"
            )
        return f"the file or its folder is read-only here; {advice}"

    def _is_transient(self, cause: Any, message: str) -> bool:
        if self.is_sqlite:
            return "database is locked" in message
        state = getattr(cause, "sqlstate", None)
        if state is not None:
            return state in _TRANSIENT_STATES or state.startswith("08")
        # No SQLSTATE: the client has no connection. If it never had one, the URL is wrong.
        lost = isinstance(cause, self.engine.dialect.loaded_dbapi.OperationalError)
        return lost and (self._reached or "the database system is" in message)

    def check_encoding(self, connection: Connection) -> None:
        """Raise StoreError if a PostgreSQL database cannot store every text."""
        if self.is_sqlite or self._read_only:
            return
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
        if encoding != "UTF8":
            raise StoreError(
                f"{self.location} has the encoding {encoding}, which cannot store every text; "
                "it must be UTF8: CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0, "
                "and name that database"
            )

    def one_of(self, column: str) -> str:
        """Return SQL that is true where the column is in the parameter ``:ids``, of :meth:`ids`."""
        if self.is_sqlite:
            return f"{column} IN (SELECT value FROM json_each(:ids))"
        return f"{column} = ANY(CAST(:ids AS BIGINT[]))"

    def ids(self, values: NDArray[np.int64]) -> Any:
        """Return any number of ids as ONE statement parameter, since these are limited."""
        listed = np.unique(values).tolist()
        return str(listed) if self.is_sqlite else listed

    def use_wal(self) -> None:
        """Let SQLite's readers and its writer work side by side; the setting stays in the file.

        Raises:
            StoreError: the database cannot be opened or changed.
        """
        try:
            with self.engine.connect() as connection:
                driver(connection).execute("PRAGMA journal_mode = WAL")
                # A WAL seen before may be that of a process that has closed the file.
                connection.info.clear()
        except self._errors as error:
            raise self._store_error(error) from None


@contextmanager
def _sqlite_transaction(
    connection: Connection,
    files: Files,
    write: bool,
    durable: bool,
) -> Iterator[None]:
    files.check_same(connection)
    if write:
        files.check_written(connection)
    # On the driver's connection: SQLite ignores this pragma inside a transaction.
    # NORMAL is safe against a crash of the process, FULL against power loss.
    driver(connection).execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    with connection.begin():
        # Immediate: a reader that turns into a writer fails at once if another has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
        before = files.status()
        yield
        if write:
            files.check_transaction(before)
    files.note(connection, wrote=write)


def driver(connection: Connection) -> Any:
    """Return the connection of sqlite3 or psycopg behind SQLAlchemy's."""
    return connection.connection.dbapi_connection


def chunks(
    connection: Connection,
    sql: str,
    parameters: dict[str, Any],
) -> Generator[Sequence[Any], None, None]:
    """Yield the result in lists of at most ``CHUNK`` rows (tuples), never all in memory at once."""
    # On the driver's connection: SQLAlchemy's rows take four times as long.
    if connection.dialect.name == "sqlite":
        cursor = driver(connection).cursor()
    else:
        # A cursor with a name is of the server: rows that are not fetched yet stay there.
        cursor = driver(connection).cursor("dbb", binary=True)
        sql = str(text(sql).compile(dialect=connection.dialect))  # :name as %(name)s
    with closing(cursor):
        cursor.execute(sql, parameters)
        while rows := cursor.fetchmany(CHUNK):
            yield rows


def table(
    connection: Connection,
    kind: list[tuple[str, str]],
    sql: str,
    values: dict[str, Any],
) -> NDArray[np.void]:
    """Return the result as records with these names and types; NULL becomes NaN.

    Raises:
        StoreError: a value is not of its type; SQLite stores any value in any column.
    """
    # Closed here even if a value has another type, while its connection is open.
    with closing(chunks(connection, sql, values)) as parts_of_rows:
        parts = [_records(rows, kind) for rows in parts_of_rows]
    return np.concatenate([np.empty(0, dtype=kind), *parts])


def _records(rows: Sequence[Any], kind: list[tuple[str, str]]) -> NDArray[np.void]:
    try:
        return np.array(rows, dtype=kind)
    except (TypeError, ValueError, OverflowError):
        for row in rows:
            _check_types(row, kind)
        raise


def _check_types(row: Sequence[Any], kind: list[tuple[str, str]]) -> None:
    for column, value in zip(kind, row, strict=True):
        try:
            np.array([(value,)], dtype=[column])
        except (TypeError, ValueError, OverflowError):
            names = [name for name, _ in kind]
            whole = dict(zip(names, row, strict=True))
            what = f"{column[0]} of the row {whole}"
            raise decode.refusal(what, value, "a number") from None


def _sqlite_engine(address: Address, read_only: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        # Threads may share it: the pool below lends a connection to one user at a time.
        # Isolation level None: the driver leaves BEGIN to Database.transaction.
        timeout = _READER_TIMEOUT_S if read_only else BUSY_TIMEOUT_S
        location = address.path
        if read_only:
            mode = "rw"  # not the default, by which SQLite makes a file that is gone
            if not is_writable(location) and not has_wal(location):
                mode = "ro&immutable=1"  # else SQLite would have to make files beside this one
            location = f"file:{quote(location)}?mode={mode}"
        connection = sqlite3.connect(
            location,
            uri=read_only,
            timeout=timeout,
            isolation_level=None,
            check_same_thread=False,
        )
        # Somebody may have edited a text so that it is no UTF-8; the rows beside it stay readable.
        connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA cache_size = -65536")  # 64 MiB: a negative size is in KiB
        connection.execute("PRAGMA temp_store = MEMORY")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        return connection

    if read_only and not is_writable(address.path):
        # A new connection each time, since a writer with more rights may begin a WAL meanwhile.
        return create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)
    return create_engine(
        "sqlite://",
        creator=connect,
        poolclass=QueuePool,
        pool_size=_READERS if read_only else 1,
        max_overflow=0,
        hide_parameters=True,
    )


def _postgresql_engine(address: Address, read_only: bool) -> Engine:
    assert address.url is not None
    url = address.url.difference_update_query(["prepare_threshold"])
    options: dict[str, Any] = {
        "connect_timeout": 10,
        "application_name": "openrlhf-dbb",
        # A peer that vanished silently is given up after a minute. The defaults of the system wait
        # for hours.
        "keepalives_idle": 20,
        "keepalives_interval": 10,
        "keepalives_count": 4,
        "tcp_user_timeout": 60_000,
    }
    options = {key: value for key, value in options.items() if key not in url.query}
    options["client_encoding"] = "UTF8"
    # A pooler may lend a connection for one transaction: the next client has its statements.
    options["prepare_threshold"] = _prepare_threshold(address.url)
    try:
        _check_parameters(url)
        return create_engine(
            url,
            connect_args=options,
            isolation_level="READ COMMITTED",
            hide_parameters=True,
            pool_size=_READERS if read_only else 1,
            max_overflow=1,
            # Minutes pass between two steps, and servers and poolers drop idle connections.
            pool_pre_ping=True,
        )
    except ImportError:
        raise StoreError(
            f"{address.location} needs the driver psycopg; "
            "run: pip install '.[postgres]' in the repository"
        ) from None
    except (SQLAlchemyError, ValueError) as error:
        raise StoreError(f"{address.location}: {error}; correct the store URL") from None


def _prepare_threshold(url: URL) -> int | None:
    """Return after how many runs of a statement the URL lets psycopg prepare it; None: never."""
    given = url.query.get("prepare_threshold", "none")
    if given == "none":
        return None
    if isinstance(given, str) and given.isdecimal():
        return int(given)
    raise StoreError(f"the store URL has prepare_threshold={given}; write none or a number from 0")


def _check_parameters(url: URL) -> None:
    """Raise StoreError if the URL has a parameter twice, or one that PostgreSQL's client lacks."""
    from psycopg.pq import Conninfo

    allowed = {option.keyword.decode() for option in Conninfo.get_defaults()} - {"replication"}
    for name, value in url.query.items():
        if name not in allowed:
            raise StoreError(
                f"the store URL has the parameter {name!r}, which does not exist; allowed are "
                "prepare_threshold and the connection parameters of PostgreSQL (connect_timeout, "
                "sslmode, options, ...)"
            )
        if not isinstance(value, str) and name not in ("host", "port"):
            raise StoreError(f"the store URL has {name!r} more than once; give it once")
