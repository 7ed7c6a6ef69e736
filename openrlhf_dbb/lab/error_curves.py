"""Figures of the mean squared error: over the discount, over the rollouts of a group, over the prior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb import figures
from openrlhf_dbb.csv_files import write_csv
from openrlhf_dbb.figures import mark_best, style
from openrlhf_dbb.lab import specs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISCOUNTS = (0.02, *(round(0.05 * step, 2) for step in range(1, 21)))
"""Discounts tried by default; they include those of the paper: 0.4, 0.5, 0.75, 0.95 and 1."""

MASSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Prior pseudo-counts tried by default, in rollouts; (1, 1) is the paper's prior."""

DISCOUNT_LABEL = "discount (laplace: smoothing in rollouts)"
MSE_LABEL = "MSE of the success probability"

_DASHES: tuple[Any, ...] = ("-", (0, (3, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))


@dataclass(frozen=True)
class ErrorCurve:
    """Mean squared error of one estimator.

    Attributes:
        name: the estimator's registered name, which decides the colour.
        label: as in the legend.
        x: its discount or smoothing, or the rollouts of a group; empty for a level (an error without such an axis).
        mse: at each x, or (1,) for a level.
    """

    name: str
    label: str
    x: Floats
    mse: Floats

    def best(self) -> tuple[float, float]:
        """(x, mse) of the smallest error; x is NaN for a level."""
        index = int(np.argmin(self.mse))
        return (float(self.x[index]) if self.x.size else float("nan")), float(self.mse[index])


def draw_discounts(axes: Axes, curves: Sequence[ErrorCurve], unit: float = 1.0) -> None:
    """Curves over the discount with their best points ringed, and levels, all divided by ``unit``."""
    for curve, look in zip(curves, _looks(curves), strict=True):
        x, mse = curve.best()
        if curve.x.size:
            axes.plot(curve.x, curve.mse / unit, label=curve.label, markevery=4, **look)
            mark_best(axes, x, mse / unit, curve.name)
        else:
            axes.axhline(mse / unit, label=curve.label, **(look | {"marker": ""}))
    # The best points and the levels are what matters; curves may leave the panel at the top.
    best = [curve.best()[1] / unit for curve in curves]
    span = max(best) - min(best)
    axes.set_ylim(min(best) - 0.15 * span, max(best) + 0.25 * span + 0.05 * min(best))
    axes.set_xlim(0, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])


def assembled(
    estimators: Sequence[RewardEstimator],
    sweeps: dict[str, tuple[Floats, Floats]],
    error: Callable[[RewardEstimator], float],
) -> list[ErrorCurve]:
    """A curve for each family of the estimators and a level for each without discount and smoothing, coinciding ones
    merged.

    Args:
        estimators: what to draw.
        sweeps: by family, the values that were tried, (X,), and the errors there, (X,).
        error: function (estimator) -> its mean squared error.
    """
    families = specs.families(estimators)
    found = [ErrorCurve(families[label].name, label, x, mse) for label, (x, mse) in sweeps.items()]
    levels = [estimator for estimator in estimators if not specs.knob(estimator)]
    found += [ErrorCurve(e.name, specs.label(e), np.empty(0), np.array([error(e)])) for e in levels]
    return merged(found)


def merged(curves: Sequence[ErrorCurve]) -> list[ErrorCurve]:
    """The curves, with those that coincide as one, named after all of them."""
    kept: list[ErrorCurve] = []
    for curve in curves:
        for place, other in enumerate(kept):
            if np.array_equal(curve.x, other.x) and np.allclose(curve.mse, other.mse, rtol=1e-9, atol=0):
                kept[place] = ErrorCurve(other.name, f"{other.label}, {curve.label}", other.x, other.mse)
                break
        else:
            kept.append(curve)
    return kept


def draw_rollouts(axes: Axes, curves: Sequence[ErrorCurve]) -> None:
    """Curves over the number of rollouts, which is on a logarithmic axis."""
    for curve, look in zip(curves, _looks(curves), strict=True):
        axes.plot(curve.x, curve.mse, label=curve.label, **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(curves[0].x, [f"{value:g}" for value in curves[0].x])
    axes.minorticks_off()


def discount_figure(folder: Path, name: str, title: str, curves: Sequence[ErrorCurve]) -> list[Path]:
    """Figure NAME: curves over the discount; its files."""
    figure, axes = figures.new_figure(height=4.8)
    draw_discounts(axes, curves)
    axes.set_title(title)
    axes.set_xlabel(DISCOUNT_LABEL)
    axes.set_ylabel(MSE_LABEL)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figures.save(figure, folder, name)


def prior_figure(folder: Path, title: str, best_of: Callable[[float, float], tuple[float, float]]) -> list[Path]:
    """Figure and CSV "prior": a heat-map of the smallest error of ``dbb`` over its prior; the files.

    Args:
        folder: where to write.
        title: of the figure.
        best_of: function (prior_alpha, prior_beta) -> discount with the smallest MSE, and that MSE.
    """
    rows = [(alpha, beta, *best_of(alpha, beta)) for alpha in MASSES for beta in MASSES]
    mse_A_B = np.array([row[3] for row in rows]).reshape(len(MASSES), len(MASSES))
    excess_A_B = 100 * (mse_A_B / mse_A_B.min() - 1)
    figure, axes = figures.new_figure(height=4.8)
    # The good priors must be distinguishable: one that doubles the error is as dark as one that is worse still.
    top = min(100.0, float(excess_A_B.max()))
    image = axes.imshow(excess_A_B.T, origin="lower", cmap="cividis_r", vmin=0, vmax=top)
    for (a, b), excess in np.ndenumerate(excess_A_B):
        color = "white" if excess > 0.5 * top else "black"
        axes.text(a, b, f"{excess:.1f}" if excess < 9.95 else f"{excess:.0f}", ha="center", va="center", color=color)
    best = np.unravel_index(int(excess_A_B.argmin()), excess_A_B.shape)
    axes.plot(*best, marker="s", markersize=28, markeredgewidth=3, fillstyle="none", color=style("auto")["color"])
    ticks = [f"{mass:g}" for mass in MASSES]
    axes.set_xticks(range(len(MASSES)), ticks)
    axes.set_yticks(range(len(MASSES)), ticks)
    axes.grid(False)
    axes.set(title=title, xlabel="prior_alpha (rollouts)", ylabel="prior_beta (rollouts)")
    figure.colorbar(image, ax=axes, label="least MSE, % above best")
    header = ("prior_alpha", "prior_beta", "best_discount", "mse")
    return [write_csv(folder / "prior.csv", header, rows), *figures.save(figure, folder, "prior")]


def _looks(curves: Sequence[ErrorCurve]) -> list[dict[str, Any]]:
    """Style of each curve; further curves of the same estimator get other dashes."""
    looks, seen = [], dict.fromkeys({curve.name for curve in curves}, 0)
    for curve in curves:
        look, seen[curve.name] = style(curve.name), seen[curve.name] + 1
        if seen[curve.name] > 1:
            look["linestyle"] = _DASHES[(seen[curve.name] - 1) % len(_DASHES)]
        looks.append(look)
    return looks
