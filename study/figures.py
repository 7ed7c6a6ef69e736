"""The study's figures. An arm has the same colour, marker and line in all of them."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf_dbb.evaluation.formats import points
from openrlhf_dbb.evaluation.statistics import ALPHA
from openrlhf_dbb.figures import new_figure, style
from study import analysis, fewer
from study.analysis import BASELINE
from study.data import ARMS, EXPERIMENTS, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[str, dict[str, Any]] = {
    "grpo": style("point"),
    "grpo-wide": {"color": "#7F7F7F", "marker": "d", "linestyle": (0, (1, 1))},
    "laplace": style("laplace"),
    "dbb": style("dbb"),
    "auto": style("auto"),
    "dr_grpo": {"color": "#CC79A7", "marker": "s", "linestyle": (0, (4, 2))},
    "dr_grpo-dbb": {"color": "#882255", "marker": "o", "linestyle": "-"},
    "dapo": {"color": "#E69F00", "marker": "^", "linestyle": "-"},
    "greso": {"color": "#56B4E9", "marker": "X", "linestyle": (0, (5, 1, 1, 1))},
    "repo": {"color": "#8C6D1F", "marker": "*", "linestyle": (0, (3, 1))},
}
FEWER_STYLE: dict[fewer.Arm, dict[str, Any]] = dict(
    zip(
        fewer.LABELS,
        [
            style("point"),
            {"color": "#7F7F7F", "marker": "d", "linestyle": (0, (1, 1))},
            style("auto"),
            {"color": "#56B4E9", "marker": "X", "linestyle": (0, (5, 1, 1, 1))},
            {"color": "#0072B2", "marker": "o", "linestyle": "-"},
            {"color": "#009E73", "marker": "v", "linestyle": "-"},
            {"color": "#E69F00", "marker": "^", "linestyle": "-"},
            {"color": "#882255", "marker": "s", "linestyle": "-"},
            {"color": "#7F7F7F", "marker": "d", "linestyle": (0, (1, 1))},
            {"color": "#0072B2", "marker": "o", "linestyle": "-"},
        ],
        strict=True,
    )
)
_WIDTH = 8.0
_TITLE_WIDTH = 60  # characters


def draw(study: Study, folder: Path) -> list[Path]:
    """Write each figure that has data as PNG, and return the paths.

    ``study_differences``: every arm's difference to GRPO. ``study_few``, ``study_chain``, ``study_control-few``: the
    test of fewer rollouts.

    Raises:
        UsageError: matplotlib or scipy is not installed.
    """
    made: dict[str, Callable[[Study], Figure | None]] = {
        "differences": _differences,
        **{test: partial(_fewer, test=test) for test in fewer.TESTS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in made.items():
        figure = make(study)
        if figure is not None:
            paths.append(folder / f"study_{name}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


def _differences(study: Study) -> Figure | None:
    experiments = _compared(study)
    if not experiments:
        return None
    arms = [arm for arm in ARMS if any(arm in study.arms(name) for name in experiments) and arm != BASELINE]
    figure, panels = _grid(len(experiments), height=0.42 * len(arms) + 2.0, sharex=True)
    for axes, experiment in zip(panels, experiments, strict=True):
        tests = analysis.against_baseline(study, experiment, arms)
        axes.axvline(0, color="black", linewidth=1)
        for place, (arm, (test, corrected)) in enumerate(tests.items()):
            if not test.n:
                continue
            color = STYLE[arm]["color"]
            axes.plot([100 * test.low, 100 * test.high], [place, place], color=color)
            filled = color if corrected < ALPHA else "white"
            axes.plot(100 * test.mean, place, color=color, marker=STYLE[arm]["marker"], markerfacecolor=filled)
        axes.set_yticks(range(len(arms)), [ARMS[arm] for arm in arms])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        title = EXPERIMENTS[experiment].replace(", ", ",\n")
        axes.set_title(f"{title}\n{_seed_count([test.n for test, _ in tests.values() if test.n])}", fontsize="small")
    figure.supxlabel(f"final Acc@8 vs. GRPO, points, 95 % interval; filled: p (Holm) < {ALPHA:g}", fontsize="small")
    changes = _changes(study, experiments, ("dbb",), named=False)
    _title(figure, "DBB 0.5 - GRPO, in points", changes)
    return figure


def _fewer(study: Study, test: str) -> Figure | None:
    found = fewer.curves(study, test)
    if fewer.TARGET not in found or len(found) == 1:
        return None
    figure, (left, right) = _grid(2, height=0.3 * len(found) + 3.4, sharey=False)
    for arm, curves in found.items():
        x_E = np.mean([rollouts_E for rollouts_E, _ in curves.values()], axis=0) / 1000
        gain_R_E = 100 * np.array([accuracy_E - accuracy_E[0] for _, accuracy_E in curves.values()])
        left.plot(x_E, gain_R_E.mean(axis=0), label=fewer.LABELS[arm], **FEWER_STYLE[arm])
        if arm == fewer.TARGET:
            left.axhline(gain_R_E.mean(axis=0)[-1], color="#7F7F7F", linewidth=1)
    left.set_xlabel("rollouts, thousands")
    left.set_ylabel("gain in accuracy, points")
    right.axvline(0, color="black", linewidth=1)
    tests = fewer.against_target(found, fewer.HALF)
    for place, (arm, (test_at_half, corrected)) in enumerate(tests.items()):
        look = FEWER_STYLE[arm] | {"linestyle": ""}
        filled = look["color"] if corrected < ALPHA else "white"
        right.plot([100 * test_at_half.low, 100 * test_at_half.high], [place, place], color=look["color"])
        right.plot(100 * test_at_half.mean, place, **look, markerfacecolor=filled)
    right.set_yticks([])
    right.set_ylim(len(tests) - 0.5, -0.5)
    right.set_title("After half of the rollouts")
    right.set_xlabel("vs. GRPO, N = 8, points")
    _title(figure, fewer.TESTS[test], _seed_count([len(curves) for curves in found.values()]))
    _legend(figure, [left], columns=2)
    return figure


def _grid(panels: int, *, height: float, rows: int = 1, **subplots: Any) -> tuple[Figure, list[Axes]]:
    """A figure of panels that share the y axis unless told otherwise.

    Args:
        height: of a row with its share of title and legend, in inches.
    """
    columns = math.ceil(panels / rows)
    options = {"squeeze": False, "sharey": True} | subplots
    figure, grid = new_figure(columns, rows, width=_WIDTH, height=height * rows, **options)
    for spare in grid.flat[panels:]:
        spare.set_visible(False)
    return figure, list(grid.flat)[:panels]


def _title(figure: Figure, subject: str, found: str) -> None:
    """The subject and the result as title; the subject alone if there is no result."""
    text = re.sub(r"(?<=[N=%]) | (?=[=%(])", "\N{NO-BREAK SPACE}", f"{subject}: {found}" if found else subject)
    figure.suptitle("\n".join(textwrap.wrap(text, _TITLE_WIDTH, break_on_hyphens=False)), fontsize="medium")


def _legend(figure: Figure, panels: Sequence[Axes], columns: int = 3) -> None:
    """One legend below all panels."""
    found = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, handlelength=3)


def _compared(study: Study) -> list[str]:
    """Experiments in which at least one arm can be compared with GRPO."""
    return [
        name
        for name in EXPERIMENTS
        if any(analysis.compare(study, name, arm, BASELINE).n for arm in study.arms(name) if arm != BASELINE)
    ]


def _changes(study: Study, experiments: Sequence[str], arms: Sequence[str], *, named: bool = True) -> str:
    """Differences to GRPO as text."""

    def parts() -> Iterator[str]:
        for experiment in experiments:
            for arm in arms:
                test = analysis.compare(study, experiment, arm, BASELINE)
                if arm != BASELINE and test.n:
                    where = f"{ARMS[arm]} " if named else ""
                    place = f" ({EXPERIMENTS[experiment]})" if len(experiments) > 1 or not named else ""
                    yield f"{where}{points(test.mean)}{place}"

    return ", ".join(parts())


def _seed_count(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    seeds = str(high) if low == high else f"{low} to {high}"
    return f"{seeds} seed{'' if high == 1 else 's'}"
