"""The study's figures. An arm has the same colour, marker and line in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np

from study import analysis, fewer
from study.analysis import ALPHA, Difference
from study.rows import ARMS, EXPERIMENTS, TASKS, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

matplotlib.use("Agg")  # draws into files
# Okabe and Ito's colours, which colour-blind readers can tell apart. Marker and line suffice without colour.
LOOKS: dict[str, dict[str, Any]] = {
    "point": {"color": "#000000", "marker": "s", "linestyle": (0, (4, 2))},
    "dbb": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "laplace": {"color": "#009E73", "marker": "v", "linestyle": "-"},
    "auto": {"color": "#D55E00", "marker": "P", "linestyle": (0, (5, 1, 1, 1))},
    "ema": {"color": "#E69F00", "marker": "^", "linestyle": "-"},
}
"""Looks of estimators."""
_MORE: tuple[dict[str, Any], ...] = (
    {"color": "#7F7F7F", "marker": "d", "linestyle": (0, (1, 1))},
    {"color": "#CC79A7", "marker": "s", "linestyle": (0, (4, 2))},
    {"color": "#882255", "marker": "o", "linestyle": "-"},
    {"color": "#E69F00", "marker": "^", "linestyle": "-"},
    {"color": "#56B4E9", "marker": "X", "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#8C6D1F", "marker": "*", "linestyle": (0, (3, 1))},
    {"color": "#009E73", "marker": "v", "linestyle": "-"},
)
STYLE = dict(
    zip(("grpo-wide", "dr_grpo", "dr_grpo-dbb", "dapo", "greso", "repo"), _MORE, strict=False)
)
STYLE |= {
    "grpo": LOOKS["point"],
    "laplace": LOOKS["laplace"],
    "dbb": LOOKS["dbb"],
    "auto": LOOKS["auto"],
}
SMOLLM2 = {"pairs": "pairs", "real": "sums", "lcm": "lcm"}
"""Experiments with one model on several tasks, and the tasks."""
SMOLLM2_ARMS = ("grpo", "dbb", "centered")
FEWER_STYLE = dict(
    zip(
        fewer.LABELS,
        (LOOKS["point"], _MORE[0], LOOKS["auto"], *_MORE[1:], *_MORE[:1]),
        strict=False,
    )
)


def new_figure(columns: int, rows: int, *, height: float, **subplots: Any) -> tuple[Figure, Any]:
    """Return a figure of 8 inches' width and its panels (rows, columns)."""
    from matplotlib.figure import Figure

    size = 15  # of fonts: readable at half the width
    small = dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 0.9 * size)
    sizes = (
        dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "figure.labelsize"), size)
        | small
    )
    spines = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    lines = {
        "lines.linewidth": 2.4,
        "lines.markersize": 6.8,
        "axes.grid": True,
        "grid.color": "#E0E0E0",
    }
    matplotlib.rcParams.update(sizes | spines | lines | {"axes.axisbelow": True})
    figure = Figure(figsize=(8.0, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def draw(study: Study, folder: Path, names: Sequence[str] = ()) -> None:
    """Write each figure that has data, or those of these names, as PNG, and print the paths."""
    makers: dict[str, Callable[[Study], Figure | None]] = {"study_differences": _differences}
    makers |= {"estimates": _estimates, "smollm2": _smollm2}
    makers |= {f"study_{test}": partial(_fewer, test=test) for test in fewer.TESTS}
    for name, make in makers.items():
        figure = make(study) if not names or name in names else None
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=150)
            print(folder / f"{name}.png")


def _differences(study: Study) -> Figure | None:
    tests = {name: analysis.against_baseline(study, name, study.arms(name)) for name in EXPERIMENTS}
    tests = {
        name: of_arm for name, of_arm in tests.items() if any(test.n for test, _ in of_arm.values())
    }
    if not tests:
        return None
    arms = [arm for arm in ARMS if any(arm in of_arm for of_arm in tests.values())]
    figure, grid = new_figure(
        len(tests), 1, height=0.42 * len(arms) + 2.0, sharex=True, sharey=True
    )
    for axes, (experiment, of_arm) in zip(grid[0], tests.items(), strict=True):
        for arm, (test, corrected) in of_arm.items():
            _draw_test(axes, arms.index(arm), test, corrected, STYLE.get(arm, LOOKS["ema"]))
        axes.set_yticks(range(len(arms)), [ARMS[arm] for arm in arms])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        seeds = sorted({test.n for test, _ in of_arm.values() if test.n})
        count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
        axes.set_title(
            f"{EXPERIMENTS[experiment].replace(', ', chr(10))}\n{count} seeds", fontsize="small"
        )
    figure.supxlabel(
        f"final Acc@8 minus GRPO's, points, 95 % interval; filled: p (Holm) < {ALPHA:g}",
        fontsize="small",
    )
    return figure


def _estimates(study: Study) -> Figure | None:
    rows = analysis.by_task(study)
    tasks = list(dict.fromkeys(rows.task))
    if not tasks:
        return None
    figure, (panels,) = new_figure(len(tasks), 1, height=4.2, sharex=True, sharey=True)
    for axes, task in zip(panels, tasks, strict=True):
        for n, line in ((8, "-"), (2, (0, (4, 2)))):
            mine = rows[(rows.task == task) & (rows.n == n)]
            ratio = mine[mine.estimator == "dbb"].groupby("discount").ratio.mean()
            axes.plot(
                ratio.index,
                ratio,
                label=f"dbb, N = {n}",
                color=LOOKS["dbb"]["color"],
                linestyle=line,
            )
            learned = mine.ratio[mine.estimator == "auto"].mean()
            axes.axhline(
                learned, label=f"auto, N = {n}", color=LOOKS["auto"]["color"], linestyle=line
            )
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(TASKS[task].replace(", ", "\n"), fontsize="small")
        axes.set_ylim(0, 2)
    panels[0].set_ylabel("error / that of the\ngroup's mean")
    panels[len(panels) // 2].set_xlabel("discount of dbb")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=2
    )
    return figure


def _smollm2(study: Study) -> Figure | None:
    """Held-out accuracy over rollouts: each run, and the mean over the seeds of each arm that has two at least."""
    experiments = [name for name in SMOLLM2 if (study.epochs.experiment == name).any()]
    if not experiments:
        return None
    figure, (panels,) = new_figure(len(experiments), 1, height=4.6)
    for axes, experiment in zip(panels, experiments, strict=True):
        for arm in SMOLLM2_ARMS:
            runs = analysis.curves(study.epochs, experiment, arm)
            look = STYLE.get(arm, LOOKS["ema"])
            if len(runs) < 2:
                continue
            for rollouts_E, accuracy_E in runs.values():
                axes.plot(
                    rollouts_E, 100 * accuracy_E, color=look["color"], linewidth=0.8, alpha=0.5
                )
            mean_E = np.mean([accuracy_E for _, accuracy_E in runs.values()], axis=0)
            axes.plot(next(iter(runs.values()))[0], 100 * mean_E, label=ARMS[arm], **look)
        axes.set_title(TASKS[SMOLLM2[experiment]].replace(", ", "\n"), fontsize="small")
    panels[0].set_ylabel("right held-out answers, %")
    panels[len(panels) // 2].set_xlabel("rollouts")
    handles = {
        label: line
        for axes in panels
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(handles),
        handlelength=2,
    )
    return figure


def _fewer(study: Study, test: str) -> Figure | None:
    curves = fewer.all_curves(study, test)
    if fewer.TARGET not in curves or len(curves) == 1:
        return None
    figure, ((left, right),) = new_figure(2, 1, height=0.3 * len(curves) + 3.4)
    for arm, mine in curves.items():
        x_E = np.mean([rollouts_E for rollouts_E, _ in mine.values()], axis=0) / 1000
        gain_E = 100 * np.mean(
            [accuracy_E - accuracy_E[0] for _, accuracy_E in mine.values()], axis=0
        )
        left.plot(x_E, gain_E, label=fewer.LABELS[arm], **FEWER_STYLE[arm])
        if arm == fewer.TARGET:
            left.axhline(gain_E[-1], color="#7F7F7F", linewidth=1)
    left.set_xlabel("rollouts, thousands")
    left.set_ylabel("gain in accuracy, points")
    tests = fewer.against_target(curves, fewer.HALF)
    for place, (arm, (half, corrected)) in enumerate(tests.items()):
        _draw_test(right, place, half, corrected, FEWER_STYLE[arm])
    right.set_yticks([])
    right.set_ylim(len(tests) - 0.5, -0.5)
    right.set_title("After half of the rollouts")
    right.set_xlabel("minus GRPO, N = 8, points")
    figure.suptitle(
        f"{fewer.TESTS[test]}: {max(map(len, curves.values()))} seeds", fontsize="medium"
    )
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=3
    )
    return figure


def _draw_test(
    axes: Axes, place: int, test: Difference, corrected: float, look: dict[str, Any]
) -> None:
    """Draw a difference with its interval on a line of its own, with a filled marker if it is significant."""
    axes.axvline(0, color="black", linewidth=1)
    axes.plot([100 * test.low, 100 * test.high], [place, place], color=look["color"])
    inside = look["color"] if corrected < ALPHA else "white"
    axes.plot(
        100 * test.mean, place, color=look["color"], marker=look["marker"], markerfacecolor=inside
    )
