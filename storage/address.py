"""Where a store is: URLs and names of files; which of them cannot hold a store."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from openrlhf_dbb.storage.errors import StoreError

URL_VARIABLE = "OPENRLHF_DBB_STORE_URL"
"""Environment variable read when no URL is given; the place for a URL with a password."""

DEFAULT_URL = "sqlite:///openrlhf_dbb.db"
"""Used if neither an argument nor the variable gives a URL: a file in the working directory."""

FORMS = (
    "the name of a file (runs.db), sqlite:///relative.db, sqlite:////absolute.db or postgresql://host:5432/database, "
    "with user:password@ before the host"
)

NETWORK_FS_VARIABLE = "OPENRLHF_DBB_ALLOW_NETWORK_FS"

# SQLite's WAL needs memory that all processes share. These file systems do not share memory across hosts.
# Source: sqlite.org/wal.html; names as in the third column of /proc/mounts.
NETWORK_FILE_SYSTEMS = {
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs",
    "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip


@dataclass(frozen=True)
class Address:
    """Where a store is."""

    location: str  # for people, without user and password: an absolute path, or postgresql://host:port/database
    text: str = field(repr=False)  # the URL that opens the same store in another process
    path: str = ""  # absolute file path (SQLite), else ""
    # For the engine (PostgreSQL); None for SQLite
    url: URL | None = field(default=None, repr=False)


def parse_url(text: str | None) -> Address:
    """Read a store URL or the name of a SQLite file; None: the environment variable, else the default.

    Raise StoreError if the text is neither, the database is not supported, SQLite is in memory, or the password holds
    characters that must be encoded.
    """
    text = str(text or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
    # A mistyped address may hold a password, so that only these texts are taken for file names.
    if re.fullmatch(r"[^:@?]*\.(db|sqlite|sqlite3)|/([^/].*)?", text, re.DOTALL):
        return _file(text)
    if text.startswith("sqlite:///"):
        if "?" in text:
            raise StoreError(
                f"{text!r} holds a ?: write %3F for one in a file's path; ?options are not supported"
            )
        return _file(unquote(text.removeprefix("sqlite:///")))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        url = None
    if url is None or (url.drivername.startswith("postgres") and _may_hold_password(url)):
        raise StoreError(
            f"the store URL cannot be parsed; it is not shown, since it may hold a password; write {FORMS}, "
            "and percent-encode @ : / ? # in a user name or password (@ is %40)"
        )
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return Address(
            _postgresql_location(url), text, url=url.set(drivername="postgresql+psycopg")
        )
    raise StoreError(f"{url.drivername!r} is not a supported database; write {FORMS}")


def _may_hold_password(url: URL) -> bool:
    """Return whether the shown parts of a PostgreSQL URL may hold part of a password.

    An unescaped "@" or "/" in the user part moves part of it there, and so does "key=value" text of libpq.
    """
    shown = unquote(f"{_host_of(url)} {_port_of(url)} {_database_of(url)}")
    return any(character in shown for character in "@=#;")


def _postgresql_location(url: URL) -> str:
    host = _host_of(url)
    where = f"{quote(host, safe='.-_')}:{_port_of(url)}" if host else ""
    return f"postgresql://{where}/{_database_of(url)}"


# SQLAlchemy prefers a parameter to the part before it.
def _host_of(url: URL) -> str:
    return str(url.query.get("host", url.host or ""))


def _port_of(url: URL) -> str:
    return str(url.query.get("port", url.port or 5432))


def _database_of(url: URL) -> str:
    return str(url.query.get("dbname", url.database or ""))


def _file(name: str) -> Address:
    if (
        not name
        or name.startswith((":memory:", "file:"))
        or "\0" in name
        or not _is_encodable(name)
    ):
        raise StoreError(
            f"a SQLite store is one file, given by its path alone (sqlite:///posteriors.db), not {name!r}; memory and "
            "file: names are not supported"
        )
    # Absolute, so that a later change of the working directory does not open a second, empty file.
    path = os.path.abspath(name)
    return Address(path, "sqlite:///" + path.replace("%", "%25").replace("?", "%3F"), path)


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def check_sqlite_path(path: str, *, create: bool) -> None:
    """Raise StoreError if there is no such file, or if it is on a network file system."""
    if not create and not os.path.exists(path):
        raise StoreError(
            f"there is no store at {path}; check the path and the rights to its folder, or start a run to create it"
        )
    mounts = Path("/proc/mounts")
    if mounts.exists() and os.environ.get(NETWORK_FS_VARIABLE) != "1":
        kind = file_system(os.path.realpath(path), mounts.read_text(errors="surrogateescape"))
        if kind in NETWORK_FILE_SYSTEMS:
            raise StoreError(
                f"{path} is on a network file system ({kind}), where SQLite may lose data; use a local disk "
                f"or PostgreSQL, or set {NETWORK_FS_VARIABLE}=1 if only this host ever opens the file"
            )


def file_system(path: str, mounts: str) -> str:
    """Return the file system of an absolute path, given the text of /proc/mounts; "" if it is unknown."""
    lines = (line.split(" ") for line in mounts.splitlines())
    points = [
        (point.replace("\\040", " "), place, kind)
        for place, (_, point, kind, *_) in enumerate(lines)
    ]
    around = [mount for mount in points if f"{path}/".startswith(mount[0].rstrip("/") + "/")]
    # The longest point is the innermost; of two mounts on the same point, the later one hides the earlier.
    return max(around, default=("", 0, ""))[2]
