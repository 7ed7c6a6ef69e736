"""Draw the README's picture, for light and for dark pages.

    python scripts/draw_readme.py [--output docs/figures]        takes seconds; needs no training stack

Left: one prompt of a run of the tiny preset, from readme_posterior.csv beside this script. The run was

    python -m openrlhf_dbb.cli.train_grpo --preset tiny --estimator dbb --train.num_episodes 8

and the prompt, "s579=" (sort these digits), is one that had groups of all three kinds, all wrong, mixed and all right:

    SELECT step, rollouts, successes, alpha, beta FROM posterior_history JOIN prompts USING (prompt_id)
    WHERE run_id = 1 AND prompt = 's579=' ORDER BY step

Right: the study's primary experiment, from docs/study.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

from openrlhf_dbb.evaluation.formats import points
from openrlhf_dbb.figures import new_figure, require_matplotlib
from openrlhf_dbb.study import analysis
from openrlhf_dbb.study.data import Study
from openrlhf_dbb.study.files import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]

EXPERIMENT = "n2"
BAND = 0.90
LEGEND: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.46, -0.2),
    "fontsize": "small",
    "labelspacing": 0.3,
    "handlelength": 1.8,
}  # below the axes


class Theme(NamedTuple):
    """The colours of one kind of page."""

    page: str
    ink: str
    grid: str
    arms: dict[str, str]


THEMES = {
    "readme": Theme("#FFFFFF", "#1F2328", "#E0E0E0", {"grpo": "#1F2328", "dbb": "#0072B2", "auto": "#D55E00"}),
    "readme-dark": Theme("#0D1117", "#E6EDF3", "#30363D", {"grpo": "#E6EDF3", "dbb": "#56B4E9", "auto": "#E8834A"}),
}


def main() -> None:
    """Draw, and print what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures", help="default docs/figures")
    options = parser.parse_args()
    study = load(ROOT / "docs" / "study")
    for name, theme in THEMES.items():
        path = options.output / f"{name}.png"
        draw(study, theme, path)
        print(path)


def draw(study: Study, theme: Theme, path: Path) -> None:
    """Write the picture in one theme."""
    matplotlib = require_matplotlib()
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme.ink
    )
    with matplotlib.rc_context(colours | {"axes.facecolor": theme.page}):
        figure, ((left, right),) = new_figure(2, width=10, height=5.6)
        figure.set_facecolor(theme.page)
        draw_posterior(left, theme)
        draw_accuracy(right, study, theme)
        for axes in (left, right):
            axes.grid(color=theme.grid)
            axes.title.set_fontsize("medium")
        figure.savefig(path, dpi=160)


def draw_posterior(axes: Axes, theme: Theme) -> None:
    """One prompt: its posterior, and what each group alone says."""
    with (Path(__file__).parent / "readme_posterior.csv").open(encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    rollouts_V, successes_V, alpha_V, beta_V = (
        np.array([row[name] for row in rows]) for name in ("rollouts", "successes", "alpha", "beta")
    )
    visit_V = np.arange(1, len(rows) + 1)
    low_V, high_V = (betaincinv(alpha_V, beta_V, (1 + sign * BAND) / 2) for sign in (-1, 1))
    fraction_V = successes_V / rollouts_V
    same_V = (fraction_V == 0) | (fraction_V == 1)

    blue = theme.arms["dbb"]
    band = axes.fill_between(visit_V, low_V, high_V, color=blue, alpha=0.25, linewidth=0)
    (line,) = axes.plot(visit_V, alpha_V / (alpha_V + beta_V), color=blue, marker="o")
    look = {"color": theme.ink, "linestyle": "", "markersize": 10, "clip_on": False, "zorder": 3}
    (alone,) = axes.plot(visit_V[~same_V], fraction_V[~same_V], marker="D", **look)
    (nothing,) = axes.plot(visit_V[same_V], fraction_V[same_V], marker="X", **look | {"markersize": 13})
    axes.set(xlabel="visit to the prompt", ylabel="success probability", ylim=(-0.03, 1.03))
    axes.set_xticks(visit_V)
    axes.set_title("One prompt, 8 rollouts a visit")
    labels = [f"posterior, {100 * BAND:.0f} % band", "this visit's rollouts alone", "all equal: GRPO learns nothing"]
    axes.legend([(band, line), alone, nothing], labels, **LEGEND)


def draw_accuracy(axes: Axes, study: Study, theme: Theme) -> None:
    """Accuracy gained over rollouts, mean and standard error over seeds; final differences to GRPO in the legend."""
    looks = {"grpo": ("s", (0, (4, 2))), "dbb": ("o", "-"), "auto": ("P", (0, (5, 1, 1, 1)))}
    for arm, (marker, line) in looks.items():
        curves = study.curves(EXPERIMENT, arm)
        thousands_E = next(iter(curves.values()))[0] / 1000
        gain_R_E = np.array([100 * (accuracy_E - accuracy_E[0]) for _, accuracy_E in curves.values()])
        mean_E, error_E = gain_R_E.mean(axis=0), gain_R_E.std(axis=0, ddof=1) / math.sqrt(len(curves))
        color = theme.arms[arm]
        label = "GRPO"
        if arm != analysis.BASELINE:
            test = analysis.compare(study, EXPERIMENT, arm, analysis.BASELINE)
            label = f"{arm} {points(test.mean)} ({points(test.low)} to {points(test.high)})"
        axes.plot(thousands_E, mean_E, color=color, marker=marker, linestyle=line, label=label)
        axes.fill_between(thousands_E, mean_E - error_E, mean_E + error_E, color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel="rollouts, thousands", ylabel="held-out gain, points", ylim=(0, 5.2), xticks=[0, 4, 8, 12, 16])
    axes.set_title(f"2 rollouts a visit, {len(curves)} seeds")
    axes.legend(**LEGEND)


if __name__ == "__main__":
    main()
