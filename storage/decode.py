"""Decodes values of rows, which somebody may have edited by hand.

Each function names the value that it refuses. ``what`` says which value it is, such as "metrics of step 3 of run 'x'".
"""

import contextlib
import json
import math
import traceback
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.storage.errors import StoreError

_names = msgspec.json.Decoder(list[str]).decode
_vectors = msgspec.json.Decoder(dict[str, list[float]]).decode
_state = msgspec.json.Decoder(list[float | None]).decode

_SHOWN = 60  # characters of a value in a message


def refusal(what: str, value: object, allowed: str) -> StoreError:
    """Return the error of a stored value that is not ``allowed``."""
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    return StoreError(
        f"{what} is {shown}; it must be {allowed}; correct it in the database, or restore a backup"
    )


@contextlib.contextmanager
def naming_damage(what: str) -> Iterator[None]:
    """Turn an exception that an edited value raises into a StoreError about ``what``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}, line {last.lineno}"
        raise StoreError(
            f"{what} cannot be read ({type(error).__name__} in {place}: {error}): either a value of it was edited in "
            "the database, which a backup restores, or this is a fault of openrlhf-dbb: please report this line"
        ) from error


def typed(value: Any, kind: type, what: str) -> Any:
    """Return the value; raise StoreError unless it is None or of this type.

    SQLite stores any value in any column.
    """
    if value is None or isinstance(value, kind):
        return value
    raise refusal(what, value, f"of type {kind.__name__}")


def json_object(value: Any, what: str) -> dict[str, Any]:
    """Return a JSON object; raise StoreError if the value is none."""
    try:
        decoded = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise refusal(what, value, "a JSON object")
    return decoded


def numbers(value: Any, what: str) -> dict[str, float | None]:
    """Return a JSON object of numbers and nulls, empty for NULL; else raise StoreError."""
    decoded = json_object("{}" if value is None else value, what)
    for number in decoded.values():
        if number is not None and not (isinstance(number, (int, float)) and math.isfinite(number)):
            raise refusal(what, value, "a JSON object of finite numbers")
    return decoded


def names(value: Any, what: str) -> tuple[str, ...]:
    """Return a JSON list of texts; raise StoreError if the value is none."""
    try:
        return tuple(_names(value))
    except (TypeError, ValueError, RecursionError):
        raise refusal(what, value, "a JSON list of texts") from None


def vectors(value: Any, what: str) -> dict[str, NDArray[np.float64]]:
    """Return vectors by name from a JSON object of lists, none for NULL; else raise StoreError."""
    try:
        decoded = {} if value is None else _vectors(value)
    except (TypeError, ValueError, RecursionError):
        raise refusal(what, value, "a JSON object of lists of numbers") from None
    return {name: np.array(vector, dtype=np.float64) for name, vector in decoded.items()}


def state(value: Any, length: int, what: str) -> list[float | None]:
    """Return a JSON list of ``length`` numbers and nulls; raise StoreError if the value is none."""
    try:
        decoded = _state(value)
    except (TypeError, ValueError, RecursionError):
        decoded = []
    if len(decoded) != length:
        raise refusal(what, value, f"a JSON list of {length} numbers")
    return decoded


def instant(moment: str) -> datetime:
    """Return the time of a text in ISO 8601, which may end with Z."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00"))


def utc_text(time: datetime) -> str:
    """Return a time in UTC as ISO 8601 with milliseconds and Z."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(value: Any, what: str) -> str:
    """Return a time in UTC with milliseconds; raise StoreError if the value is none."""
    try:
        time = instant(value)
        in_utc = time.astimezone(timezone.utc)
    except (AttributeError, TypeError, ValueError, OverflowError):
        time = None
    if time is None or time.tzinfo is None:
        raise refusal(what, value, "a time in UTC such as 2026-01-31T12:00:00.000Z")
    return utc_text(in_utc)
