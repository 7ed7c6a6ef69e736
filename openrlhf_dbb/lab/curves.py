"""Figures of an error over the discount.

Axes: X values of a discount (or smoothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb import figures
from openrlhf_dbb.lab import specs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISCOUNTS = (0.02, *(round(0.05 * step, 2) for step in range(1, 21)))
"""Discounts tried by default; they include the paper's 0.4, 0.5, 0.75, 0.95 and 1."""

DISCOUNT_LABEL = "discount (laplace: smoothing in rollouts)"

_DASHES: tuple[Any, ...] = ("-", (0, (3, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))


@dataclass(frozen=True)
class Curve:
    """The error of a family of estimators.

    Attributes:
        name: the registered name, which decides the colour.
        label: as in the legend.
        x: (X,) discounts or smoothings, ascending; empty for a level (one error, without such an axis).
        error: (X,), or (1,) for a level.
    """

    name: str
    label: str
    x: Floats
    error: Floats


def by_family(candidates: Sequence[tuple[RewardEstimator, float]]) -> list[Curve]:
    """Return a curve for each family with several errors, and a level for each family with one."""
    members: dict[str, list[tuple[float, float]]] = {}
    names = {specs.family(estimator): estimator.name for estimator, _ in candidates}
    for estimator, error in candidates:
        members.setdefault(specs.family(estimator), []).append((specs.knob_value(estimator) or 0.0, error))
    points = {family: np.array(sorted(values)).T for family, values in members.items()}
    return [
        Curve(names[family], family, x if len(x) > 1 else np.empty(0), error) for family, (x, error) in points.items()
    ]


def draw(axes: Axes, curves: Sequence[Curve], unit: float = 1.0) -> None:
    """Draw curves with their best points ringed, and levels, all divided by ``unit``."""
    best = []
    for place, curve in enumerate(curves):
        look = figures.style(curve.name)
        # A further curve of the same estimator gets other dashes.
        same = sum(other.name == curve.name for other in curves[:place])
        look |= {"linestyle": _DASHES[same % len(_DASHES)]} if same else {}
        least = int(np.argmin(curve.error))
        best.append(float(curve.error[least]) / unit)
        if curve.x.size:
            axes.plot(curve.x, curve.error / unit, label=curve.label, markevery=4, **look)
            figures.ring(axes, curve.x[least], best[-1], look["color"])
        else:
            axes.axhline(best[-1], label=curve.label, **(look | {"marker": ""}))
    # The best points and the levels are what matters; curves may leave the panel at the top.
    span = max(best) - min(best)
    axes.set_ylim(min(best) - 0.15 * span, max(best) + 0.25 * span + 0.05 * min(best))
    axes.set_xlim(0, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel(DISCOUNT_LABEL)


def figure(folder: Path, name: str, error_label: str, curves: Sequence[Curve], band: Any = None) -> list[Path]:
    """Write the figure NAME of some curves and return its files; ``band`` may draw below them into the axes."""
    drawn, axes = figures.new_figure(height=4.8)
    if band is not None:
        band(axes)
    draw(axes, curves)
    axes.set_ylabel(error_label)
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figures.save(drawn, folder, name)
