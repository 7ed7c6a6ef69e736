"""Figures in the house style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

matplotlib.use("Agg")  # draws into files

_POINTS_PER_INCH = 11 / 6  # font size over width: 11 pt at 6 inches, readable at half the width

# Okabe and Ito's colours, which colour-blind readers can tell apart; marker and line suffice without colour.
STYLE: dict[str, dict[str, Any]] = {
    "point": {"color": "#000000", "marker": "s", "linestyle": (0, (4, 2))},
    "dbb": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "ema": {"color": "#E69F00", "marker": "^", "linestyle": "-"},
    "laplace": {"color": "#009E73", "marker": "v", "linestyle": "-"},
    "empirical_bayes": {"color": "#CC79A7", "marker": "D", "linestyle": (0, (1, 1))},
    "auto": {"color": "#D55E00", "marker": "P", "linestyle": (0, (5, 1, 1, 1))},
    "gaussian": {"color": "#56B4E9", "marker": "X", "linestyle": "-"},
}
_OTHER = {"color": "#7F7F7F", "marker": "d", "linestyle": "-"}


def style(name: str) -> dict[str, Any]:
    """Return colour, marker and line of the estimator registered as ``name``, as keywords for ``Axes.plot``."""
    return dict(STYLE.get(name, _OTHER))


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = 6.0, height: float = 4.0, **subplots: Any
) -> tuple[Figure, Any]:
    """Return a figure in the house style and its axes: one, or an array (rows, columns) if there are several.

    Args:
        columns, rows: of panels.
        width, height: of the whole figure, in inches; the font grows with the width.
        subplots: further arguments of ``Figure.subplots``, such as ``sharey``.
    """
    size = _POINTS_PER_INCH * width
    matplotlib.rcParams.update(
        {
            "font.size": size,
            "axes.titlesize": size,
            "axes.labelsize": size,
            "figure.labelsize": size,
            "xtick.labelsize": 0.9 * size,
            "ytick.labelsize": 0.9 * size,
            "legend.fontsize": 0.9 * size,
            "legend.frameon": False,
            "lines.linewidth": 0.16 * size,
            "lines.markersize": 0.45 * size,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#E0E0E0",
            "grid.linewidth": 0.06 * size,
            "svg.hashsalt": "openrlhf_dbb",
        }
    )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **({"squeeze": rows * columns == 1} | subplots))
