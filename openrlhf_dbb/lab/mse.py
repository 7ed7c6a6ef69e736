"""``lab mse``: bias, variance and mean squared error in closed form, for given or probed success probabilities.

Axes: Q prompts, T visits.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from estimators.closed_form import Moments, fitted_prior, moments
from estimators.empirical_bayes import EmpiricalBayes
from estimators.probe_error import mean_variance, squared_errors
from openrlhf_dbb import figures, options
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import curves, recorded, specs
from openrlhf_dbb.lab.recorded import ProbedVisits, RecordedRun, earlier_visits
from openrlhf_dbb.terminal import print_json, records, table

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes")

_MOMENTS = ("estimator", "visit", "bias^2", "variance", "mse")
_SWEPT = ("estimator", "discount_or_smoothing", "mse", "mse_without_noise")
_OWN = ("estimate", "mse", "standard error")


@dataclass(frozen=True)
class Probabilities:
    """Success probabilities of Q prompts, and how well they are known.

    Attributes:
        p_Q_T: success probability at each visit; NaN after a prompt's last.
        noise_Q_T: variance of each probability as a measurement; 0 where it is exact, NaN where ``p_Q_T`` is.
    """

    p_Q_T: Floats
    noise_Q_T: Floats

    def moments(self, estimator: RewardEstimator, rollouts: int) -> Moments:
        """Return bias and variance, (Q, T), with the probabilities as they are.

        Raises:
            UsageError: no closed form is known for the estimator, or ``rollouts`` is below 1.
        """
        try:
            return moments(estimator, self.p_Q_T, rollouts, shared_prior=self._prior(estimator, rollouts))
        except ValueError as error:
            raise UsageError(str(error)) from error

    def mse(self, estimator: RewardEstimator, rollouts: int) -> float:
        """Return the mean squared error over prompts and visits, with the probabilities as they are, as the paper."""
        return float(np.nanmean(self.moments(estimator, rollouts).mse))

    def mse_without_noise(self, estimator: RewardEstimator, rollouts: int) -> float:
        """Return the mean squared error without the bias that noise in the probabilities causes.

        An estimate is c_0 p_0 + sum_k c_k S_k/N, so its bias is ``b = c_0 p_0 + sum_k a_k p_k`` with a_k = c_k, but
        a_t = c_t - 1. If p~_k is a mean of M probe rollouts and v_k = p_k (1 - p_k)::

            E b~^2 = b^2 + sum_k a_k^2 v_k / M        E p~ (1 - p~) = (1 - 1/M) v

        The sum is subtracted and the missing variance added, with the measured noise p~ (1 - p~) / (M - 1) for v / M.
        """
        # The bias is linear in the probabilities, so unit vectors read off the weights c_k of visit t, (k, t).
        unit_T_T = np.eye(self.p_Q_T.shape[1])
        units = np.vstack([np.zeros(len(unit_T_T)), unit_T_T])
        bias = moments(estimator, units, rollouts, shared_prior=self._prior(estimator, rollouts)).bias
        weights_T_T = bias[1:] - bias[0] + unit_T_T
        noise_Q_T = np.nan_to_num(self.noise_Q_T)  # visits that did not happen have weight 0, and 0 * NaN is NaN
        correction_T_T = weights_T_T**2 / rollouts - (weights_T_T - unit_T_T) ** 2
        return float(np.nanmean(self.moments(estimator, rollouts).mse + noise_Q_T @ correction_T_T))

    def _prior(self, estimator: RewardEstimator, rollouts: int) -> Floats | None:
        """Return the prior that empirical Bayes would have on each visit, (T, 2); None for other estimators."""
        if not isinstance(estimator, EmpiricalBayes):
            return None
        return fitted_prior(self.p_Q_T, rollouts, self.noise_Q_T)


def add_command(commands: Any) -> None:
    """Add ``mse`` to the laboratory's commands."""
    text = "closed-form bias, variance and mean squared error for known success probabilities"
    parser = commands.add_parser("mse", help=text, description=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("run", nargs="?", metavar="RUN", help=f"a stored run with probes: {options.RUN_HELP}")
    source.add_argument("--p", nargs="+", metavar="P1,P2,...", help="a prompt's success probabilities, visit by visit")
    options.add_store(parser)
    parser.add_argument("--rollouts", type=int, metavar="N", help="group size (default: the run's, else 8)")
    text = f"as dbb:discount=0.4 (default: {' '.join(ESTIMATORS)})"
    parser.add_argument("--estimators", nargs="+", metavar="SPEC", default=ESTIMATORS, help=text)
    options.add_folder(parser, "for the files", default=Path("lab/mse"))
    options.add_json(parser)
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> None:
    estimators = [specs.parse(text) for text in arguments.estimators]
    own: list[tuple[Any, ...]] = []
    if arguments.p:
        name, probabilities = "given probabilities", _given(arguments.p)
        rollouts = 8 if arguments.rollouts is None else arguments.rollouts
    else:
        run = recorded.read(arguments.store_url, arguments.run)
        name, probabilities, own = run.record.name, probed(run), own_errors(run)
        usual = int(np.bincount(run.visits.rollouts.astype(np.int64)).argmax())
        rollouts = usual if arguments.rollouts is None else arguments.rollouts
    folder = figures.folder(arguments.output)
    by_visit = moments_by_visit(probabilities, estimators, rollouts)
    swept = _swept(probabilities, estimators, rollouts)
    rows = [(specs.family(e), specs.knob_value(e), mse, without_noise) for e, mse, without_noise in swept]
    files = [
        figures.write_csv(folder / "moments.csv", _MOMENTS, by_visit),
        figures.write_csv(folder / "discounts.csv", _SWEPT, rows),
        *curves.figure(folder, "discounts", "MSE", curves.by_family([(e, mse) for e, mse, _ in swept])),
    ]
    if arguments.json:
        answer = {"rollouts": rollouts, "prompts": len(probabilities.p_Q_T), "moments": records(_MOMENTS, by_visit)}
        answer |= {"run": name, "own_errors": records(_OWN, own)} if own else {}
        print_json(answer | {"files": list(map(str, files))})
        return
    print(f"{name}, N = {rollouts}: mean over {len(probabilities.p_Q_T)} prompts\n")
    print(table(_MOMENTS, by_visit))
    print("\nleast error of each estimator over its discount (or smoothing)\n")
    best = {family: min((row for row in rows if row[0] == family), key=lambda row: row[2]) for family, *_ in rows}
    print(table(("estimator", "discount", "mse", "without probe noise"), list(best.values())))
    if own:
        print("\nerrors of the run's own estimates, without probe noise\n")
        print(table(_OWN, own))
    print("", *files, sep="\n")


def _given(texts: Sequence[str]) -> Probabilities:
    """Return the probabilities of ``--p``.

    Raises:
        UsageError: a number is not in [0, 1].
    """
    lines = [text.split(",") for text in texts]
    p_Q_T = np.full((len(lines), max(map(len, lines))), np.nan)
    for row, line in enumerate(lines):
        for column, text in enumerate(line):
            with contextlib.suppress(ValueError):  # NaN then stays
                p_Q_T[row, column] = float(text)
            if not 0 <= p_Q_T[row, column] <= 1:
                raise UsageError(f"--p, row {row + 1}: {text!r} is not a probability in [0, 1]")
    return Probabilities(p_Q_T, 0 * p_Q_T)


def _probes(run: RecordedRun) -> ProbedVisits:
    if run.probes is None:
        raise UsageError(
            f"run {run.record.name!r} has no probes of 2 or more rollouts; train with --probe.fraction 0.1, or see "
            "lab replay"
        )
    if (run.probes.successes != run.probes.squares).any():
        raise UsageError(f"run {run.record.name!r} has rewards other than 0 and 1, for which there are no closed forms")
    return run.probes


def probed(run: RecordedRun) -> Probabilities:
    """Return the probed success probabilities of a run, with a row for each probed prompt.

    Raises:
        UsageError: the run has no probes, or rewards other than 0 and 1.
    """
    probes = _probes(run)
    _, row, visits = np.unique(run.visits.prompt[probes.visit], return_inverse=True, return_counts=True)
    p_Q_T, noise_Q_T = np.full((2, len(visits), visits.max()), np.nan)
    place = row, earlier_visits(row)
    p_Q_T[place] = probes.successes / probes.samples
    noise_Q_T[place] = mean_variance(probes.samples, probes.successes, probes.squares)
    return Probabilities(p_Q_T, noise_Q_T)


def own_errors(run: RecordedRun) -> list[tuple[str, float, float]]:
    """Return name, mean squared error without the probes' noise, and its standard error over prompts.

    The rows are the estimates that the run was trained with ("as trained"), and its groups' own means ("point").

    Raises:
        UsageError: as :func:`probed`.
    """
    probes, visits = _probes(run), run.visits
    _, row = np.unique(visits.prompt[probes.visit], return_inverse=True)
    rows = []
    for name, estimate in (("as trained", probes.mean), ("point", (visits.successes / visits.rollouts)[probes.visit])):
        squared = squared_errors(estimate, probes.samples, probes.successes, probes.squares)
        # Visits of one prompt depend on each other, so the error is that of sums over prompts.
        sums_P = np.bincount(row, squared - squared.mean())
        rows.append((name, float(squared.mean()), float(np.sqrt(np.sum(sums_P**2)) / len(squared))))
    return rows


def moments_by_visit(
    probabilities: Probabilities, estimators: Sequence[RewardEstimator], rollouts: int
) -> list[tuple[str, str, float, float, float]]:
    """Return label, visit ("all" last), and the means over prompts of bias^2, variance and MSE."""
    rows: list[tuple[str, str, float, float, float]] = []
    for estimator in estimators:
        found = probabilities.moments(estimator, rollouts)
        parts_3_Q_T = np.stack([found.bias**2, found.variance, found.mse])
        for visit, means_3 in enumerate(np.nanmean(parts_3_Q_T, axis=1).T, start=1):
            rows.append((specs.label(estimator), str(visit), *means_3.tolist()))
        rows.append((specs.label(estimator), "all", *np.nanmean(parts_3_Q_T, axis=(1, 2)).tolist()))
    return rows


def _swept(
    probabilities: Probabilities, estimators: Sequence[RewardEstimator], rollouts: int
) -> list[tuple[RewardEstimator, float, float]]:
    """Return each estimator, at every discount that it allows, with its errors with and without probe noise."""
    candidates: list[RewardEstimator] = [estimator for estimator in estimators if specs.knob(estimator) is None]
    for estimator in specs.families(estimators).values():
        candidates += specs.swept(estimator, curves.DISCOUNTS).values()
    return [(e, probabilities.mse(e, rollouts), probabilities.mse_without_noise(e, rollouts)) for e in candidates]
