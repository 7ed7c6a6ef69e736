"""Draw the README's picture, for light and for dark pages.

    python scripts/draw_readme.py [--output docs/figures]        takes seconds; needs matplotlib and scipy

Left: the prompt "s579=" (sort these digits) of a run of the tiny preset, from readme_posterior.csv beside this script.
It had groups of all three kinds: all wrong, mixed, all right. The run and the query were

    python -m openrlhf_dbb.cli.train_grpo --preset tiny --estimator dbb --train.num_episodes 8
    SELECT step, rollouts, successes, alpha, beta FROM posterior_history JOIN prompts USING (prompt_id)
    WHERE run_id = 1 AND prompt = 's579=' ORDER BY step

Right: SmolLM2-135M on sums, prompts drawn evenly, by the memory, and by the memory from known success rates
(study/protocols/draws.toml). The held-out sums are of the kinds that the model can learn.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
EPOCHS = ROOT / "study" / "results" / "draws" / "epochs.csv"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
THEMES = {
    "readme": {
        "page": "#FFFFFF",
        "ink": "#1F2328",
        "grid": "#E0E0E0",
        "blue": "#0072B2",
        "orange": "#D55E00",
    },
    "readme-dark": {
        "page": "#0D1117",
        "ink": "#E6EDF3",
        "grid": "#30363D",
        "blue": "#56B4E9",
        "orange": "#E69F00",
    },
}
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.46, -0.2),
    "fontsize": "small",
    "frameon": False,
}
SIZES = {"font.size": 18, "lines.linewidth": 3, "lines.markersize": 8, "axes.axisbelow": True}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def accuracy(arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rollouts (E,) of an arm's evaluations and its accuracies (seeds, E), both in order."""
    curves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in read(EPOCHS):
        # Other learning rates
        if row["arm"] == arm and row["accuracy"] and row["experiment"] != "rate":
            curves[int(row["seed"])].append((float(row["rollouts"]), float(row["accuracy"])))
    points = np.array([sorted(curve) for _, curve in sorted(curves.items())])
    return points[0, :, 0], points[:, :, 1]


def draw_posterior(axes: Axes, theme: dict[str, str]) -> None:
    """Draw one prompt's posterior, and the share of successes in each group alone."""
    rows = [
        {name: float(value) for name, value in row.items()}
        for row in read(ROOT / "scripts/readme_posterior.csv")
    ]
    alpha_V, beta_V = (np.array([row[name] for row in rows]) for name in ("alpha", "beta"))
    fraction_V = np.array([row["successes"] / row["rollouts"] for row in rows])
    equal_V = (fraction_V == 0) | (fraction_V == 1)
    visit_V = np.arange(1, len(rows) + 1)
    low_V, high_V = stats.beta.interval(0.9, alpha_V, beta_V)
    band = axes.fill_between(visit_V, low_V, high_V, color=theme["blue"], alpha=0.25, linewidth=0)
    (line,) = axes.plot(visit_V, alpha_V / (alpha_V + beta_V), color=theme["blue"], marker="o")
    look = {"color": theme["ink"], "linestyle": "", "clip_on": False, "zorder": 3}
    (alone,) = axes.plot(visit_V[~equal_V], fraction_V[~equal_V], marker="D", markersize=10, **look)
    (nothing,) = axes.plot(visit_V[equal_V], fraction_V[equal_V], marker="X", markersize=13, **look)
    axes.set(
        xlabel="visit to the prompt",
        ylabel="success probability",
        ylim=(-0.03, 1.03),
        xticks=visit_V,
    )
    axes.set_title("One prompt, 8 rollouts a visit", fontsize="medium")
    labels = [
        "posterior, 90 % band",
        "this visit's rollouts alone",
        "all equal: GRPO learns nothing",
    ]
    axes.legend([(band, line), alone, nothing], labels, **BELOW)


def draw_accuracy(axes: Axes, theme: dict[str, str]) -> None:
    """Draw held-out accuracy over rollouts: mean over seeds, and a 95 % interval of it at each point."""
    looks = (
        ("rates", "drawn by measured rates", theme["blue"], "o", "-"),
        ("learns", "drawn by the memory", theme["orange"], "D", (0, (1, 1))),
        ("even8", "drawn evenly: GRPO", theme["ink"], "s", (0, (4, 2))),
    )
    for arm, name, color, marker, line in looks:
        rollouts_E, accuracy_S_E = accuracy(arm)
        mean_E = 100 * accuracy_S_E.mean(axis=0)
        quantile = stats.t.ppf(0.975, len(accuracy_S_E) - 1)
        error_E = 100 * quantile * stats.sem(accuracy_S_E)
        axes.plot(
            rollouts_E,
            mean_E,
            color=color,
            marker=marker,
            linestyle=line,
            label=f"{name}, n = {len(accuracy_S_E)}",
        )
        axes.fill_between(
            rollouts_E, mean_E - error_E, mean_E + error_E, color=color, alpha=0.15, linewidth=0
        )
    axes.set(xlabel="rollouts", ylabel="right, learnable sums, %", xticks=rollouts_E)
    axes.set_title("SmolLM2-135M, 95 % bands", fontsize="medium")
    axes.legend(**BELOW)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "figures", help="default docs/figures"
    )
    folder = parser.parse_args().output
    for name, theme in THEMES.items():
        colours = dict.fromkeys(INKED, theme["ink"]) | {"axes.facecolor": theme["page"]}
        with matplotlib.rc_context(SIZES | colours):
            figure = Figure(figsize=(10, 5.6), layout="constrained", facecolor=theme["page"])
            left, right = figure.subplots(1, 2)
            draw_posterior(left, theme)
            draw_accuracy(right, theme)
            for axes in (left, right):
                axes.grid(color=theme["grid"])
                axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(folder / f"{name}.png", dpi=160)
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
