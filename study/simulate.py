"""``python -m study simulate``: the error of any estimator on named regimes of changing success probabilities."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.lab import candidates
from study import regimes
from study.figures import LOOKS, new_figure
from study.simulation import DRAWS, MEASURES, Result, Setting, simulate

_ESTIMATORS = (
    "point", "dbb:discount=0.25", "dbb:discount=0.5", "dbb:discount=0.75",
    "ema", "laplace", "empirical_bayes", "gaussian", "auto",
)  # fmt: skip


def add_command(commands: Any) -> None:
    """Declare ``python -m study simulate``."""
    text = "mean squared error of estimators on simulated trainings, where the truth is known"
    parser = commands.add_parser("simulate", help=text, description=text)
    known = ", ".join(regimes.REGIMES)
    parser.add_argument(
        "--regimes", nargs="+", metavar="NAME", default=list(regimes.REGIMES), help=f"of: {known}"
    )
    parser.add_argument(
        "--estimators",
        nargs="+",
        metavar="SPEC",
        default=_ESTIMATORS,
        help=f"default: {' '.join(_ESTIMATORS)}",
    )
    parser.add_argument(
        "--rollouts",
        nargs="+",
        type=int,
        metavar="N",
        default=(4, 8, 16),
        help="group sizes (4 8 16)",
    )
    text = (
        "in (0, 1]: tried and drawn; laplace's smoothing too (default: 0.02, 0.05, 0.1, 0.15 ... 1)"
    )
    parser.add_argument(
        "--discounts", nargs="+", type=float, metavar="X", default=candidates.DISCOUNTS, help=text
    )
    for name, meaning in (
        ("prompts", "prompts"),
        ("visits", "passes, in each of which a prompt is visited once on average"),
        ("batch", "prompts in a policy update"),
        ("seeds", "simulated trainings of each kind"),
        ("seed", "seed of the first"),
    ):
        default = getattr(Setting, name)
        parser.add_argument(
            f"--{name}",
            type=int,
            metavar="K",
            default=default,
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--draw", choices=DRAWS, default="visits", help="how prompts come back (%(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("study-simulation"), metavar="DIR", help="%(default)s"
    )
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> int:
    estimators = [candidates.parse(text) for text in arguments.estimators]
    unknown = [name for name in arguments.regimes if name not in regimes.REGIMES]
    if unknown:
        raise UsageError(
            f"--regimes {unknown[0]}: no such regime; known: {', '.join(regimes.REGIMES)}"
        )
    setting = Setting(
        arguments.prompts, arguments.visits, arguments.batch, arguments.seeds, arguments.seed
    )
    cells = [(name, size) for name in arguments.regimes for size in arguments.rollouts]
    results = [
        simulate(estimators, arguments.discounts, name, arguments.draw, size, setting)
        for name, size in tqdm(cells, desc="simulating", unit="cell", leave=False, disable=None)
    ]
    labels = [candidates.label(estimator) for estimator in estimators]
    print(
        "MSE at the visits in units of dbb's at the best fixed discount in hindsight, mean over seeds\n"
    )
    print(ratios(labels, results).to_string(float_format="{:.3f}".format), end="\n\n")
    print("forecasts in units of those of the first estimator that makes any, means over regimes\n")
    print(forecasts(labels, results).to_string(float_format="{:.3f}".format), end="\n\n")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "simulated.csv"
    measured(labels, results).to_csv(path, index=False, float_format="%.6g")
    print(
        path,
        *(_draw(arguments.output, labels, results, size) for size in arguments.rollouts),
        sep="\n",
    )
    return 0


def ratios(labels: Sequence[str], results: Sequence[Result]) -> Any:
    """Return each estimator's error over dbb's best by regime and N, and their maximum and geometric mean."""
    rows = {(result.regime, result.rollouts): _ratio(result) for result in results}
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(labels))
    table.index = pd.MultiIndex.from_tuples(rows, names=["regime", "N"])
    table.loc[("maximum", ""), :] = table.max()
    table.loc[("geometric mean", ""), :] = np.exp(np.log(table.iloc[:-1]).mean())
    return table


def _ratio(result: Result) -> Floats:
    return np.asarray((result.values_M_E_K[0] / result.best_K).mean(axis=1))


def measured(labels: Sequence[str], results: Sequence[Result]) -> Any:
    """Return every measure by regime, N and estimator, means over seeds."""
    return pd.DataFrame([
        {"draw": result.drawn, "regime": result.regime, "rollouts": result.rollouts, "estimator": label}
        | dict(zip(MEASURES, result.values_M_E_K[:, place].mean(axis=1), strict=True))
        | {"ratio": _ratio(result)[place]}
        for result in results
        for place, label in enumerate(labels)
    ])  # fmt: skip


def forecasts(labels: Sequence[str], results: Sequence[Result]) -> Any:
    """Return the measures of forecasts by N and estimator, means over regimes (of ratios: geometric means)."""
    table = measured(labels, results).dropna(subset=["forecasts"])
    first = (
        table[table.estimator == table.estimator.iloc[0]]
        .set_index(["regime", "rollouts"])
        .forecasts
    )
    table["forecasts"] /= first.reindex(
        pd.MultiIndex.from_frame(table[["regime", "rollouts"]])
    ).to_numpy()
    table[["forecasts", "spread"]] = np.log(table[["forecasts", "spread"]])
    means = table.groupby(["rollouts", "estimator"], sort=False)[list(MEASURES[1:])].mean()
    means[["forecasts", "spread"]] = np.exp(means[["forecasts", "spread"]])
    return means


def _draw(folder: Path, labels: Sequence[str], results: Sequence[Result], size: int) -> Path:
    """Draw the error over the discount and that of estimators without one, a panel for each regime."""
    mine = [result for result in results if result.rollouts == size]
    rows = -(-len(mine) // 3)
    figure, grid = new_figure(3, rows, height=1.8 * rows + 1.0, sharex=True)
    for panel, result in zip(grid.flat, mine, strict=False):
        for name, (x, mse_X) in result.sweeps.items():
            if name in LOOKS:  # others lie on these curves
                panel.plot(
                    x, mse_X / result.best_K.mean(), label=name, **(LOOKS[name] | {"marker": ""})
                )
        for label, ratio in zip(labels, _ratio(result), strict=True):
            if label in LOOKS:
                panel.axhline(ratio, label=label, **(LOOKS[label] | {"marker": ""}))
        panel.set(title=result.regime, ylim=(0.3, 2.7))
    for spare in grid.flat[len(mine) :]:
        spare.set_visible(False)
    figure.supxlabel("discount (laplace: smoothing in rollouts)")
    figure.supylabel("MSE over dbb's best")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    path = folder / f"simulated_N{size}.png"
    figure.savefig(path, dpi=150)
    return path
