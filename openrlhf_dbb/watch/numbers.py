"""Numbers and texts as an answer's JSON has them: short, and null for what is not known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = 6

_POWERS = np.array([float(f"1e{power}") for power in range(23)])  # exact in float64


def rounded(values: NDArray[Any]) -> list[Any]:
    """Numbers with ``DIGITS`` significant digits, in nested lists of the array's shape; None where not finite.

    Example:
        >>> rounded(np.array([0.123456789, 1234567.0, np.nan, 0.0]))
        [0.123457, 1234570.0, None, 0.0]
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    safe = np.where(finite & (values != 0), values, 1.0)
    places = DIGITS - 1 - np.floor(np.log10(np.abs(safe))).astype(np.int64)
    up, down = (_POWERS[np.clip(each, 0, len(_POWERS) - 1)] for each in (places, -places))
    short = np.where(np.abs(places) < len(_POWERS), np.rint(safe / down * up) / up * down, safe)
    return _listed(np.where(values == 0, 0.0, short), finite)


def whole(values: NDArray[Any]) -> list[Any]:
    """Counts as integers; None where NaN.

    Example:
        >>> whole(np.array([3.0, np.nan]))
        [3, None]
    """
    values = np.asarray(values)
    finite = np.isfinite(values)
    return _listed(np.where(finite, values, 0).astype(np.int64), finite)


def number(value: float | None) -> float | None:
    """One number as :func:`rounded`."""
    return None if value is None else rounded(np.array([value]))[0]


def encoded(answer: Any) -> bytes:
    """An answer as JSON in UTF-8.

    List by list: while one is encoded no other thread runs.
    """
    if isinstance(answer, Mapping):
        return b"{" + b",".join(_json(str(key)) + b":" + encoded(value) for key, value in answer.items()) + b"}"
    return _json(answer)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _listed(values: NDArray[Any], known: NDArray[np.bool_]) -> list[Any]:
    if known.all():
        return list(values.tolist())
    listed = values.astype(object)
    listed[~known] = None
    return list(listed.tolist())
