"""``lab mse`` computes bias, variance and mean squared error in closed form, for given or probed probabilities.

Axes: Q prompts, T visits.
"""

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_dbb import options
from openrlhf_dbb.core.step import earlier_visits
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.estimators.closed_form import moments
from openrlhf_dbb.lab import recorded, specs
from openrlhf_dbb.lab.recorded import RecordedRun
from openrlhf_dbb.terminal import json_text, print_table, records

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes")

_MOMENTS = ("estimator", "visit", "bias^2", "variance", "mse", "sum(X - p)")
_SWEPT = ("estimator", "discount", "mse")


def add_command(commands: Any) -> None:
    text = "closed-form bias, variance and mean squared error for known success probabilities"
    parser = commands.add_parser("mse", help=text, description=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("run", nargs="?", metavar="RUN", help=f"a stored run with probes: {options.RUN_HELP}")
    source.add_argument("--p", nargs="+", metavar="P1,P2,...", help="a prompt's success probabilities, visit by visit")
    options.add_store(parser)
    parser.add_argument("--rollouts", type=int, metavar="N", help="group size (default: the run's, else 8)")
    text = f"as dbb:discount=0.4 (default: {' '.join(ESTIMATORS)})"
    parser.add_argument("--estimators", nargs="+", metavar="SPEC", default=ESTIMATORS, help=text)
    options.add_json(parser)
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> None:
    estimators = [specs.parse(text) for text in arguments.estimators]
    if arguments.p:
        name, p_Q_T, usual = "given probabilities", _given(arguments.p), 8
    else:
        run = recorded.read(arguments.store_url, arguments.run)
        name, p_Q_T = run.record.name, probed(run)
        usual = int(np.bincount(run.visits.rollouts).argmax())
    rollouts = usual if arguments.rollouts is None else arguments.rollouts
    families = {specs.family(estimator): specs.swept(estimator, specs.DISCOUNTS) for estimator in estimators}
    try:
        by_visit = moments_by_visit(p_Q_T, estimators, rollouts)
        rows = [
            (family, specs.knob_value(variant), float(np.nanmean(moments(variant, p_Q_T, rollouts).mse)))
            for family, variants in families.items()
            for variant in variants
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        tables = {"moments": records(_MOMENTS, by_visit), "discounts": records(_SWEPT, rows)}
        print(json_text({"of": name, "rollouts": rollouts, "prompts": len(p_Q_T)} | tables))
        return
    print(f"{name}, N = {rollouts}: mean over {len(p_Q_T)} prompts\n")
    print_table(_MOMENTS, by_visit)
    print("\nleast error of each estimator over its discount (or smoothing)\n")
    best = [min((row for row in rows if row[0] == family), key=lambda row: row[2]) for family in families]
    print_table(_SWEPT, best)


def _given(texts: Sequence[str]) -> Floats:
    """Return the probabilities of ``--p``, (Q, T), NaN after a prompt's last visit."""
    lines = [text.split(",") for text in texts]
    p_Q_T = np.full((len(lines), max(map(len, lines))), np.nan)
    for row, line in enumerate(lines):
        for column, text in enumerate(line):
            with contextlib.suppress(ValueError):  # NaN then stays
                p_Q_T[row, column] = float(text)
            if not 0 <= p_Q_T[row, column] <= 1:
                raise UsageError(f"--p, row {row + 1}: {text!r} is not a probability in [0, 1]")
    return p_Q_T


def moments_by_visit(
    p_Q_T: Floats, estimators: Sequence[RewardEstimator], rollouts: int
) -> list[tuple[str, str, float, float, float, float]]:
    """Return label, visit ("all" last), and means over prompts: bias^2, variance, MSE and a group's sum of X - p."""
    rows: list[tuple[str, str, float, float, float, float]] = []
    for estimator in estimators:
        of_estimator = moments(estimator, p_Q_T, rollouts)
        sum_Q_T = 0 - rollouts * of_estimator.bias  # never -0
        parts_4_Q_T = np.stack([of_estimator.bias**2, of_estimator.variance, of_estimator.mse, sum_Q_T])
        for visit, means_4 in enumerate(np.nanmean(parts_4_Q_T, axis=1).T, start=1):
            rows.append((specs.label(estimator), str(visit), *means_4.tolist()))
        rows.append((specs.label(estimator), "all", *np.nanmean(parts_4_Q_T, axis=(1, 2)).tolist()))
    return rows


def probed(run: RecordedRun) -> Floats:
    """Return the probed success probabilities of a run, (Q, T), with a row for each probed prompt."""
    probes = run.probes
    if probes is None:
        raise UsageError(
            f"run {run.record.name!r} has no probes of 2 or more rollouts; train with --probe.fraction 0.1, or see "
            "lab replay"
        )
    if (probes.successes != probes.squares).any():
        raise UsageError(f"run {run.record.name!r} has rewards other than 0 and 1, for which there are no closed forms")
    _, row, visits = np.unique(run.visits.prompt[probes.visit], return_inverse=True, return_counts=True)
    p_Q_T = np.full((len(visits), visits.max()), np.nan)
    p_Q_T[row, earlier_visits(row)] = probes.successes / probes.samples
    return p_Q_T
