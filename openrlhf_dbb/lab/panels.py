"""Small multiples: a panel for each of several estimators, all on the same axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrlhf_dbb.lab.output import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3


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
        # The panel above is now the lowest of its column.
        panels[panels.index(spare) - columns].tick_params(labelbottom=True)
    return figure, panels[:count]
