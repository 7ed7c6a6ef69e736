"""How tables write numbers: percentages, differences in points, p-values."""

from __future__ import annotations

import math
from collections.abc import Collection

from openrlhf_dbb.evaluation.metrics import OverRuns

PLUS_MINUS = "\u00b1"


def percent(share: float) -> str:
    """A share in percent, decimal points below each other.

    Example:
        >>> percent(0.4722), percent(0.05), percent(float("nan"))
        ('47.22', ' 5.00', '-')
    """
    return "-" if math.isnan(share) else f"{100 * share:5.2f}"


def mean_and_std(measure: OverRuns) -> str:
    """Mean and standard deviation over runs in percent, as in the paper's cells; the mean alone for a single run."""
    spread = "" if math.isnan(measure.std) else f" {PLUS_MINUS} {100 * measure.std:.2f}"
    return percent(measure.mean) + spread


def runs_in_words(runs: Collection[int]) -> str:
    """What :func:`mean_and_std` shows, for models that have these numbers of runs."""
    different = set(runs)
    if different == {1}:
        return "one run"
    over = f"{different.pop()} runs" if len(different) == 1 else "runs"
    return f"mean {PLUS_MINUS} standard deviation over {over}"


def points(value: float) -> str:
    """A difference in percentage points, with its sign.

    Example:
        >>> points(0.00844), points(-0.1)
        ('+0.84', '-10.00')
    """
    return f"{100 * value:+.2f}"


def p_value(p: float) -> str:
    """As in the paper, with four digits, but never 0.

    Example:
        >>> p_value(0.02), p_value(3e-7), p_value(float("nan"))
        ('0.0200', '<0.0001', '-')
    """
    if math.isnan(p):
        return "-"
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"
