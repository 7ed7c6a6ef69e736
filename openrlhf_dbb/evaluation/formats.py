"""How tables write differences in percentage points and p-values."""

from __future__ import annotations

from openrlhf_dbb.evaluation.statistics import p_value

__all__ = ["p_value", "points"]


def points(value: float) -> str:
    """Write a difference in percentage points, with its sign.

    Example:
        >>> points(0.00844), points(-0.1)
        ('+0.84', '-10.00')
    """
    return f"{100 * value:+.2f}"
