"""``lab simulate``: any estimator on named regimes of changing success probabilities."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb import figures, options
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.figures import write_csv
from openrlhf_dbb.lab import curves, specs
from openrlhf_dbb.lab.curves import Curve
from openrlhf_dbb.terminal import print_json, records, table
from study import regimes
from study import simulation_in_time as in_time
from study.simulation import Result, Setting, simulate

_ESTIMATORS = (
    "point", "dbb:discount=0.25", "dbb:discount=0.5", "dbb:discount=0.75",
    "ema", "laplace", "empirical_bayes", "gaussian", "auto",
)  # fmt: skip
_ROLLOUTS = (4, 8, 16)
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)
_OVER_ROLLOUTS = ("stationary-U", "paper-walk", "paper-drift", "decelerating")
_RELATIVE_LABEL = "MSE / MSE of the point estimator"


def add_command(commands: Any) -> None:
    """Add ``simulate`` to the study's commands."""
    text = "mean squared error of estimators on simulated trainings, where the truth is known"
    parser = commands.add_parser("simulate", help=text, description=text)
    known = ", ".join(regimes.REGIMES)
    parser.add_argument("--regimes", nargs="+", metavar="NAME", default=list(regimes.REGIMES), help=f"of: {known}")
    parser.add_argument(
        "--estimators", nargs="+", metavar="SPEC", default=_ESTIMATORS, help=f"default: {' '.join(_ESTIMATORS)}"
    )
    parser.add_argument(
        "--rollouts", nargs="+", type=int, metavar="N", default=_ROLLOUTS, help="group sizes (default: 4 8 16)"
    )
    text = "in (0, 1]: tried and drawn; laplace's smoothing too (default: 0.02, 0.05, 0.1, 0.15 ... 1)"
    parser.add_argument("--discounts", nargs="+", type=float, metavar="X", default=curves.DISCOUNTS, help=text)
    for name, meaning in (
        ("prompts", "prompts"),
        ("visits", "epochs, in each of which every prompt is visited once"),
        ("batch", "prompts in a policy step"),
        ("seeds", "simulated trainings of each kind"),
        ("seed", "seed of the first"),
    ):
        default = getattr(Setting, name)
        parser.add_argument(f"--{name}", type=int, metavar="K", default=default, help=f"{meaning} (default: {default})")
    text = (
        "measure estimates and forecasts in time instead, with the prompts of a policy step drawn by: epoch (each once "
        "a pass), uniform (at random from all), variance (in proportion to p (1 - p))"
    )
    parser.add_argument("--draw", nargs="+", choices=in_time.DRAWS, metavar="HOW", help=text)
    options.add_folder(parser, "for the files", default=Path("study-simulation"))
    options.add_json(parser)
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> int:
    setting, names, sizes, discounts = _checked(arguments)
    estimators = [specs.parse(text) for text in arguments.estimators]
    for estimator in estimators:
        if estimator.features != "none":
            raise UsageError(
                f"--estimators {specs.label(estimator)}: it reads {estimator.features} features, and simulated prompts "
                f"have none; give {estimator.name}:features=none, or use lab replay"
            )
    folder = figures.folder(arguments.output)
    if arguments.draw:
        _in_time(folder, list(dict.fromkeys(arguments.draw)), estimators, names, sizes, setting, as_json=arguments.json)
        return 0
    results = []
    for name, size in _progress([(name, size) for name in names for size in sizes]):
        results.append(simulate(estimators, discounts, name, size, setting))
    if not arguments.json:
        header, rows = ratios([specs.label(e) for e in estimators], results)
        print("MSE in units of dbb's at the best fixed discount in hindsight, mean over seeds\n")
        print(table(header, rows), end="\n\n")

    measured = _measured(estimators, results)
    files = [write_csv(folder / "table.csv", _MEASURED, measured), _write_curves(folder, results)]
    for size in sizes:
        files += _draw_regimes(folder, estimators, [result for result in results if result.rollouts == size])
    over_rollouts = [name for name in _OVER_ROLLOUTS if name in names] or names[:4]
    files += _draw_rollouts(folder, over_rollouts, discounts, setting)
    if arguments.json:
        print_json({"results": records(_MEASURED, measured), "files": list(map(str, files))})
    else:
        print(*files, sep="\n")
    return 0


def _in_time(
    folder: Path,
    draws: Sequence[str],
    estimators: Sequence[RewardEstimator],
    names: Sequence[str],
    sizes: Sequence[int],
    setting: Setting,
    *,
    as_json: bool,
) -> None:
    """Run ``lab simulate --draw``: all ways to draw, and one table."""
    labels, results = [specs.label(e) for e in estimators], []
    for drawn in draws:
        for name, size in _progress([(name, size) for name in names for size in sizes]):
            results.append(in_time.simulate(estimators, name, drawn, size, setting))
    rows = [
        (result.drawn, result.regime, result.rollouts, label, *result.values_M_E_K[:, e].mean(axis=1))
        for result in results
        for e, label in enumerate(labels)
    ]
    header = ("draw", "regime", "rollouts", "estimator", *in_time.MEASURES)
    path = write_csv(folder / "in_time.csv", header, rows)
    if as_json:
        print_json({"results": records(header, rows), "files": [str(path)]})
        return
    print(f"geometric means over {len(names)} regimes (worst regime); visits and forecasts: squared errors in units of")
    print(f"{labels[0]}'s; spread: E[p (1 - p)] forecast / true; coverage, log score: means\n")
    print(table(*in_time_table(labels, results)), path, sep="\n\n")


def in_time_table(labels: Sequence[str], results: Sequence[in_time.Result]) -> tuple[list[str], list[list[Any]]]:
    """Header, and a row for each way to draw, group size and estimator: means over regimes."""
    rows: list[list[Any]] = []
    for drawn, size in dict.fromkeys((result.drawn, result.rollouts) for result in results):
        cell = [result for result in results if (result.drawn, result.rollouts) == (drawn, size)]
        values_M_R_E = np.stack([result.values_M_E_K.mean(axis=2) for result in cell], axis=1)
        errors_2_R_E = values_M_R_E[:2] / values_M_R_E[:2, :, :1]
        spread_R_E, coverage_R_E, score_R_E = values_M_R_E[2:]
        for e, label in enumerate(labels):
            columns = [_summary(values_R_E[:, e], values_R_E[:, e].max()) for values_R_E in errors_2_R_E]
            worst = spread_R_E[np.abs(np.log(spread_R_E[:, e])).argmax(), e]
            columns += [_summary(spread_R_E[:, e], worst)]
            columns += [_known(coverage_R_E[:, e].mean(), ".3f"), _known(score_R_E[:, e].mean(), ".4f")]
            rows.append([drawn, size, label, *columns])
    return ["draw", "N", "estimator", *(name.replace("_", " ") for name in in_time.MEASURES)], rows


def _summary(values_R: Floats, worst: float) -> str | None:
    """Geometric mean, and the worst of the values."""
    return None if np.isnan(worst) else f"{np.exp(np.log(values_R).mean()):.3f} ({worst:.2f})"


def _known(value: float, form: str) -> str | None:
    """The number as text; None if there is none, because the estimator gives no forecasts."""
    return None if np.isnan(value) else f"{value:{form}}"


def _checked(arguments: argparse.Namespace) -> tuple[Setting, list[str], list[int], list[float]]:
    """Setting, regimes, group sizes and discounts, each once."""
    for name in ("prompts", "visits", "batch", "seeds"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {arguments.seed}")
    for size in arguments.rollouts:
        if size < 1:
            raise UsageError(f"--rollouts must be at least 1, got {size}")
    for discount in arguments.discounts:
        if not 0 < discount <= 1:
            raise UsageError(f"--discounts {discount:g} is not in (0, 1]")
    try:
        names = [regimes.get(name).name for name in dict.fromkeys(arguments.regimes)]
    except ValueError as error:
        raise UsageError(f"--regimes: {error}") from error
    setting = Setting(arguments.prompts, arguments.visits, arguments.batch, arguments.seeds, arguments.seed)
    return setting, names, sorted(set(arguments.rollouts)), sorted(set(arguments.discounts))


def _progress(cells: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The cells, with a bar if tqdm is installed, else a line for each."""
    try:
        from tqdm import tqdm
    except ImportError:
        for done, (name, size) in enumerate(cells):
            print(f"[{done + 1}/{len(cells)}] {name}, N = {size}", file=sys.stderr, flush=True)
            yield name, size
    else:
        yield from tqdm(cells, desc="simulating", unit="cell", leave=False, disable=None)


def ratios(labels: Sequence[str], results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """The table: header, and a row for each result, then maximum and geometric mean over them."""
    ratio_R_E = np.array([result.ratio_E_K.mean(axis=1) for result in results])
    rows = [(result.regime, result.rollouts, *ratio_E) for result, ratio_E in zip(results, ratio_R_E, strict=True)]
    rows.append(("maximum", None, *ratio_R_E.max(axis=0)))
    rows.append(("geometric mean", None, *np.exp(np.log(ratio_R_E).mean(axis=0))))
    return ["regime", "N", *labels], [[*row[:2], *(f"{value:.3f}" for value in row[2:])] for row in rows]


_MEASURED = ("regime", "rollouts", "estimator", "mse", "mse_error", "ratio", "ratio_error")


def _measured(estimators: Sequence[RewardEstimator], results: Sequence[Result]) -> list[tuple[Any, ...]]:
    return [
        (result.regime, result.rollouts, specs.label(e), *_mean_and_error(mse_K), *_mean_and_error(ratio_K))
        for result in results
        for e, mse_K, ratio_K in zip(estimators, result.mse_E_K, result.ratio_E_K, strict=True)
    ]


def _write_curves(folder: Path, results: Sequence[Result]) -> Path:
    rows = (
        (result.regime, result.rollouts, name, x, *_mean_and_error(mse_K))
        for result in results
        for name, (x_X, mse_X_K) in result.sweeps.items()
        for x, mse_K in zip(x_X, mse_X_K, strict=True)
    )
    header = ("regime", "rollouts", "estimator", "discount_or_smoothing", "mse", "mse_error")
    return write_csv(folder / "discounts.csv", header, rows)


def _mean_and_error(values_K: Floats) -> tuple[float, float | None]:
    """Mean over seeds and its standard error (None with one seed)."""
    count = len(values_K)
    return float(values_K.mean()), float(values_K.std(ddof=1) / count**0.5) if count > 1 else None


def _curves(estimators: Sequence[RewardEstimator], result: Result) -> list[Curve]:
    """Means over seeds: curves over the discount or smoothing, levels for estimators with neither."""
    families = specs.families(estimators)
    swept = [
        Curve(families[label].name, label, x, mse_X_K.mean(axis=1)) for label, (x, mse_X_K) in result.sweeps.items()
    ]
    means = zip(estimators, result.mse_E_K.mean(axis=1).tolist(), strict=True)
    return swept + curves.by_family([(e, mean) for e, mean in means if not specs.knob(e)])


def _panels(count: int, *, columns: int = 3, height: float) -> tuple[Any, list[Any]]:
    """Return a figure with ``count`` panels of ``height`` inches on shared axes."""
    columns = min(count, columns)
    rows = -(-count // columns)
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    figure, grid = figures.new_figure(columns, rows, height=height * rows + 0.6, **shared)
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.remove()
        # The panel above is now the bottom one of its column.
        panels[panels.index(spare) - columns].tick_params(labelbottom=True)
    return figure, panels[:count]


def _draw_regimes(folder: Path, estimators: Sequence[RewardEstimator], results: Sequence[Result]) -> list[Path]:
    """A panel for each regime."""
    figure, panels = _panels(len(results), height=1.6)
    for panel, result in zip(panels, results, strict=True):
        curves.draw(panel, _curves(estimators, result), unit=float(result.point_K.mean()))
        panel.set_xlabel("")
        panel.set_title(result.regime)
        panel.set_ylim(0, 1.4)
    figure.supxlabel(curves.DISCOUNT_LABEL)
    figure.supylabel(_RELATIVE_LABEL)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figures.save(figure, folder, f"discounts_N{results[0].rollouts}")


def _draw_rollouts(folder: Path, names: Sequence[str], discounts: Sequence[float], setting: Setting) -> list[Path]:
    """MSE against N: estimators without tuning, beside dbb at 0.4 and at the best discount of each N."""
    fixed = [specs.parse(text) for text in ("point", "empirical_bayes", "auto", "dbb:discount=0.4")]
    labelled = [(e.name, specs.label(e)) for e in fixed] + [("dbb", "dbb, best discount")]
    sizes = np.array(_GROUP_SIZES, dtype=np.float64)
    figure, panels = _panels(len(names), columns=2, height=2.6)
    drawn_rows = []
    for panel, regime in zip(panels, names, strict=True):
        results = [simulate(fixed, discounts, regime, size, setting) for size in _GROUP_SIZES]
        mse_N_E_K = np.array([[*result.mse_E_K, result.best_K] for result in results])
        relative_E_N = (mse_N_E_K.mean(axis=2) / mse_N_E_K[:, :1].mean(axis=2)).T
        drawn = zip(labelled, relative_E_N, strict=True)
        for (name, label), mse_N in drawn:
            panel.plot(
                sizes,
                mse_N,
                label=label,
                **(figures.style(name) | ({"linestyle": (0, (3, 1))} if "best" in label else {})),
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.minorticks_off()
        panel.set_title(regime)
        panel.set_ylim(0, 1.4)
        drawn_rows += [
            (regime, size, label, *_mean_and_error(mse_K))
            for size, mse_E_K in zip(_GROUP_SIZES, mse_N_E_K, strict=True)
            for (_, label), mse_K in zip(labelled, mse_E_K, strict=True)
        ]
    figure.supxlabel("rollouts of a group, N")
    figure.supylabel(_RELATIVE_LABEL)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    header = ("regime", "rollouts", "estimator", "mse", "mse_error")
    return [write_csv(folder / "rollouts.csv", header, drawn_rows), *figures.save(figure, folder, "rollouts")]
