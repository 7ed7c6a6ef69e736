"""Round numbers for JSON: short ones, and None for a number that is not known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def number(value: float | None) -> float | None:
    """Return a number with six significant digits, or None if it is None, NaN or infinite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def rounded(values: NDArray[Any]) -> list[float | None]:
    """Return :func:`number` of each of (K,) values.

    Example:
        >>> rounded(np.array([0.123456789, 1234567.0, np.nan]))
        [0.123457, 1234570.0, None]
    """
    return [number(value) for value in np.asarray(values, dtype=np.float64).tolist()]


def whole(values: NDArray[Any]) -> list[int | None]:
    """Return (K,) counts as integers, None for NaN.

    Example:
        >>> whole(np.array([3.0, np.nan]))
        [3, None]
    """
    return [int(value) if math.isfinite(value) else None for value in np.asarray(values).tolist()]


def encoded(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as JSON in UTF-8."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
