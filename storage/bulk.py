"""Insert numpy columns into a table, many rows at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

Columns = Mapping[str, "int | str | NDArray[Any]"]
"""Values by column: one integer or text for all rows, or an array with an element for each row.

Arrays are (P,) int64, masked for NULL; (P,) float64, NaN for NULL; (P,) texts as objects; or (P, K) float64, stored as
the bytes of K little-endian float64, a row of NaN for NULL. A column left out is NULL.
"""

_GROUP = 32
"""Rows per SQLite statement: a statement costs more than a row, and older releases of SQLite allow 999 values."""


def insert_columns(connection: Connection, table: str, columns: Columns) -> None:
    """Insert rows in bulk: many per statement on SQLite, by binary COPY on PostgreSQL."""
    size = next(len(values) for values in columns.values() if isinstance(values, np.ndarray))
    if not size:
        return
    rows = list(zip(*(_values(column, size) for column in columns.values()), strict=True))
    if connection.dialect.name == "sqlite":
        _insert_values(connection, table, list(columns), rows)
        return
    driver_connection: Any = connection.connection.dbapi_connection
    with (
        driver_connection.cursor() as cursor,
        cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types([_postgresql_type(column) for column in columns.values()])
        for row in rows:
            copy.write_row(row)


def _insert_values(connection: Connection, table: str, names: list[str], rows: list[tuple[Any, ...]]) -> None:
    # All values are parameters: the driver caches compiled statements by their text.
    marks = f"({', '.join('?' for _ in names)})"
    insert = f"INSERT INTO {table} ({', '.join(names)}) VALUES "
    grouped = len(rows) - len(rows) % _GROUP
    if grouped:
        groups = [tuple(chain.from_iterable(rows[i : i + _GROUP])) for i in range(0, grouped, _GROUP)]
        connection.exec_driver_sql(insert + ", ".join([marks] * _GROUP), groups)
    if grouped < len(rows):
        connection.exec_driver_sql(insert + marks, rows[grouped:])


def _values(column: int | str | NDArray[Any], size: int) -> list[Any]:
    """The column as ``size`` Python values, None for NULL."""
    if not isinstance(column, np.ndarray):
        return [column] * size
    if column.dtype.kind != "f":
        return list(column.tolist())
    nulls = np.isnan(column if column.ndim == 1 else column[:, 0])
    if column.ndim > 1:
        column = np.ascontiguousarray(column, "<f8").view(f"V{8 * column.shape[1]}").ravel()
    if nulls.any():
        column = column.astype(object)
        column[nulls] = None
    return list(column.tolist())


def _postgresql_type(column: int | str | NDArray[Any]) -> str:
    if isinstance(column, str) or (isinstance(column, np.ndarray) and column.dtype.kind == "O"):
        return "text"
    if isinstance(column, int) or column.dtype.kind != "f":
        return "int8"
    return "float8" if column.ndim == 1 else "bytea"
