"""``lab mse``: closed forms of bias, variance and mean squared error, for given or probed success probabilities."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb import figures, options
from openrlhf_dbb.csv_files import write_csv
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.figures import small_multiples
from openrlhf_dbb.lab import error_curves, paper, probed, recorded, specs
from openrlhf_dbb.lab.error_curves import DISCOUNTS, ErrorCurve
from openrlhf_dbb.lab.probabilities import Probabilities
from openrlhf_dbb.lab.recorded import RecordedRun
from openrlhf_dbb.terminal import print_json, records, table

_ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes")
_GROUP_SIZES = (2, 4, 8, 16, 32)


def add_command(commands: Any) -> None:
    """Add ``mse`` to the laboratory's commands."""
    text = "closed-form bias, variance and mean squared error for known success probabilities"
    parser = commands.add_parser("mse", help=text, description=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("run", nargs="?", metavar="RUN", help=f"a stored run with probes: {options.RUN_HELP}")
    source.add_argument("--p", nargs="+", metavar="P1,P2,...", help="a prompt's success probabilities, visit by visit")
    source.add_argument("--csv", metavar="FILE", help="the same, a row for each prompt, without a header")
    options.add_store(parser)
    parser.add_argument("--rollouts", type=int, metavar="N", help="group size (default: the run's, else 8)")
    text = f"as dbb:discount=0.4 (default: {' '.join(_ESTIMATORS)})"
    parser.add_argument("--estimators", nargs="+", metavar="SPEC", default=_ESTIMATORS, help=text)
    options.add_folder(parser, "for the files", default=Path("lab/mse"))
    options.add_json(parser)
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> None:
    estimators = [specs.parse(text) for text in arguments.estimators]
    if arguments.rollouts is not None and arguments.rollouts < 1:
        raise UsageError(f"--rollouts must be at least 1, got {arguments.rollouts}")
    run = None if arguments.p or arguments.csv else recorded.read(arguments)
    if run is not None:
        probabilities = probed.probabilities(run)
        rollouts = arguments.rollouts or run.visits.usual_rollouts
        title = f"{run.record.name}, N = {rollouts}"
    else:
        probabilities, rollouts = Probabilities.exactly(_sequences(arguments)), arguments.rollouts or 8
        title = f"given probabilities, N = {rollouts}"
    folder = figures.folder(arguments.output)
    header, rows = by_visit(probabilities, estimators, rollouts)
    if not arguments.json:
        print(f"{title}: mean over {len(probabilities.p_Q_T)} prompts\n")
        print(table(header, rows), end="\n\n")
        if run is not None:
            _print_probed(run, probabilities, rollouts)
    files = [
        _write_moments(folder, probabilities, estimators, rollouts),
        _write_curves(folder, probabilities, estimators, rollouts),
    ]
    files += error_curves.discount_figure(folder, "discounts", title, _curves(probabilities, estimators, rollouts))
    files += _draw_rollouts(folder, probabilities, rollouts)
    files += _draw_prior(folder, title, probabilities, rollouts)
    if arguments.json:
        found = {"rollouts": rollouts, "prompts": len(probabilities.p_Q_T), "moments": records(header, rows)}
        if run is not None:
            found |= {"run": run.record.name, "own_errors": records(_ERRORS, _errors(run))}
        print_json(found | {"files": list(map(str, files))})
    else:
        print(*files, sep="\n")


def _sequences(arguments: argparse.Namespace) -> Floats:
    """The probabilities of ``--p`` or ``--csv``, (Q, T), NaN after a prompt's last visit."""
    if arguments.p:
        source, lines = "--p", [text.split(",") for text in arguments.p]
    else:
        source = f"--csv {arguments.csv}"
        try:
            with open(arguments.csv, newline="", encoding="utf-8") as file:
                lines = [line for line in csv.reader(file) if line]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"{source}: {error}") from error
        if not lines:
            raise UsageError(f"{source} is empty; write a row p1,p2,... for each prompt")
    p_Q_T = np.full((len(lines), max(len(line) for line in lines)), np.nan)
    for row, line in enumerate(lines):
        for column, text in enumerate(line):
            if text.strip() or not column:
                p_Q_T[row, column] = _probability(source, row, text)
    return p_Q_T


def _probability(source: str, row: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise UsageError(f"{source}, row {row + 1}: {text!r} is not a probability in [0, 1]")
    return value


def by_visit(
    probabilities: Probabilities, estimators: Sequence[RewardEstimator], rollouts: int
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The table: header, and bias^2, variance and MSE by estimator and visit, then over all visits."""
    rows: list[tuple[Any, ...]] = []
    for estimator in estimators:
        found = probabilities.moments(estimator, rollouts)
        parts = (found.bias**2, found.variance, found.mse)
        for visit in range(probabilities.p_Q_T.shape[1]):
            rows.append((specs.label(estimator), str(visit + 1), *(float(np.nanmean(x[:, visit])) for x in parts)))
        rows.append((specs.label(estimator), "all", *(float(np.nanmean(x)) for x in parts)))
    return ["estimator", "visit", "bias^2", "variance", "mse"], rows


def _print_probed(run: RecordedRun, probabilities: Probabilities, rollouts: int) -> None:
    if run.record.parent is not None:
        print("The run was warm-started; the closed forms start from the estimators' own priors nevertheless.\n")
    print("Closed forms with the probed p~ in place of p, beside the paper's (Qwen3-1.7B-Base, N = 8). Squared")
    print("differences of p~ between visits include the probes' noise; it is removed in the second column.\n")
    print(table(*paper.beside(probabilities, rollouts)), end="\n\n")
    print("Errors of the run's own estimates, noise of the probes removed\n")
    print(table(_ERRORS, _errors(run)), end="\n\n")


_ERRORS = ("estimate", "mse", "standard error")


def _errors(run: RecordedRun) -> list[tuple[Any, ...]]:
    return [(name, *values) for name, values in probed.realised_errors(run).items()]


def _write_moments(
    folder: Path, probabilities: Probabilities, estimators: Sequence[RewardEstimator], rollouts: int
) -> Path:
    rows = []
    for estimator in estimators:
        found = probabilities.moments(estimator, rollouts)
        for prompt, visit in np.argwhere(~np.isnan(probabilities.p_Q_T)):
            cell = (prompt, visit)
            values = (probabilities.p_Q_T[cell], found.bias[cell], found.variance[cell], found.mse[cell])
            rows.append((specs.label(estimator), prompt + 1, visit + 1, *values))
    header = ("estimator", "prompt", "visit", "p", "bias", "variance", "mse")
    return write_csv(folder / "moments.csv", header, rows)


def _write_curves(
    folder: Path, probabilities: Probabilities, estimators: Sequence[RewardEstimator], rollouts: int
) -> Path:
    """Errors over the discount, with the probabilities as they are and with the noise of probes removed."""
    candidates: list[tuple[str, float | None, RewardEstimator]] = []
    for label, estimator in specs.families(estimators).items():
        candidates += [(label, x, candidate) for x, candidate in specs.swept(estimator, DISCOUNTS).items()]
    candidates += [(specs.label(e), None, e) for e in estimators if not specs.knob(e)]
    rows = (
        (label, x, probabilities.mse(e, rollouts), probabilities.mse_without_noise(e, rollouts))
        for label, x, e in candidates
    )
    header = ("estimator", "discount_or_smoothing", "mse", "mse_without_noise")
    return write_csv(folder / "discounts.csv", header, rows)


def _curves(probabilities: Probabilities, estimators: Sequence[RewardEstimator], rollouts: int) -> list[ErrorCurve]:
    sweeps = {}
    for label, estimator in specs.families(estimators).items():
        swept = specs.swept(estimator, DISCOUNTS)
        sweeps[label] = (
            np.array(list(swept)),
            np.array([probabilities.mse(candidate, rollouts) for candidate in swept.values()]),
        )
    return error_curves.assembled(estimators, sweeps, lambda e: probabilities.mse(e, rollouts))


def _draw_rollouts(folder: Path, probabilities: Probabilities, rollouts: int) -> list[Path]:
    """MSE against N of dbb at 0.4 and at the discount that is best for ``rollouts``, and of the point estimator."""
    (dbb,) = _curves(probabilities, [specs.parse("dbb")], rollouts)
    discounts = sorted({0.4, dbb.best()[0]})
    shown = [specs.parse("point"), *(specs.parse(f"dbb:discount={x}") for x in discounts)]
    sizes = np.array(_GROUP_SIZES, dtype=np.float64)
    mse_E_N = np.array([[probabilities.mse(e, size) for size in _GROUP_SIZES] for e in shown])
    with np.errstate(divide="ignore", invalid="ignore"):  # point is exact where p is 0 or 1
        relative_E_N = mse_E_N / mse_E_N[0]
    figure, (absolute, relative) = small_multiples(2, panel_height=3.2, sharey=False)
    for panel, values_E_N in ((absolute, mse_E_N), (relative, relative_E_N)):
        pairs = zip(shown, values_E_N, strict=True)
        error_curves.draw_rollouts(
            panel, [ErrorCurve(e.name, specs.label(e), sizes, values_N) for e, values_N in pairs]
        )
        panel.set_ylim(bottom=0)
    absolute.set_ylabel(error_curves.MSE_LABEL)
    relative.set_ylabel("MSE / MSE of point")
    figure.supxlabel("rollouts of a group, N")
    figure.legend(*absolute.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    rows = [
        (specs.label(e), size, mse)
        for e, mse_N in zip(shown, mse_E_N, strict=True)
        for size, mse in zip(_GROUP_SIZES, mse_N, strict=True)
    ]
    csv_file = write_csv(folder / "rollouts.csv", ("estimator", "rollouts", "mse"), rows)
    return [csv_file, *figures.save(figure, folder, "rollouts")]


def _draw_prior(folder: Path, title: str, probabilities: Probabilities, rollouts: int) -> list[Path]:
    def best_of(alpha: float, beta: float) -> tuple[float, float]:
        prior = specs.parse(f"dbb:prior_alpha={alpha},prior_beta={beta}")
        errors = {x: probabilities.mse(e, rollouts) for x, e in specs.swept(prior, DISCOUNTS).items()}
        best = min(errors, key=errors.__getitem__)
        return best, errors[best]

    return error_curves.prior_figure(folder, title, best_of)
