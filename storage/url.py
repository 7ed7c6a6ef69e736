"""Store addresses: the default, parsing, and forms that are safe to print."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from storage.errors import StoreError

URL_VARIABLE = "OPENRLHF_DBB_STORE_URL"
"""Environment variable read when no URL is given; the place for a URL with a password."""

DEFAULT_URL = "sqlite:///openrlhf_dbb.db"
"""Used if neither an argument nor the variable gives a URL: a file in the working directory."""

FORMS = "the name of a file (runs.db), sqlite:///relative.db, sqlite:////absolute.db or postgresql://user:password@host:5432/database"

# A list of the harmless options, not of the secret ones: several options of libpq can carry a password.
_PRINTABLE_OPTIONS = {
    "host",
    "port",
    "user",
    "dbname",
    "sslmode",
    "connect_timeout",
    "application_name",
    "options",
}


@dataclass(frozen=True)
class Address:
    """A parsed store URL.

    Attributes:
        kind: kind of database.
        location: for people, without user and password: an absolute path, or postgresql://host:port/database.
        path: absolute file path (SQLite), else "".
        url: for the engine (PostgreSQL), without secrets; None for SQLite.
        secrets: libpq options kept apart from ``url``, among them the password.
    """

    kind: Literal["sqlite", "postgresql"]
    location: str
    path: str = ""
    url: URL | None = None
    secrets: dict[str, Any] = field(default_factory=dict, repr=False)


def choose_url(url: str | None) -> str:
    """The given URL, else that of the environment variable, else the default."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def parse_url(text: str) -> Address:
    """Read a store URL, or the name of a SQLite file.

    Raises:
        StoreError: neither, an unsupported database, SQLite in memory, or an unescaped password.
    """
    url = URL.create("sqlite", database=text) if _is_file_name(text) else _make_url(text)
    if url is None:
        raise StoreError(
            f"the store URL {mask_url(text)!r} cannot be parsed; write {FORMS}, "
            "and percent-encode @ : / ? # in a user name or password (@ is %40)"
        )
    kind, _, driver = url.drivername.partition("+")
    if kind == "sqlite" and driver in ("", "pysqlite"):
        return _sqlite_address(url)
    if kind in ("postgresql", "postgres") and driver in ("", "psycopg"):
        return _postgresql_address(url)
    raise StoreError(f"{url.drivername!r} is not a supported database; write {FORMS}")


def mask_url(text: str) -> str:
    """The URL with every password, and every option that may contain one, replaced by ``***``.

    Any text is accepted; if it cannot be parsed, only the part before ``://`` is kept.

    Example:
        >>> mask_url("postgresql://ann:p%40ss@db.example:5432/rl?sslmode=require&password=x")
        'postgresql://ann:***@db.example:5432/rl?sslmode=require&password=***'
    """
    url = _make_url(text)
    if url is None:
        scheme, separator, _ = text.partition("://")
        return f"{scheme}://***" if separator and scheme.replace("+", "").isalnum() else "***"
    masked = url.set(query={}).render_as_string(hide_password=True)
    options = [
        f"{quote(key)}={quote(value, safe='/') if key in _PRINTABLE_OPTIONS and '@' not in value else '***'}"
        for key, values in url.query.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    return masked + ("?" + "&".join(options) if options else "")


def _is_file_name(text: str) -> bool:
    """By its end, so that a mistyped address, which may hold a password, is never taken for one."""
    return text.endswith((".db", ".sqlite", ".sqlite3")) and not any(character in text for character in ":@?")


def _make_url(text: str) -> URL | None:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return None
    # An unescaped "@" or "/" in the user part moves part of the password into these two.
    if url.drivername.startswith("postgres") and "@" in (url.host or "") + (url.database or ""):
        return None
    return url


def _sqlite_address(url: URL) -> Address:
    if url.database in (None, "", ":memory:") or url.query or str(url.database).startswith("file:"):
        raise StoreError(
            "a SQLite store is one file, given by its path alone (sqlite:///posteriors.db); memory, "
            "file: names and ?options are not supported"
        )
    # Absolute, so that a later change of the working directory does not open a second, empty file.
    path = os.path.abspath(str(url.database))
    return Address("sqlite", path, path=path)


def _postgresql_address(url: URL) -> Address:
    query = dict(url.query)
    secrets: dict[str, Any] = {} if url.password is None else {"password": str(url.password)}
    secrets |= {key: query.pop(key) for key in list(query) if key not in _PRINTABLE_OPTIONS}
    for key, value in query.items():
        if not isinstance(value, str):
            raise StoreError(f"the store URL has several values for {key!r}; give one")
    host = url.host or query.get("host", "")
    port = url.port or query.get("port", 5432)
    database = url.database or query.get("dbname", "")
    where = f"{quote(str(host), safe='.-_')}:{port}" if host else ""
    return Address(
        "postgresql",
        f"postgresql://{where}/{database}",
        url=URL.create("postgresql+psycopg", url.username, None, url.host, url.port, url.database, query),
        secrets=secrets,
    )
