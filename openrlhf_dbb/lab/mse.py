"""``lab mse`` computes bias, variance and mean squared error in closed form, for given or probed probabilities.

Axes: Q prompts, T visits.
"""

import argparse
import itertools
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
from openrlhf_dbb.lab.recorded import Visits
from openrlhf_dbb.storage import RunRecord
from openrlhf_dbb.terminal import json_text, print_table, records

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes")

_MOMENTS = ("estimator", "visit", "bias^2", "variance", "mse", "sum(X - p)")
_SWEPT = ("estimator", "discount", "mse")


def add_command(commands: Any) -> None:
    text = "closed-form bias, variance and mean squared error for known success probabilities"
    parser = commands.add_parser("mse", help=text, description=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("run", nargs="?", metavar="RUN", help=f"a stored run with probes: {options.RUN_HELP}")
    text = "a prompt's success probabilities, visit by visit"
    source.add_argument("--p", nargs="+", type=probabilities, metavar="P1,P2,...", help=text)
    options.add_store(parser)
    parser.add_argument("--rollouts", type=int, metavar="N", help="group size (default: the run's, else 8)")
    text = f"as dbb:discount=0.4 (default: {' '.join(ESTIMATORS)})"
    parser.add_argument("--estimators", nargs="+", metavar="SPEC", default=ESTIMATORS, help=text)
    options.add_json(parser)
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> None:
    estimators = [specs.parse(text) for text in arguments.estimators]
    if arguments.p:
        name, usual = "given probabilities", 8
        p_Q_T = np.array([*itertools.zip_longest(*arguments.p, fillvalue=np.nan)]).T
    else:
        run, visits = recorded.read(arguments.store_url, arguments.run)
        name, p_Q_T = run.name, probed(run, visits)
        usual = int(np.bincount(visits.rollouts).argmax())
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


def probabilities(text: str) -> list[float]:
    return [options.number(float, 0, 1)(each) for each in text.split(",")]


def moments_by_visit(p_Q_T: Floats, estimators: Sequence[RewardEstimator], rollouts: int) -> list[tuple[Any, ...]]:
    """Return label, visit ("all" last), and means over prompts: bias^2, variance, MSE and a group's sum of X - p."""
    rows = []
    for estimator in estimators:
        found = moments(estimator, p_Q_T, rollouts)
        sum_Q_T = 0 - rollouts * found.bias  # never -0
        parts_4_Q_T = np.stack([found.bias**2, found.variance, found.mse, sum_Q_T])
        by_visit = {str(visit): means_4 for visit, means_4 in enumerate(np.nanmean(parts_4_Q_T, axis=1).T, start=1)}
        by_visit["all"] = np.nanmean(parts_4_Q_T, axis=(1, 2))
        rows += [(specs.label(estimator), visit, *means_4.tolist()) for visit, means_4 in by_visit.items()]
    return rows


def probed(run: RunRecord, visits: Visits) -> Floats:
    """Return the probed success probabilities of a run, (Q, T), with a row for each probed prompt."""
    at = np.flatnonzero(~np.isnan(visits.probes_3_V[0]))
    if not len(at):
        raise UsageError(
            f"run {run.name!r} has no probes of 2 or more rollouts; train with --probe.fraction 0.1, or see lab replay"
        )
    samples, successes, squares = visits.probes_3_V[:, at]
    if (successes != squares).any():
        raise UsageError(f"run {run.name!r} has rewards other than 0 and 1, for which there are no closed forms")
    _, row, times = np.unique(visits.prompt[at], return_inverse=True, return_counts=True)
    p_Q_T = np.full((len(times), times.max()), np.nan)
    p_Q_T[row, earlier_visits(row)] = successes / samples
    return p_Q_T
