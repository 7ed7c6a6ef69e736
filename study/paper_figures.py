"""The figure of the paper's claims: accuracy and error of DBB over its discount."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openrlhf_dbb.figures import new_figure, style
from study import analysis
from study.data import Floats, Study
from study.findings import DISCOUNT, outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEEPS = {"sweep-n8": "N = 8", "sweep-n2": "N = 2", "small-n2": "small model, N = 2"}
"""Experiments with several discounts, and their titles."""


def draw(study: Study, folder: Path) -> list[Path]:
    """Write ``paper_discounts.png`` into an existing folder if its runs are there, and return its path.

    Raises:
        UsageError: matplotlib or scipy is not installed.
    """
    figure = _discounts(study)
    if figure is None:
        return []
    path = folder / "paper_discounts.png"
    figure.savefig(path, dpi=150)
    return [path]


def _discounts(study: Study) -> Figure | None:
    shown = [name for name in SWEEPS if study.arms_of(name, "dbb-0.25")]
    if not shown:
        return None
    figure, grid = new_figure(len(shown), 2, width=8.0, height=5.4, sharex=True, sharey="row", squeeze=False)
    look = {"color": style("dbb")["color"], "marker": "o"}
    for column, experiment in enumerate(shown):
        tests = {
            x: analysis.paired(outcome(study, experiment, arm, "exact"), outcome(study, experiment, "grpo", "exact"))
            for arm, x in DISCOUNT.items()
        }
        tests = dict(sorted((x, test) for x, test in tests.items() if test.n > 1))
        top, bottom = grid[0][column], grid[1][column]
        middle = [test.mean for test in tests.values()]
        half = [test.high - test.mean for test in tests.values()]
        top.axhline(0, color="black", linewidth=0.8)
        top.errorbar(list(tests), middle, yerr=half, capsize=3, **look)
        top.set_title(f"{SWEEPS[experiment]}\nn = {max((test.n for test in tests.values()), default=0)}")
        x, ratio_R_L = _ratios(study, experiment)
        bottom.axhline(1, color="black", linewidth=0.8)
        if len(x):
            bottom.fill_between(x, ratio_R_L.min(axis=0), ratio_R_L.max(axis=0), color=look["color"], alpha=0.2)
            bottom.plot(x, ratio_R_L.mean(axis=0), color=look["color"])
        bottom.set_xlabel("discount")
    grid[0][0].set_ylabel("points above GRPO")
    grid[1][0].set_ylabel("MSE over point's")
    return figure


def _ratios(study: Study, experiment: str) -> tuple[list[float], Floats]:
    """Discounts, and DBB's error over the point estimate's on each GRPO run of an experiment, (R, L)."""
    runs = [run.run for run in study.runs if run.experiment == experiment and run.arm == "grpo"]
    ratio = {(row.run, row.discount): row.mse / row.mse_point for row in study.mse if row.estimator == "dbb"}
    x = sorted({discount for run, discount in ratio if run in runs})
    measured = [run for run in runs if all((run, discount) in ratio for discount in x)]
    return x, np.array([[ratio[run, discount] for discount in x] for run in measured])
