"""Figures in the house style, and CSV files with their numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_dbb.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def folder(path: Path) -> Path:
    """Create the folder of ``--output`` and return it; call it before long work.

    Raises:
        UsageError: it cannot be created, or matplotlib is not installed.
    """
    _require_matplotlib()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}; name a folder that can be written") from error
    return path


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = 6.0, height: float = 4.0, **subplots: Any
) -> tuple[Figure, Any]:
    """Return a figure in the house style and its axes: one, or an array (rows, columns) if there are several.

    Args:
        columns, rows: of panels.
        width, height: of the whole figure, in inches; the font grows with the width.
        subplots: further arguments of ``Figure.subplots``, such as ``sharey``.

    Raises:
        UsageError: matplotlib is not installed.
    """
    matplotlib = _require_matplotlib()
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


def ring(axes: Axes, x: float, y: float, color: str) -> None:
    """Draw a ring around a point."""
    size = float(axes.xaxis.label.get_fontsize())
    axes.scatter([x], [y], s=size**2, zorder=5, facecolors="none", edgecolors=color, linewidths=0.15 * size)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png (200 dpi) and NAME.svg and return their paths; the same figure gives the same bytes."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a header and rows, with Unix line endings and numbers with all digits; return the path."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path


def _require_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError('figures need matplotlib: pip install "openrlhf-dbb[lab]"') from error
    matplotlib.use("Agg")  # draws into files
    return matplotlib
