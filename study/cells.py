"""Table cells as text, and tables as Markdown. Accuracies are in percent, their differences in percentage points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from openrlhf_dbb.evaluation.formats import p_value, points
from openrlhf_dbb.evaluation.statistics import ALPHA
from study.analysis import Paired, Share

PLUS_MINUS, ARROW = "\N{PLUS-MINUS SIGN}", "\N{RIGHTWARDS ARROW}"


class Table(NamedTuple):
    """A table under a title, with a note below that explains its columns; cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def markdown(table: Table) -> str:
    """Title, table and note."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{table.title}**", "", *lines, *(["", table.note] if table.note else [])])


def number(value: float, digits: int) -> str:
    """With a fixed number of decimals; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def with_error(text: str, error: float, digits: int) -> str:
    """A cell with its standard error, if there is one.

    Example:
        >>> with_error("0.413", 0.0212, 3), with_error("0.413", float("nan"), 3)
        ('0.413 \u00b1 0.021', '0.413')
    """
    return text if math.isnan(error) else f"{text} {PLUS_MINUS} {error:.{digits}f}"


def percent(mean: float, error: float) -> str:
    """Mean and standard error in percent; "-" for NaN."""
    return "-" if math.isnan(mean) else with_error(f"{100 * mean:.2f}", 100 * error, 2)


def difference(test: Paired) -> str:
    """Mean and standard error in percentage points; "-" without a pair."""
    return with_error(points(test.mean), 100 * test.error, 2) if test.n else "-"


def plain_difference(test: Paired) -> str:
    """Mean and standard error as they are; "-" without a pair."""
    return with_error(f"{test.mean:+.3f}", test.error, 3) if test.n else "-"


def interval(test: Paired) -> str:
    """The 95 % interval in percentage points."""
    return "-" if math.isnan(test.low) else f"{points(test.low)} to {points(test.high)}"


def detectable(test: Paired) -> str:
    """The detectable difference in percentage points."""
    return number(100 * test.detectable, 2)


def tested(test: Paired, corrected: str) -> list[str]:
    """Five cells: difference, interval, p, corrected p (as given), detectable difference."""
    return [difference(test), interval(test), p_value(test.p), corrected, detectable(test)]


def concluded(test: Paired, corrected: float) -> str:
    """A test in words: n, interval, p with Holm's correction, and what it shows."""
    if math.isnan(corrected):
        return f"n = {test.n}: no test"
    found = f"n = {test.n}, 95 % interval {interval(test)}, p (Holm) {p_value(corrected)}"
    if corrected < ALPHA:
        return f"{found}: {'better' if test.mean > 0 else 'worse'}"
    smallest = "" if math.isnan(test.detectable) else f" (detectable: {detectable(test)})"
    return f"{found}: no difference shown{smallest}"


def rollouts_needed(found: Share | None) -> list[str]:
    """Two cells: the share of GRPO's rollouts that an arm needs, and its 95 % interval."""
    if found is None:
        return ["-", "-"]
    share, low, high = (
        f"{value:.2f}" if math.isfinite(value) else "not reached" for value in (found.share, found.low, found.high)
    )
    return [share, f"{low} to {high}"]


def count(seeds: int, pairs: int) -> str:
    """Seeds, with the pairs in brackets if they are fewer."""
    return str(seeds) if seeds == pairs else f"{seeds} ({pairs})"
