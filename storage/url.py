"""StoreError, and the addresses of stores: the default, and parsing."""

import os
import re
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

URL_VARIABLE = "OPENRLHF_DBB_STORE_URL"
"""Environment variable read when no URL is given; the place for a URL with a password."""

DEFAULT_URL = "sqlite:///openrlhf_dbb.db"
"""Used if neither an argument nor the variable gives a URL: a file in the working directory."""

FORMS = (
    "the name of a file (runs.db), sqlite:///relative.db, sqlite:////absolute.db or postgresql://host:5432/database, "
    "with user:password@ before the host"
)


class StoreError(Exception):
    """A store cannot do what was asked. The message is one line, holds no secrets, and says what to do."""


@dataclass(frozen=True)
class Address:
    """A parsed store URL."""

    location: str  # for people, without user and password: an absolute path, or postgresql://host:port/database
    path: str = ""  # absolute file path (SQLite), else ""
    url: URL | None = field(default=None, repr=False)  # for the engine (PostgreSQL); None for SQLite


def choose_url(url: str | None) -> str:
    """Return the given URL, else that of the environment variable, else the default."""
    chosen = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    if not isinstance(chosen, str):
        raise StoreError(f"the store {chosen!r:.80} is not a str; give FILE.db, sqlite:///FILE.db or postgresql://...")
    return chosen


def parse_url(text: str) -> Address:
    """Read a store URL, or the name of a SQLite file.

    Raise StoreError if the text is neither, the database is not supported, SQLite is in memory, or the password holds
    characters that must be encoded.
    """
    # A mistyped address may hold a password, so that only these texts are taken for file names.
    is_file_name = text.endswith((".db", ".sqlite", ".sqlite3")) and not any(character in text for character in ":@?")
    if is_file_name or re.match("/(?!/)", text):
        return _file(text)
    if match := re.match(r"sqlite(\+pysqlite)?:///", text):
        if "?" in text:
            raise StoreError(f"{text!r} holds a ?: write %3F for one in a file's path; ?options are not supported")
        return _file(unquote(text[match.end() :]))
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
    kind, _, driver = url.drivername.partition("+")
    if kind in ("postgresql", "postgres") and driver in ("", "psycopg"):
        host = url.host or url.query.get("host", "")
        where = f"{quote(str(host), safe='.-_')}:{url.port or url.query.get('port', 5432)}" if host else ""
        location = f"postgresql://{where}/{url.database or url.query.get('dbname', '')}"
        return Address(location, url=url.set(drivername="postgresql+psycopg"))
    raise StoreError(f"{url.drivername!r} is not a supported database; write {FORMS}")


def _file(name: str) -> Address:
    if not name or name.startswith((":memory:", "file:")) or "\0" in name:
        raise StoreError(
            f"a SQLite store is one file, given by its path alone (sqlite:///posteriors.db), not {name!r}; memory and "
            "file: names are not supported"
        )
    # Absolute, so that a later change of the working directory does not open a second, empty file.
    path = os.path.abspath(name)
    return Address(path, path)
