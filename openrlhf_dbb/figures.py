"""Figures in the house style."""

from __future__ import annotations

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

_COLUMNS = 3  # of small multiples


def style(name: str) -> dict[str, Any]:
    """Colour, marker and line of the estimator registered as ``name``, as keywords for ``Axes.plot``."""
    return dict(STYLE.get(name, _OTHER))


def folder(path: Path) -> Path:
    """The folder of ``--output``, created if needed; asked for before the work whose figures go there.

    Raises:
        UsageError: it cannot be created, or matplotlib is not installed.
    """
    require_matplotlib()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}; name a folder that can be written") from error
    return path


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = 6.0, height: float = 4.0, **subplots: Any
) -> tuple[Figure, Any]:
    """A figure in the house style.

    Args:
        columns, rows: of panels.
        width, height: of the whole figure, in inches; the font grows with the width.
        subplots: further arguments of ``Figure.subplots``, such as ``sharey``.

    Returns:
        The figure, and its axes: one, or an array (rows, columns) if there are several.

    Raises:
        UsageError: matplotlib is not installed.
    """
    matplotlib = require_matplotlib()
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
    axes = figure.subplots(rows, columns, **({"squeeze": rows * columns == 1} | subplots))
    return figure, axes


def small_multiples(
    count: int, *, columns: int = _COLUMNS, panel_height: float = 1.9, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels of ``panel_height`` inches, at most ``columns`` in a row, on shared axes."""
    columns = min(count, columns)
    rows = -(-count // columns)
    height = panel_height * rows + 0.6
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    figure, grid = new_figure(columns, rows, width=6, height=height, **(shared | subplots))
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.remove()
        # The panel above is now the bottom one of its column.
        panels[panels.index(spare) - columns].tick_params(labelbottom=True)
    return figure, panels[:count]


def mark_best(axes: Axes, x: float, y: float, name: str) -> None:
    """Ring the best point of a curve of estimator ``name``."""
    size = float(axes.xaxis.label.get_fontsize())
    look = {"facecolors": "none", "edgecolors": style(name)["color"], "linewidths": 0.15 * size}
    axes.scatter([x], [y], s=size**2, zorder=5, **look)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png (200 dpi) and NAME.svg; their paths.

    The same figure gives the same bytes.
    """
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def require_matplotlib() -> Any:
    """matplotlib, set up to draw into files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError('figures need matplotlib: pip install "openrlhf-dbb[lab]"') from error
    matplotlib.use("Agg")
    return matplotlib
