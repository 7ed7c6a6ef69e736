"""Databases, SQLite and PostgreSQL: addresses, transactions, repeats after an outage, large results in parts."""

import logging
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

URL_VARIABLE = "OPENRLHF_DBB_STORE_URL"
"""Environment variable read when no URL is given; the place for a URL with a password."""

DEFAULT_URL = "sqlite:///openrlhf_dbb.db"
"""Used if neither an argument nor the variable gives a URL: a file in the working directory."""

FORMS = (
    "the name of a file (runs.db), sqlite:///relative.db, sqlite:////absolute.db or postgresql://host:5432/database, "
    "with user:password@ before the host"
)

BUSY_TIMEOUT_S = 30.0  # that a SQLite writer waits for another one
RETRY_LIMIT_S = 120.0  # that a transaction is repeated after its first failure
CHUNK = 50_000  # rows fetched at a time; bounds the memory of large results
NETWORK_FS_VARIABLE = "OPENRLHF_DBB_ALLOW_NETWORK_FS"

_READER_TIMEOUT_S = 2.0
_READERS = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

# SQLite's WAL needs memory that all processes share. These file systems do not share memory across hosts.
# Source: sqlite.org/wal.html; names as in the third column of /proc/mounts.
_NETWORK_FILE_SYSTEMS = {
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs",
    "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip

# SQLSTATEs after which a repeat may succeed: serialization failure, deadlock, and a server that shuts down, crashes or
# starts. Source: PostgreSQL documentation, appendix A.
_TRANSIENT_STATES = {"40001", "40P01", "57P01", "57P02", "57P03"}

_RESTORE = "end all processes that use the file, restore it or a backup, and resume"

_log = logging.getLogger(__package__)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class StoreError(Exception):
    """A store cannot do what was asked. The message is one line, holds no secrets, and says what to do."""


class Interrupted(StoreError):
    """An outage cut a transaction short. The transaction may or may not have been committed."""


@dataclass(frozen=True)
class Address:
    """Where a store is."""

    location: str  # for people, without user and password: an absolute path, or postgresql://host:port/database
    text: str = field(repr=False)  # the URL that opens the same store in another process
    path: str = ""  # absolute file path (SQLite), else ""
    url: URL | None = field(default=None, repr=False)  # for the engine (PostgreSQL); None for SQLite


def parse_url(text: str | None) -> Address:
    """Read a store URL or the name of a SQLite file; None: the environment variable, else the default.

    Raise StoreError if the text is neither, the database is not supported, SQLite is in memory, or the password holds
    characters that must be encoded.
    """
    text = str(text or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
    # A mistyped address may hold a password, so that only these texts are taken for file names.
    is_file_name = text.endswith((".db", ".sqlite", ".sqlite3")) and not any(character in text for character in ":@?")
    if is_file_name or re.match("/(?!/)", text):
        return _file(text)
    if text.startswith("sqlite:///"):
        if "?" in text:
            raise StoreError(f"{text!r} holds a ?: write %3F for one in a file's path; ?options are not supported")
        return _file(unquote(text.removeprefix("sqlite:///")))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        url = None
    # An unescaped "@" or "/" in the user part moves part of the password into the host or the database.
    if url is None or (url.drivername.startswith("postgres") and "@" in (url.host or "") + (url.database or "")):
        raise StoreError(
            f"the store URL cannot be parsed; it is not shown, since it may hold a password; write {FORMS}, "
            "and percent-encode @ : / ? # in a user name or password (@ is %40)"
        )
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        host = url.host or url.query.get("host", "")
        where = f"{quote(str(host), safe='.-_')}:{url.port or url.query.get('port', 5432)}" if host else ""
        location = f"postgresql://{where}/{url.database or url.query.get('dbname', '')}"
        return Address(location, text, url=url.set(drivername="postgresql+psycopg"))
    raise StoreError(f"{url.drivername!r} is not a supported database; write {FORMS}")


def _file(name: str) -> Address:
    if not name or name.startswith((":memory:", "file:")) or "\0" in name:
        raise StoreError(
            f"a SQLite store is one file, given by its path alone (sqlite:///posteriors.db), not {name!r}; memory and "
            "file: names are not supported"
        )
    # Absolute, so that a later change of the working directory does not open a second, empty file.
    path = os.path.abspath(name)
    return Address(path, "sqlite:///" + path.replace("%", "%25").replace("?", "%3F"), path)


def retried(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a call of one transaction that may be made twice: repeat it for ``RETRY_LIMIT_S`` after an outage.

    Other errors (a full disk, a refused value) are not repeated, and neither are those of a read-only store.
    """

    @wraps(work)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return work(*args, **kwargs)
            except Interrupted as error:
                waited = time.monotonic() - began
                if waited >= RETRY_LIMIT_S:
                    raise StoreError(f"{error}; gave up after {waited:.0f} s; resume when the outage is over") from None
                if pause == _FIRST_PAUSE_S:
                    _log.warning("%s; retrying for up to %g s", error, RETRY_LIMIT_S)
            # Random, so that processes that failed together do not retry together.
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    return call


class Database:
    """One database, as used by one process."""

    def __init__(self, address: Address, *, read_only: bool = False) -> None:
        self.location = address.location
        self.is_sqlite = address.url is None
        self.engine = (_sqlite_engine if self.is_sqlite else _postgresql_engine)(address, read_only)
        self._read_only = read_only
        self._pid = os.getpid()
        self._reached = False
        self._file: tuple[int, ...] = ()  # of a SQLite file, since its first transaction
        self._errors = (SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error)

    @contextmanager
    def transaction(self, *, write: bool = False, durable: bool = False) -> Iterator[Connection]:
        """Open one transaction: committed at the end of the block, rolled back if the block raises.

        Args:
            write: take SQLite's write lock at the start, so that what was read stays true until the commit.
                A transaction that only reads sees one snapshot of the database.
            durable: the commit and all before it survive a power loss.

        Raises:
            Interrupted: an outage that may pass; see :func:`retried`.
            StoreError: any other error of the database or its driver, or a SQLite file that was lost.
        """
        # A connection that two processes share corrupts the data of both.
        if os.getpid() != self._pid:
            raise StoreError(f"{self.location} was opened in process {self._pid}; open it again in this process")
        try:
            with self.engine.connect() as connection:
                self._reached = True
                if self.is_sqlite:
                    self._check_files(connection, write)
                    # On the driver's connection: SQLite ignores this pragma inside a transaction.
                    # NORMAL is safe against a crash of the process, FULL against power loss.
                    driver(connection).execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                elif self._read_only or not write:
                    connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                with connection.begin():
                    if self.is_sqlite:
                        # Immediate: a reader that turns into a writer fails at once if another has written.
                        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
                    yield connection
                if self.is_sqlite:
                    self._note_files(connection, write)
        except self._errors as error:
            raise self._store_error(error) from None  # the driver's own exception may show statements and values

    def _check_files(self, connection: Connection, write: bool) -> None:
        """Raise StoreError if the file is not the one that was opened, or was damaged since the last write.

        SQLite itself goes on with files that have been deleted, and with pages that it remembers.
        """
        for path, file in connection.info.get("files", {}).items():
            if _stat(path)[:2] != file:
                raise StoreError(f"{path} was deleted, moved or replaced while it was open; {_RESTORE}")
        commits, written = connection.info.get("written", (None, None))
        # Written by others who committed nothing: no checkpoint of SQLite, but perhaps a copy over the file.
        if write and written not in (None, _stat(self.location)) and commits == _commits_of_others(connection):
            with closing(sqlite3.connect(self.location, timeout=_READER_TIMEOUT_S)) as fresh:
                # SQLite takes an empty file for a new one, and deletes its WAL. Else the WAL must not hide the damage.
                checks = ("wal_checkpoint(TRUNCATE)", "integrity_check(1)") if os.path.getsize(self.location) else ()
                if [fresh.execute(f"PRAGMA {check}").fetchone() for check in checks][1:] != [("ok",)]:
                    raise StoreError(f"{self.location} was damaged while it was open; {_RESTORE}")
                connection.invalidate()  # it remembers pages; a new one reads what the file holds

    def _note_files(self, connection: Connection, write: bool) -> None:
        """Remember the files after a transaction, which has opened all of them."""
        self._file = self._file or _stat(self.location)[:2]
        files = connection.info.setdefault("files", {self.location: self._file})
        for side in ("-wal", "-shm"):
            path = os.path.realpath(self.location) + side
            if path not in files and (file := _stat(path)):
                files[path] = file[:2]
        if write:
            connection.info["written"] = _commits_of_others(connection), _stat(self.location)

    def _store_error(self, error: BaseException) -> StoreError:
        cause: Any = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        message = " ".join(str(cause).split()) or type(cause).__name__
        kind = Interrupted if self._is_transient(cause, message) and not self._read_only else StoreError
        if "file is not a database" in message:
            message = "this file is not a SQLite database; name another file"
        elif "unable to open database file" in message:
            message = "the file cannot be opened; check that its folder exists and is writable"
        elif "database is locked" in message:
            message = "another process holds the write lock"
        elif "disk I/O error" in message or "malformed" in message:
            message += f": the disk is over quota or failing, or the file was damaged; make room, or {_RESTORE}"
        return kind(f"{self.location}: {message}")

    def _is_transient(self, cause: Any, message: str) -> bool:
        if self.is_sqlite:
            return "database is locked" in message
        state = getattr(cause, "sqlstate", None)
        if state is not None:
            return state in _TRANSIENT_STATES or state.startswith("08")
        # No SQLSTATE: the client has no connection. If it never had one, the URL is wrong.
        lost = isinstance(cause, self.engine.dialect.loaded_dbapi.OperationalError)
        return lost and (self._reached or "the database system is" in message)

    def one_of(self, column: str) -> str:
        """Return SQL that is true where the column is in the parameter ``:ids``, made by :meth:`ids`."""
        if self.is_sqlite:
            return f"{column} IN (SELECT value FROM json_each(:ids))"
        return f"{column} = ANY(CAST(:ids AS BIGINT[]))"

    def ids(self, values: NDArray[np.int64]) -> Any:
        """Return any number of ids as ONE statement parameter: the number of parameters is limited."""
        listed = np.unique(values).tolist()
        return str(listed) if self.is_sqlite else listed

    def use_wal(self) -> None:
        """Let SQLite's readers and its writer work side by side; the setting stays in the file."""
        try:
            with self.engine.connect() as connection:
                driver(connection).execute("PRAGMA journal_mode = WAL")
                connection.info.clear()  # a WAL seen before may be that of a process that has closed the file
        except self._errors as error:
            raise self._store_error(error) from None


def driver(connection: Connection) -> Any:
    """Return the connection of sqlite3 or psycopg behind SQLAlchemy's."""
    return connection.connection.dbapi_connection


def chunks(connection: Connection, sql: str, parameters: dict[str, Any]) -> Generator[Sequence[Any], None, None]:
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


def table(connection: Connection, kind: list[tuple[str, str]], sql: str, values: dict[str, Any]) -> NDArray[np.void]:
    """Return the result as records with these names and types; NULL becomes NaN."""
    # Closed here even if a value has another type, while its connection is open.
    with closing(chunks(connection, sql, values)) as parts_of_rows:
        parts = [np.array(rows, dtype=kind) for rows in parts_of_rows]
    return np.concatenate([np.empty(0, dtype=kind), *parts])


def _stat(path: str) -> tuple[int, ...]:
    """Return device, inode, time of the last write and size of a file; nothing if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _commits_of_others(connection: Connection) -> int:
    """Return a number that changes when another connection commits."""
    return int(driver(connection).execute("PRAGMA data_version").fetchone()[0])


def check_sqlite_path(path: str, *, create: bool) -> None:
    """Raise StoreError if there is no such file, or if it is on a network file system."""
    if not create and not Path(path).exists():
        raise StoreError(f"there is no store at {path}; check the path, or start a run to create it")
    mounts = Path("/proc/mounts")
    if mounts.exists() and os.environ.get(NETWORK_FS_VARIABLE) != "1":
        kind = file_system(os.path.realpath(path), mounts.read_text(errors="surrogateescape"))
        if kind in _NETWORK_FILE_SYSTEMS:
            raise StoreError(
                f"{path} is on a network file system ({kind}), where SQLite may lose data; use a local disk "
                f"or PostgreSQL, or set {NETWORK_FS_VARIABLE}=1 if only this host ever opens the file"
            )


def file_system(path: str, mounts: str) -> str:
    """Return the file system of an absolute path, given the text of /proc/mounts; "" if it is unknown."""
    lines = (line.split(" ") for line in mounts.splitlines())
    points = [(point.replace("\\040", " "), place, kind) for place, (_, point, kind, *_) in enumerate(lines)]
    around = [mount for mount in points if f"{path}/".startswith(mount[0].rstrip("/") + "/")]
    # The longest point is the innermost; of two mounts on the same point, the later one hides the earlier.
    return max(around, default=("", 0, ""))[2]


def _sqlite_engine(address: Address, read_only: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        # Threads may share it: the pool below lends a connection to one user at a time.
        # Isolation level None: the driver leaves BEGIN to Database.transaction.
        timeout = _READER_TIMEOUT_S if read_only else BUSY_TIMEOUT_S
        connection = sqlite3.connect(address.path, timeout=timeout, isolation_level=None, check_same_thread=False)
        reading = ["query_only = ON"] if read_only else []
        # The cache has 64 MiB: a negative size is in KiB.
        for setting in ("foreign_keys = ON", "cache_size = -65536", "temp_store = MEMORY", *reading):
            connection.execute(f"PRAGMA {setting}")
        return connection

    size = _READERS if read_only else 1
    return create_engine(
        "sqlite://", creator=connect, poolclass=QueuePool, pool_size=size, max_overflow=0, hide_parameters=True
    )


def _postgresql_engine(address: Address, read_only: bool) -> Engine:
    assert address.url is not None
    options = {"connect_timeout": 10, "application_name": "openrlhf-dbb"}
    # A peer that vanished silently is given up after a minute. The defaults of the system wait for hours.
    options |= {"keepalives_idle": 20, "keepalives_interval": 10, "keepalives_count": 4, "tcp_user_timeout": 60_000}
    options = {key: value for key, value in options.items() if key not in address.url.query}
    try:
        # Pre-ping: minutes pass between two steps, and servers and poolers drop idle connections.
        pool: dict[str, Any] = {"pool_size": _READERS if read_only else 1, "max_overflow": 1, "pool_pre_ping": True}
        return create_engine(
            address.url, connect_args=options, isolation_level="READ COMMITTED", hide_parameters=True, **pool
        )
    except ImportError:
        raise StoreError(
            f"{address.location} needs the driver psycopg; run: pip install '.[postgres]' in the repository"
        ) from None
