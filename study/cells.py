"""Tables as Markdown, and their cells as text. Accuracies are in percent, differences in percentage points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from openrlhf_dbb.evaluation.metrics import p_value
from study.analysis import Difference, Share

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


class Table(NamedTuple):
    """A table under a title, with a note below that explains its columns. Cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def markdown(table: Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{table.title}**", "", *lines, *(["", table.note] if table.note else [])])


def points(value: float) -> str:
    """Return a difference in percentage points, with its sign.

    Example:
        >>> points(0.00844), points(-0.1)
        ('+0.84', '-10.00')
    """
    return f"{100 * value:+.2f}"


def with_error(text: str, error: float, digits: int) -> str:
    """Return a cell with its standard error, if there is one.

    Example:
        >>> with_error("0.413", 0.0212, 3), with_error("0.413", float("nan"), 3)
        ('0.413 \u00b1 0.021', '0.413')
    """
    return text if math.isnan(error) else f"{text} {PLUS_MINUS} {error:.{digits}f}"


def percent(mean: float, error: float) -> str:
    """Return mean and standard error in percent, "-" for NaN."""
    return "-" if math.isnan(mean) else with_error(f"{100 * mean:.2f}", 100 * error, 2)


def difference(test: Difference) -> str:
    """Return mean and standard error in percentage points, "-" without runs."""
    return with_error(points(test.mean), 100 * test.error, 2) if test.n else "-"


def interval(test: Difference) -> str:
    """Return the 95 % interval in percentage points."""
    return "-" if math.isnan(test.low) else f"{points(test.low)} to {points(test.high)}"


def detectable(test: Difference) -> str:
    """Return the detectable difference in percentage points."""
    return "-" if math.isnan(test.detectable) else f"{100 * test.detectable:.2f}"


def tested(test: Difference, corrected: str) -> list[str]:
    """Return five cells: difference, interval, p, corrected p (as given), detectable difference."""
    return [difference(test), interval(test), p_value(test.p), corrected, detectable(test)]


def needed(share: Share | None) -> list[str]:
    """Return two cells: the share of GRPO's rollouts that an arm needs, and its 95 % interval."""
    if share is None:
        return ["-", "-"]
    value, low, high = (f"{x:.2f}" if math.isfinite(x) else "not reached" for x in share[1:])
    return [value, f"{low} to {high}"]
