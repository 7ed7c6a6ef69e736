"""The figures of docs/paper.md: what the runs say about the paper's own figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openrlhf_dbb.figures import new_figure, style
from openrlhf_dbb.lab import error_curves
from study import analysis
from study.data import Floats, Study
from study.findings import DISCOUNT, outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEEPS = {"sweep-n8": "N = 8", "sweep-n2": "N = 2", "small-n2": "small model, N = 2"}
"""Experiments with several discounts, and their titles."""
CLIPS = {
    "grpo": "GRPO",
    "grpo-wide": "GRPO\nwide",
    "dbb-standard": "DBB",
    "dbb": "DBB\nwide",
}
_DYNAMICS = {
    "accuracy": ("Acc@8, %", 100),
    "best": ("Best@8, %", 100),
    "reward": ("training reward, %", 100),
    "length": ("response length, tokens", 1),
    "entropy": ("entropy, nats", 1),
    "clip_fraction": ("clipped tokens, %", 100),
}


def draw(study: Study, folder: Path) -> list[Path]:
    """Write each figure that has data; their paths.

    Raises:
        UsageError: matplotlib or scipy is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Callable[[Study], Figure | None]] = {"discounts": _discounts, "clip": _clip, "dynamics": _dynamics}
    paths = []
    for name, make in made.items():
        figure = make(study)
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths + _prior(study, folder)


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


def _clip(study: Study) -> Figure | None:
    shown = [name for name in ("sweep-n8", "sweep-n2") if study.arms_of(name, *CLIPS)]
    if not shown:
        return None
    panels = {
        "exact": ("exact accuracy, points above GRPO", 1),
        "clip_fraction": ("clipped tokens, %", 100),
        "grad_norm": ("gradient norm", 1),
        "loss": ("policy loss", 1),
    }
    figure, grid = new_figure(2, 2, width=8.0, height=5.6, squeeze=False)
    for axes, (name, (title, scale)) in zip(grid.flat, panels.items(), strict=True):
        for place, experiment in enumerate(shown):
            values = [outcome(study, experiment, arm, name) for arm in CLIPS]
            if name == "exact":  # seeds differ by more than arms
                values = [dict(enumerate(analysis.paired(each, values[0]).difference_R)) for each in values]
            stats = [analysis.mean_and_error(list(each.values())) for each in values]
            axes.errorbar(
                np.arange(len(CLIPS)) + 0.12 * (place - 0.5),
                [scale * mean for mean, _ in stats],
                yerr=[0 if math.isnan(error) else scale * error for _, error in stats],
                fmt="os"[place],
                capsize=3,
                label=SWEEPS[experiment],
            )
        axes.set_title(title)
        axes.set_xticks(range(len(CLIPS)), CLIPS.values())
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _dynamics(study: Study) -> Figure | None:
    experiment = next((name for name in SWEEPS if study.arms_of(name, "grpo", "dbb")), None)
    if experiment is None:
        return None
    figure, grid = new_figure(3, 2, width=8.0, height=4.8, sharex=True, squeeze=False)
    for axes, (name, (title, scale)) in zip(grid.flat, _DYNAMICS.items(), strict=True):
        for arm, look in (("grpo", "point"), ("dbb", "dbb")):
            rows = [row for row in study.epochs if (row.experiment, row.arm) == (experiment, arm)]
            points = []
            for epoch in sorted({row.epoch for row in rows}):
                values = [value for row in rows if row.epoch == epoch and not math.isnan(value := getattr(row, name))]
                if values:
                    points.append((epoch, *analysis.mean_and_error(values)))
            if points:
                x, mean, error = scale * np.array(points).T
                axes.errorbar(x / scale, mean, yerr=error, capsize=3, **style(look))
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    figure.suptitle(f"GRPO (dashed) and DBB 0.5, {SWEEPS[experiment]}")
    return figure


def _prior(study: Study, folder: Path) -> list[Path]:
    for experiment, title in SWEEPS.items():
        runs = {run.run for run in study.runs if run.experiment == experiment}
        rows = [row for row in study.priors if row.run in runs]
        if rows:

            def best_of(alpha: float, beta: float) -> tuple[float, float]:
                of = [row for row in rows if (row.prior_alpha, row.prior_beta) == (alpha, beta)]  # noqa: B023
                return float(np.median([row.discount for row in of])), float(np.mean([row.mse for row in of]))

            count = len({row.run for row in rows})
            made = error_curves.prior_figure(folder, f"{title}, {count} runs", best_of)
            for path in made:
                if path.suffix != ".png":  # priors.csv has more
                    path.unlink()
            return [path for path in made if path.suffix == ".png"]
    return []
