"""Reads what columns of a data set tell of its prompts: pass rates that were measured before, and sources.

Axes: P distinct prompts.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf_dbb.core.arrays import Key
from openrlhf_dbb.core.texts import is_missing, number_of, unusable


class Known(NamedTuple):
    """What is known of the prompts before a training; None: nothing."""

    pass_rates: list[list[float]] | None  # (P, 2) successes and attempts, NaN where unknown
    sources: list[str] | None  # (P,)


def of_prompts(
    rows: Iterable[Mapping[str, Any]],
    keys: Sequence[Key],
    *,
    pass_rate_column: str | None,
    pass_rate_attempts: int | None,
    source_column: str | None,
) -> Known:
    """Return what columns tell of the distinct prompts, in the order of their first rows.

    Args:
        rows: of the data set, with their columns.
        keys: text and label of each row.
        pass_rate_column, source_column: at the top, or by dots below it, as "extra_info.rate"; None: none.
        pass_rate_attempts: of rates that are written as one number.

    Raises:
        ValueError: a column is not there, or a pass rate cannot be read.
    """
    rates: dict[Key, Any] = {}
    sources: dict[Key, Any] = {}
    for key, row in zip(keys, rows, strict=True):
        if pass_rate_column is not None:
            rates.setdefault(key, decoded(value_at(row, pass_rate_column)))
        if source_column is not None:
            sources.setdefault(key, decoded(value_at(row, source_column)))
    _refuse_missing("pass_rate_column", pass_rate_column, rates)
    _refuse_missing("source_column", source_column, sources)
    known_P = None
    if pass_rate_column is not None:
        known_P = _pass_rates(rates, keys, pass_rate_column, pass_rate_attempts)
    sources_P = None
    if source_column is not None:
        sources_P = [str(source) for source in sources.values()]
    return Known(known_P, sources_P)


def _pass_rates(
    rates: Mapping[Key, Any], keys: Sequence[Key], column: str, attempts: int | None
) -> list[list[float]]:
    known_P = []
    bad = {}
    for key, value in rates.items():
        rate = pass_rate(value, attempts, "pass_rate_attempts")
        if isinstance(rate, str):
            bad[f"row {keys.index(key) + 1}"] = rate
        else:
            known_P.append(rate)
    if bad:
        raise ValueError(f"pass_rate_column = {column!r}: {unusable(bad, len(keys))}")
    return known_P


def _refuse_missing(name: str, column: str | None, values: Mapping[Key, Any]) -> None:
    """Raise ValueError for a column without any value."""
    if column is not None and all(is_missing(value) for value in values.values()):
        raise ValueError(
            f"{name} = {column!r}: no row of the training data has a value there; name another column"
        )


def pass_rate(value: Any, attempts: int | None, setting: str) -> list[float] | str:
    """Return successes and attempts of a known rate, or why it is no rate.

    The rate is a number or "5/8"; both are NaN if it is missing. ``setting`` names what gives ``attempts``.

    Example:
        >>> pass_rate("5/8", None, "attempts"), pass_rate(0.5, 4, "attempts")
        ([5.0, 8.0], [2.0, 4.0])
    """
    if is_missing(value) or (isinstance(value, str) and not value):
        return [math.nan, math.nan]
    counted, slash, total = str(value).partition("/")
    successes = _number(counted)
    tried = _number(total) if slash else 1.0
    if not (1 <= tried < math.inf and 0 <= successes <= tried):
        return f"its pass rate is {value!r}; write a number in [0, 1], or successes/attempts"
    if attempts is not None:
        return [attempts * successes / tried, float(attempts)]
    if not slash:
        return f"its pass rate has no number of attempts; give {setting}"
    return [successes, tried]


def _number(text: str) -> float:
    """Return a number; NaN if the text is none."""
    try:
        return number_of(text)
    except ValueError:
        return math.nan


def decoded(value: Any) -> Any:
    """Return bytes as text: Spark and Impala write texts into binary columns."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):  # refused with its row
            return value.decode("utf-8-sig")
    return value


def value_at(record: Any, key: str) -> Any:
    """Return the value of a column, at the top or by dots below it; None without one."""
    if isinstance(record, dict) and key in record:
        return record[key]
    for part in key.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record
