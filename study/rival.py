"""Is it the memory, and does a rival without memory do as well? Tables and figure of ``study/protocols/rival.toml``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from openrlhf_dbb.evaluation.metrics import p_value
from study import analysis, figures, rows
from study.cells import Table, percent, tested
from study.rows import Study

TITLE = "Draws by the memory and their rival"
NAME = "rival"
"""The protocol and the folder of its rows have this name."""
PARTS = {"rival": "At the rate 2e-5", "rival-half": "At half of this rate"}
"""Titles of the protocol's experiments, each of which is tested by itself."""
ARMS = {
    "even8": "even draws, N = 8 (GRPO)",
    "learns": "by the memory, N = 4",
    "own-counts": "by own counts alone, N = 4",
    "two-stage": "two stages, 2 + 14",
}
"""Printed names of the protocol's arms; the first one is what the others are tested against."""
GRPO = "even8"
TESTED = (("learns", GRPO), ("own-counts", GRPO), ("two-stage", GRPO))
"""Tests with Holm's correction."""
COMPARED = (("learns", "own-counts"), ("learns", "two-stage"))
"""Further differences, for their intervals."""
BUDGET = 1536  # rollouts of a run
HELDOUT, POOL = "heldout", "pool"
PERMUTATIONS = 20_000
Outcome = Callable[[Any], float]
"""One number of a run, from its rows of forced.csv."""


def report(folder: Path, drawn: Path, experiment: str) -> list[Table]:
    """Return the tables of an experiment's rows in a folder, and draw ``EXPERIMENT.png`` into another one."""
    study = rows.load(folder)
    points = study.forced[study.forced.experiment == experiment]
    tables = [
        _arms(study, points, experiment),
        _tests("Mean over the run", points, mean_over_run),
        _tests("At the end", points, at_end),
        _tests("The pool's whole range, at the end", points, pool_at_end),
    ]
    picture = drawn / f"{experiment}.png"
    _curves(points).savefig(picture, dpi=150)
    print(picture)
    return tables


def mean_over_run(run: Any, column: str = HELDOUT) -> float:
    """Return the area below a run's straight lines from 0 to ``BUDGET`` rollouts, divided by ``BUDGET``, in [0, 1]."""
    ordered = run.sort_values("rollouts")
    inside = ordered[ordered.rollouts < BUDGET]
    rollouts_E = np.append(inside.rollouts, BUDGET)
    values_E = np.append(inside[column], at_end(run, column))
    return float(np.trapezoid(values_E, rollouts_E) / BUDGET)


def value_at(run: Any, rollouts: int, column: str = HELDOUT) -> float:
    """Return a run's value after some rollouts, on the straight line between its points, in [0, 1]."""
    ordered = run.sort_values("rollouts")
    return float(np.interp(rollouts, ordered.rollouts, ordered[column]))


def at_end(run: Any, column: str = HELDOUT) -> float:
    """Return a run's value at ``BUDGET`` rollouts, in [0, 1]."""
    return value_at(run, BUDGET, column)


def early(run: Any) -> float:
    """Return a run's value after the first third of ``BUDGET``, in [0, 1]."""
    return value_at(run, BUDGET // 3)


def pool_at_end(run: Any) -> float:
    """Return the value at the end for problems of the pool's whole range, in [0, 1]."""
    return at_end(run, POOL)


def outcomes(points: Any, outcome: Outcome) -> dict[str, Any]:
    """Return an outcome of each arm's runs, as Series over seeds."""
    values = {}
    for arm in ARMS:
        of_arm = points[points.arm == arm]
        by_seed = {seed: outcome(run) for seed, run in of_arm.groupby("seed")}
        values[arm] = pd.Series(by_seed, dtype=float)
    return values


def permutation_p(first: Any, second: Any) -> float:
    """Return the two-sided p-value of the difference of two means, by exchanging runs between the arms."""
    together = np.concatenate([first, second])
    size = len(first)
    observed = abs(np.mean(first) - np.mean(second))
    random = np.random.default_rng(0)
    orders = random.permuted(np.tile(together, (PERMUTATIONS, 1)), axis=1)
    differences = np.abs(orders[:, :size].mean(axis=1) - orders[:, size:].mean(axis=1))
    at_least = np.count_nonzero(differences >= observed - 1e-12)
    return (at_least + 1) / (PERMUTATIONS + 1)


def _tests(title: str, points: Any, outcome: Outcome) -> Table:
    values = outcomes(points, outcome)
    tests = {}
    for first, second in (*TESTED, *COMPARED):
        tests[first, second] = analysis.unpaired(values[first], values[second], values.values())
    corrected = analysis.with_holm({pair: tests[pair] for pair in TESTED})
    without_lowest = values[GRPO].drop(values[GRPO].idxmin())
    made = []
    for (first, second), test in tests.items():
        holm = ""
        if (first, second) in corrected:
            holm = p_value(corrected[first, second][1])
        welch = stats.ttest_ind(values[first], values[second], equal_var=False).pvalue
        others = f"{p_value(welch)}, {p_value(permutation_p(values[first], values[second]))}"
        difference = ""
        if second == GRPO:
            difference = f"{100 * (values[first].mean() - without_lowest.mean()):+.2f}"
        made.append(
            [f"{ARMS[first]} - {ARMS[second]}", test.runs, *tested(test, holm), others, difference]
        )
    header = (
        "arms",
        "n",
        "difference",
        "95 % interval",
        "p",
        "p (Holm)",
        "detectable",
        "p by Welch, by permutation",
        "without GRPO's lowest run",
    )
    note = (
        "Points of the probability of the right answer; unpaired, with the deviation within all arms. The last column "
        "leaves out the run of GRPO whose outcome is lowest, and was added after the runs."
    )
    return Table(title, header, made, note)


def _arms(study: Study, points: Any, experiment: str) -> Table:
    of_experiment = study.runs[study.runs.experiment == experiment]
    seconds = of_experiment.pivot(index="seed", columns="arm", values="seconds")
    made = []
    for arm, label in ARMS.items():
        runs = of_experiment[of_experiment.arm == arm]
        epochs = study.epochs[study.epochs.run.isin(runs.run) & (study.epochs.epoch > 0)]
        mixed = 100 * (1 - epochs.zero_variance.groupby(epochs.epoch).mean())
        of_arm = points[points.arm == arm]
        cells = [label, str(len(runs)), f"{runs.steps.mean():.0f}"]
        for outcome in (mean_over_run, early, at_end, pool_at_end):
            values = outcomes(of_arm, outcome)[arm]
            cells.append(percent(*analysis.mean_and_error(values)))
        cells.append(percent(*analysis.mean_and_error(runs.accuracy.dropna())))
        cells.append(", ".join(f"{share:.0f}" for share in mixed))
        cells.append(f"{(seconds[arm] / seconds[GRPO]).mean():.2f}")
        made.append(cells)
    header = (
        "arm",
        "seeds",
        "steps",
        "mean over the run %",
        "after a third of the rollouts %",
        "at the end %",
        "whole range, at the end %",
        "sampled at the end %",
        "mixed groups %, by thirds",
        "seconds / GRPO's, mean over seeds",
    )
    start = 100 * points[points.step == 0].groupby("arm")[[HELDOUT, POOL]].mean().mean()
    note = (
        f"Probability of the right answer, mean and standard error. Before training: {start[HELDOUT]:.1f} % held out, "
        f"{start[POOL]:.1f} % over the whole range."
    )
    return Table("The arms", header, made, note)


def _curves(points: Any) -> Any:
    """Return the figure of the arms' mean curves with bands of 95 %, by the deviation within each arm."""
    figure, ((axes,),) = figures.new_figure(1, 1, height=5.8)
    grid_E = np.linspace(0, BUDGET, 25)
    marked = 8  # every 512 rollouts, where the arms with 64 rollouts a step were measured
    looks = [figures.LOOKS[name] for name in ("point", "dbb", "auto", "laplace")]
    for look, (arm, label) in zip(looks, ARMS.items(), strict=True):
        curves = []
        for _, run in points[points.arm == arm].groupby("seed"):
            ordered = run.sort_values("rollouts")
            curves.append(np.interp(grid_E, ordered.rollouts, ordered[HELDOUT]))
        percent_R_E = 100 * np.array(curves)
        mean_E = percent_R_E.mean(axis=0)
        axes.plot(grid_E, mean_E, label=f"{label}, n = {len(curves)}", markevery=marked, **look)
        half_E = stats.sem(percent_R_E) * stats.t.ppf(0.975, len(curves) - 1)
        low_E = mean_E - half_E
        high_E = mean_E + half_E
        axes.fill_between(grid_E, low_E, high_E, color=look["color"], alpha=0.12, linewidth=0)
    axes.set_ylabel("right answer's probability, %")
    axes.set_xlabel("rollouts; bands: 95 %, within each arm")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=1, handlelength=3
    )
    return figure
