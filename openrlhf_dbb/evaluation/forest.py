"""The forest plot: every difference with its interval, one panel per pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_dbb import figures
from openrlhf_dbb.evaluation.comparison_tables import measure_name
from openrlhf_dbb.evaluation.differences import Comparison, Difference
from openrlhf_dbb.evaluation.statistics import ALPHA
from openrlhf_dbb.terminal import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 22  # characters
_COLOR = "#0072B2"


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Write differences.png and differences.svg, and return their paths.

    Circles are benchmarks, diamonds averages; filled where the p-value after Holm's correction is below 0.05.

    Raises:
        UsageError: matplotlib is not installed.
    """
    panel_height = 0.22 * len(comparison.columns) + 0.4
    figure, panels = figures.small_multiples(len(comparison.pairs), panel_height=panel_height)
    for axes, pair in zip(panels, comparison.pairs, strict=True):
        _draw_pair(axes, comparison.of(pair))
    figure.supxlabel(
        f"difference in {measure_name(comparison)} (points) with 95 % interval\nfilled: p (Holm) < {ALPHA:g}",
        fontsize="medium",
    )
    return figures.save(figure, folder, "differences")


def _draw_pair(axes: Axes, found: Sequence[Difference]) -> None:
    axes.axvline(0, color="black", linewidth=1)
    for place, difference in enumerate(found):
        estimate, low, high = (100 * value for value in (difference.test.difference, difference.low, difference.high))
        axes.plot([low, high], [place, place], color=_COLOR, linestyle="-", marker="")
        axes.plot(
            estimate,
            place,
            color=_COLOR,
            marker="D" if difference.column.is_average else "o",
            markerfacecolor=_COLOR if difference.holm < ALPHA else "white",
        )
        if difference.column.is_average:
            axes.axhline(place + 0.5, color="#E0E0E0", linewidth=1)
    axes.set_yticks(range(len(found)), [_plain(difference.column.title) for difference in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"{_plain(found[0].model)}\n- {_plain(found[0].baseline)}", fontsize="small")


def _plain(text: str) -> str:
    """At most as wide as a panel, with dollars escaped, which would start a formula in matplotlib."""
    return shown(text, width=_WIDTH).replace("$", r"\$")
