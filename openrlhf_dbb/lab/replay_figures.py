"""Figures of ``lab replay``: the criterion over the discount, and histograms of the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openrlhf_dbb import figures
from openrlhf_dbb.figures import small_multiples
from openrlhf_dbb.lab import criteria, error_curves, specs
from openrlhf_dbb.lab.outcomes import Outcome, Ranking

_LONG_LABEL = 20  # characters; longer ones do not fit three to a line


def draw_criterion(folder: Path, ranking: Ranking) -> list[Path]:
    """The criterion over the discount; the band is the 95 % interval of dbb's difference to its best point."""
    figure, axes = figures.new_figure(width=6, height=4.5)
    families: dict[str, list[int]] = {}
    for at, outcome in enumerate(ranking.candidates):
        families.setdefault(specs.family(outcome.estimator), []).append(at)
    drawn, bootstrap, best = [], ranking.bootstrap, ranking.best_of("dbb")
    for family, members in families.items():
        members.sort(key=lambda at: ranking.candidates[at].value or 0)
        name = ranking.candidates[members[0]].estimator.name
        x = np.array([ranking.candidates[at].value for at in members] if len(members) > 1 else [], dtype=float)
        drawn.append(error_curves.ErrorCurve(name, family, x, bootstrap.mean_C[members]))
        if best in members and x.size:
            _, low, high = (bootstrap.mean_C[best] + excess[members] for excess in bootstrap.excess(best))
            color = figures.style(name)["color"]
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0, label="95 % of dbb - its best")
    error_curves.draw_discounts(axes, error_curves.merged(drawn))
    axes.set_xlabel("discount or smoothing")
    axes.set_ylabel("minus log-likelihood (nats)" if ranking.criterion == "likelihood" else "MSE (reward$^2$)")
    figure.legend(loc="outside upper center", ncols=3 if max(map(len, families)) < _LONG_LABEL else 2)
    return figures.save(figure, folder, f"replay_{ranking.criterion}")


def draw_advantages(folder: Path, shown: Sequence[Outcome]) -> list[Path]:
    """Histograms of the nonzero advantages, with the share of exact zeros."""
    figure, panels = small_multiples(len(shown))
    centres = (criteria.EDGES[:-1] + criteria.EDGES[1:]) / 2
    for axes, outcome in zip(panels, shown, strict=True):
        color = figures.style(outcome.estimator.name)["color"]
        axes.bar(centres, 100 * outcome.advantages.histogram, width=np.diff(criteria.EDGES), color=color)
        axes.set_title(outcome.label)
        axes.text(0.97, 0.95, f"{outcome.advantages.zeros:.0%} are 0", ha="right", va="top", transform=axes.transAxes)
    figure.supxlabel("advantage (standard deviations; outer bars: and beyond)", fontsize="medium")
    figure.supylabel("rollouts (%)", fontsize="medium")
    return figures.save(figure, folder, "replay_advantages")
