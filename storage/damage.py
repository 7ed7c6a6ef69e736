"""Finds the numbers in the rows of a run that no run has written: somebody edited them by hand."""

import functools
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Select,
    Table,
    bindparam,
    cast,
    column,
    func,
    or_,
    select,
)
from sqlalchemy.sql import ColumnElement

from openrlhf_dbb.storage import schema
from openrlhf_dbb.storage.decode import refusal
from openrlhf_dbb.storage.engine import Database
from openrlhf_dbb.storage.errors import StoreError, retried
from openrlhf_dbb.storage.records import RunRecord

_LAST_STEP = select(schema.run.c.last_step).where(schema.run.c.run_id == bindparam("run"))


@retried
def check_rows(database: Database, run: RunRecord, *tables: str, step: int | None = None) -> None:
    """Check the numbers of a run's rows, of one step if it is given: a scan of each table.

    Raises:
        StoreError: a number is outside of the bounds of its column, or the run has no such step.
    """
    key = {"run": run.run_id, "step": step}
    with database.transaction() as connection:
        key["last"] = connection.scalar(_LAST_STEP, key)
        for name in tables:
            of_run = _rows(name, step is not None)
            if connection.execute(of_run.where(_any_outside(name)), key).first() is not None:
                raise _refusal(connection, run, name, of_run, key)


def _refusal(
    connection: Connection, run: RunRecord, name: str, of_run: Select[Any], key: dict[str, Any]
) -> StoreError:
    """Return the error of the first column in which a row is out of bounds."""
    keys = schema.metadata.tables[name].primary_key
    for each, outside in _outside(name).items():
        row = connection.execute(of_run.where(outside), key).first()
        if row is not None:
            what = f"{each} of a row in {name} of run {run.name!r}"
            for other in keys:
                if other.name not in ("run_id", each):
                    what += f", {other.name.removesuffix('_id')} {row._mapping[other.name]!r:.60}"
            return refusal(what, row._mapping[each], _allowed(name, each, key["last"]))
    raise AssertionError(f"{name} has changed within a transaction")


def _allowed(table: str, name: str, last_step: int) -> str:
    column = schema.metadata.tables[table].c[name]
    kind = column.type.python_type
    if kind is bytes:
        return "16 bytes"
    least, most = schema.bounds(column)
    if name == "step":
        most = last_step
    return f"a {'whole ' if kind is int else ''}number from {least} to {most}"


@functools.cache
def _rows(name: str, of_step: bool) -> Select[Any]:
    """Return a query of one row of a run. Its columns have no type: a value is shown as it is stored."""
    table = schema.metadata.tables[name]
    columns: list[Any] = [column(each.name) for each in table.columns]
    rows: Select[Any] = select(*columns)
    rows = rows.select_from(table).limit(1)
    if of_step:
        rows = rows.where(table.c.step == bindparam("step"))
    return rows.where(_of_run(table, bindparam("run")))


def _of_run(table: Table, run: Any) -> ColumnElement[bool]:
    if "run_id" in table.c:
        return table.c.run_id == run
    evaluation = schema.evaluation.c
    return table.c.evaluation_id.in_(
        select(evaluation.evaluation_id).where(evaluation.run_id == run)
    )


@functools.cache
def _any_outside(name: str) -> ColumnElement[bool]:
    return or_(*_outside(name).values())


@functools.cache
def _outside(name: str) -> dict[str, ColumnElement[bool]]:
    """Return SQL that is true where a column is out of bounds, by column; of texts there is none."""
    conditions = {}
    for each in schema.metadata.tables[name].columns:
        kind = each.type.python_type
        if kind is bytes:
            conditions[each.name] = func.length(each) != 16
        elif kind is not str:
            conditions[each.name] = _out_of_bounds(each, kind)
    return conditions


def _out_of_bounds(each: Column[Any], kind: type) -> ColumnElement[bool]:
    least, most = schema.bounds(each)
    last = bindparam("last", type_=BigInteger)
    # True of NaN too, which PostgreSQL takes for the largest number, and of any text in SQLite.
    outside: ColumnElement[bool] = ~each.between(least, last if each.name == "step" else most)
    if kind is int:  # SQLite keeps fractions in any column
        outside = or_(outside, each != cast(each, BigInteger))
    return outside
