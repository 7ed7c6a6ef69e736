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
from openrlhf_dbb.figures import mark_best, new_figure, style
from study import analysis, fewer
from study.analysis import BASELINE, TARGET
from study.data import ARMS, EXPERIMENTS, Floats, Study

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
ESTIMATOR_ARMS = ("grpo", "grpo-wide", "laplace", "dbb", "auto")
METHOD_ARMS = ("grpo", "dr_grpo", "dr_grpo-dbb", "dapo", "greso", "repo")
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
CAPTIONS = {
    "accuracy": "Gain in held-out accuracy over the rollouts generated, mean and standard error over seeds.",
    "methods": "The same for the other methods at N = 8.",
    "differences": "Each arm's difference to GRPO in final accuracy, with 95 % interval, by experiment.",
    "seeds": "The same differences by seed; the bar is the mean.",
    "gradients": "Cosine of each estimator's gradient with the true one at a frozen policy, mean and standard error.",
    "mse": "Mean squared error of the estimated success probabilities against the discount, on recorded runs.",
    "mechanism-n2": "What the arms do in training at N = 2, epoch by epoch, means over seeds.",
    "mechanism-n8": "What the arms do in training at N = 8, epoch by epoch, means over seeds.",
    **{
        test: f"{title}: mean gain in accuracy (line: the target), and arms against GRPO with 95 % interval; filled: "
        f"p (Holm) < {ALPHA:g}."
        for test, title in fewer.TESTS.items()
    },
}
"""Figures by name, in order, and what they show."""
_GAIN = "Acc@8 since the start, points"
_WIDTH = 8.0
_TITLE_WIDTH = 60  # characters
_PANELS = {
    "zero_variance": ("zero-variance rollouts, %", 100),
    "rescued": ("of these rescued, % of all", 100),
    "clip_fraction": ("clipped tokens, %", 100),
    "grad_norm": ("gradient norm", 1),
    "entropy": ("entropy", 1),
    "length": ("response length, tokens", 1),
}


def draw(study: Study, folder: Path) -> list[Path]:
    """Write each figure that has data as PNG; their paths, in the order of ``CAPTIONS``.

    Raises:
        UsageError: matplotlib or scipy is not installed.
    """
    made: dict[str, Callable[[Study], Figure | None]] = {
        "accuracy": _accuracy,
        "methods": _methods,
        "differences": _differences,
        "seeds": _seeds,
        "gradients": _gradients,
        "mse": _errors,
        "mechanism-n2": partial(_mechanism, experiment="n2"),
        "mechanism-n8": partial(_mechanism, experiment="n8"),
        **{test: partial(_fewer, test=test) for test in fewer.TESTS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in made.items():
        figure = make(study)
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


def _accuracy(study: Study) -> Figure | None:
    gains_of = {name: _gains(study, name, ESTIMATOR_ARMS) for name in ("n2", "n4", "n8", "long-n2")}
    experiments = [name for name, gains in gains_of.items() if gains]
    if not experiments:
        return None
    rows = 1 if len(experiments) <= 3 else 2
    figure, panels = _grid(len(experiments), height=4.8 if rows == 1 else 3.6, rows=rows)
    target = {seed: curve[1][-1] for seed, curve in _gains(study, TARGET, [BASELINE]).get(BASELINE, {}).items()}
    for axes, experiment in zip(panels, experiments, strict=True):
        gains = gains_of[experiment]
        seeds = list(next(iter(gains.values())))
        if all(seed in target for seed in seeds):
            level = 100 * float(np.mean([target[seed] for seed in seeds]))
            axes.axhline(level, color="#7F7F7F", linewidth=1.2, label="GRPO at N = 8, final")
        for arm, curves in gains.items():
            _draw_curve(axes, arm, list(curves.values()))
        axes.set_title(f"{EXPERIMENTS[experiment]}, {_seed_count([len(seeds)])}")
        axes.set_xlabel("rollouts, thousands")
    panels[0].set_ylabel(_GAIN)
    _title(figure, "DBB 0.5 - GRPO at the end, in points", _changes(study, experiments, ("dbb",), named=False))
    _legend(figure, panels)
    return figure


def _gains(study: Study, experiment: str, arms: Sequence[str]) -> dict[str, dict[int, tuple[Floats, Floats]]]:
    """Rollouts and the gain in accuracy since the start, by arm and seed; only seeds that all arms have.

    Seeds start from different models: without subtracting the start, the spread over seeds would be that of the models.
    """
    curves = {arm: found for arm in arms if (found := study.curves(experiment, arm))}
    if not curves:
        return {}
    seeds = sorted(set.intersection(*(set(found) for found in curves.values())))
    return {
        arm: {seed: (found[seed][0], found[seed][1] - found[seed][1][0]) for seed in seeds}
        for arm, found in curves.items()
        if seeds
    }


def _draw_curve(axes: Axes, arm: str, curves: Sequence[tuple[Floats, Floats]]) -> None:
    """Mean and standard error over seeds; rollouts are means too, as DAPO's differ between seeds."""
    epochs = min(len(rollouts_E) for rollouts_E, _ in curves)
    x_E = np.mean([rollouts_E[:epochs] for rollouts_E, _ in curves], axis=0) / 1000
    gain_R_E = 100 * np.array([gain_E[:epochs] for _, gain_E in curves])
    mean_E = gain_R_E.mean(axis=0)
    axes.plot(x_E, mean_E, label=ARMS[arm], **STYLE[arm])
    if len(curves) > 1:
        error_E = gain_R_E.std(axis=0, ddof=1) / math.sqrt(len(curves))
        axes.fill_between(x_E, mean_E - error_E, mean_E + error_E, color=STYLE[arm]["color"], alpha=0.15, linewidth=0)


def _methods(study: Study) -> Figure | None:
    gains = _gains(study, TARGET, METHOD_ARMS)
    if not set(gains) - {BASELINE}:
        return None
    figure, (axes,) = _grid(1, height=5.2)
    for arm, curves in gains.items():
        _draw_curve(axes, arm, list(curves.values()))
    axes.set_xlabel("rollouts generated, thousands")
    axes.set_ylabel(_GAIN)
    axes.set_title(f"{EXPERIMENTS[TARGET]}, {_seed_count([len(curves) for curves in gains.values()])}")
    changes = _changes(study, [TARGET], list(gains))
    _title(figure, "Final accuracy vs. GRPO, in points", changes)
    _legend(figure, [axes])
    return figure


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


def _seeds(study: Study) -> Figure | None:
    experiments = _compared(study)
    if not experiments:
        return None
    arms = [arm for arm in ESTIMATOR_ARMS if arm != BASELINE]
    figure, panels = _grid(len(experiments), height=4.6)
    above = []
    for axes, experiment in zip(panels, experiments, strict=True):
        axes.axhline(0, color="black", linewidth=1)
        for place, arm in enumerate(arms):
            test = analysis.compare(study, experiment, arm, BASELINE)
            if not test.n:
                continue
            offset_R = np.linspace(-0.25, 0.25, test.n) if test.n > 1 else np.zeros(1)
            look = {"color": STYLE[arm]["color"], "linestyle": ""}
            axes.plot(
                place + offset_R,
                100 * test.difference_R,
                marker=STYLE[arm]["marker"],
                alpha=0.75,
                label=ARMS[arm],
                **look,
            )
            axes.plot([place - 0.35, place + 0.35], [100 * test.mean] * 2, color=STYLE[arm]["color"])
            if arm == "dbb":
                above.append(f"{int((test.difference_R > 0).sum())}/{test.n} ({EXPERIMENTS[experiment]})")
        axes.set_xticks([])
        axes.set_xlim(-0.6, len(arms) - 0.4)
        axes.set_title(EXPERIMENTS[experiment].replace(", ", ",\n"), fontsize="small")
    panels[0].set_ylabel("vs. GRPO, same seed, points")
    _title(figure, "Seeds on which DBB 0.5 ends above GRPO", ", ".join(above))
    _legend(figure, panels)
    return figure


def _gradients(study: Study) -> Figure | None:
    counts = study.rollouts_of_gradients()
    if not counts:
        return None
    by_n = {n: analysis.alignments(study, n) for n in counts}
    names = list(dict.fromkeys(name for found in by_n.values() for name in found))
    figure, panels = _grid(len(counts), height=0.38 * len(names) + 1.9)
    for axes, (n, found) in zip(panels, by_n.items(), strict=True):
        for place, name in enumerate(names):
            if name in found:
                look = _estimator_style(name)
                error = None if math.isnan(found[name].error) else found[name].error
                axes.errorbar(found[name].cosine, place, xerr=error, **look | {"linestyle": ""})
        if "point" in found:
            axes.axvline(found["point"].cosine, color="black", linewidth=1, linestyle=(0, (4, 2)))
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_title(f"N = {n}, {max(entry.n for entry in found.values())} batches")
    figure.supxlabel("cosine with the gradient of the expected reward", fontsize="small")
    changes = [
        f"{found['dbb_0.5'].minus_point.mean:+.3f} (N = {n})"
        for n, found in by_n.items()
        if "dbb_0.5" in found and found["dbb_0.5"].minus_point.n
    ]
    _title(figure, "Gradient cosine, DBB 0.5 - point", ", ".join(changes))
    return figure


def _errors(study: Study) -> Figure | None:
    counts = study.rollouts_of_errors()
    if not counts:
        return None
    figure, panels = _grid(len(counts), height=4.8, sharey=False)
    gains = []
    for axes, n in zip(panels, counts, strict=True):
        curves = analysis.errors(study, n)
        for name, curve in curves.items():
            look = style(name)
            entries = sorted(curve.values(), key=lambda entry: entry.discount)
            if len(entries) == 1:
                axes.axhline(entries[0].mse, color=look["color"], linestyle=look["linestyle"], label=name)
            else:
                look |= {"markevery": 4, "label": name}
                axes.plot([entry.discount for entry in entries], [entry.mse for entry in entries], **look)
        if "dbb" in curves:
            least = analysis.best(curves["dbb"])
            mark_best(axes, least.discount, least.mse, "dbb")
            gains.append(f"{100 * (least.ratio - 1):+.0f} % (N = {n})")
        if "point" in curves:  # curves above twice its error are of no interest
            axes.set_ylim(0, 2 * analysis.best(curves["point"]).mse)
        axes.set_title(f"N = {n}")
        axes.set_xlabel("discount")
    panels[0].set_ylabel("MSE")
    _title(figure, "MSE of DBB at its best discount against that of point", ", ".join(gains))
    _legend(figure, panels)
    return figure


def _mechanism(study: Study, experiment: str) -> Figure | None:
    rows = [row for row in study.epochs if row.experiment == experiment and row.epoch > 0]
    seeds_of = {arm: {row.seed for row in rows if row.arm == arm} for arm in ESTIMATOR_ARMS}
    arms = [arm for arm, seeds in seeds_of.items() if seeds]
    if not arms:
        return None
    common = set.intersection(*(seeds_of[arm] for arm in arms))
    rows = [row for row in rows if row.seed in common]
    figure, grid = new_figure(3, 2, width=_WIDTH, height=6.6, sharex=True, squeeze=False)
    rescued = None
    for axes, (name, (title, factor)) in zip(grid.flat, _PANELS.items(), strict=True):
        for arm in arms:
            found: dict[int, list[float]] = {}
            for row in rows:
                if row.arm == arm and not math.isnan(value := getattr(row, name)):
                    found.setdefault(row.epoch, []).append(value)
            mean = {epoch: factor * float(np.mean(found[epoch])) for epoch in sorted(found)}
            axes.plot(list(mean), list(mean.values()), label=ARMS[arm], **STYLE[arm])
            if (name, arm) == ("rescued", "dbb") and mean:
                rescued = list(mean.values())[-1]
        axes.set_title(title, fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
        axes.set_xticks(sorted({row.epoch for row in rows}))
    message = "" if rescued is None else f"in the last epoch DBB 0.5 rescues {rescued:.0f} % of all rollouts"
    _title(figure, EXPERIMENTS[experiment], message)
    _legend(figure, list(grid.flat))
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


def _estimator_style(name: str) -> dict[str, Any]:
    """The style of an estimator of gradients.csv: its family's; other colours for Dr.GRPO, grey for the oracles."""
    if name.startswith("dr_"):
        return dict(STYLE["dr_grpo-dbb"] if name != "dr_point" else STYLE["dr_grpo"])
    return style("dbb" if name.startswith("dbb") else name)
