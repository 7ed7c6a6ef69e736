"""The files of an open SQLite database: whether they are the ones that were opened, and undamaged.

SQLite itself goes on with files that have been deleted, and with pages that it remembers.
"""

import os
import sqlite3
from contextlib import closing
from typing import Any

from openrlhf_dbb.storage.errors import StoreError

RESTORE = "end all processes that use the file, restore it or a backup, and resume"

# Parts of SQLite's messages.
DAMAGES = (
    "image is malformed",
    "malformed database schema",
    "file is not a database",
    "disk I/O error",
)

_TIMEOUT_S = 2.0  # that a check waits for a lock

Status = tuple[int, ...]  # of a file, as of _status


class Files:
    """A database file with its WAL, where new pages are until a checkpoint, and the index of the WAL."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened: Status = ()  # device and inode of the file, since the first transaction
        self._wal = os.path.realpath(path) + "-wal"
        self._index = os.path.realpath(path) + "-shm"

    def check_same(self, connection: Any) -> None:
        """Raise StoreError if a file is not the one that this connection of SQLAlchemy has opened."""
        for path, identity in connection.info.get("files", {}).items():
            if _status(path)[:2] != identity:
                raise StoreError(
                    f"{path} was deleted, moved or replaced while it was open; {RESTORE}"
                )

    def follow(self, connection: Any) -> None:
        """Let a connection that only reads open the files anew if they were replaced or written in place."""
        opened = connection.info.get("files", {})
        replaced = any(_status(path)[:2] != identity for path, identity in opened.items())
        if replaced or connection.info.get("file", self.status()[0]) != self.status()[0]:
            self._opened = ()
            connection.invalidate()  # else SQLite goes on with the file that was there, or with its pages

    def check_written(self, connection: Any) -> None:
        """Raise StoreError if the files were damaged since the last write of this connection."""
        commits, status = connection.info.get("written", (None, None))
        # Written by others who committed nothing: perhaps a checkpoint, perhaps a copy over a file.
        if status not in (None, self.status()) and commits == _commits_of_others(connection):
            self.check_content("integrity_check")
            connection.invalidate()  # it remembers pages; a new one reads what the files hold

    def check_transaction(self, before: tuple[Status, Status]) -> None:
        """Raise StoreError if the files were damaged since ``before``, in a transaction that still writes.

        Until its commit, SQLite itself at most appends to the WAL.
        """
        file, wal = self.status()
        wal_grew = wal[:2] == before[1][:2] and wal[3:] > before[1][3:]
        if file != before[0] or (wal != before[1] and not wal_grew):
            self.check_content("integrity_check")

    def check_content(self, pragma: str) -> None:
        """Raise StoreError if SQLite finds damage; ``pragma``: quick_check or integrity_check."""
        found = self._result(pragma)
        if found != "ok":
            raise StoreError(f"{self._path} was damaged ({' '.join(found.split())}); {RESTORE}")

    def _result(self, pragma: str) -> str:
        # SQLite would take an empty file for a new database.
        if _status(self._path)[3:] in ((), (0,)):
            return "the file is empty or gone"
        try:
            # A connection of its own, which remembers no page.
            with closing(sqlite3.connect(self._path, timeout=_TIMEOUT_S)) as fresh:
                return str(fresh.execute(f"PRAGMA {pragma}(1)").fetchone()[0])
        except sqlite3.DatabaseError as error:
            if any(part in str(error) for part in DAMAGES):
                return str(error)
            raise

    def note(self, connection: Any, *, wrote: bool) -> None:
        """Remember the files after a transaction, which has opened all of them."""
        self._opened = self._opened or _status(self._path)[:2]
        files = connection.info.setdefault("files", {self._path: self._opened})
        for path in (self._wal, self._index):
            if path not in files and (status := _status(path)):
                files[path] = status[:2]
        connection.info["file"] = self.status()[0]
        if wrote:
            connection.info["written"] = _commits_of_others(connection), self.status()

    def status(self) -> tuple[Status, Status]:
        """Return the status of the database file and of its WAL."""
        return _status(self._path), _status(self._wal)


def is_writable(path: str) -> bool:
    """Return whether this process may write an existing database file, and files beside it."""
    return os.access(path, os.W_OK) and os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)


def has_wal(path: str) -> bool:
    """Return whether the newest pages of a database file are in its WAL."""
    return _status(os.path.realpath(path) + "-wal")[3:] not in ((), (0,))


def _status(path: str) -> Status:
    """Return device, inode, time of the last write and size of a file; nothing if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _commits_of_others(connection: Any) -> int:
    """Return a number that changes when another connection commits."""
    return int(connection.connection.dbapi_connection.execute("PRAGMA data_version").fetchone()[0])
