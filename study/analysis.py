"""The study's results from its rows: paired differences, rollouts to a target, gradients, errors of estimates.

Axes: R seeds (runs of an arm), E points of a curve (0 and the epochs), B bootstrap draws. Accuracies and rewards are
in [0, 1] and become percentage points when printed. NaN stands for an empty field.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf_dbb.evaluation.statistics import ALPHA, LEVEL, POWER, holm, paired_t
from study.data import EpochRow, ErrorRow, Floats, GradientRow, RunRow, Study

BASELINE = "grpo"
PRIMARY = (("dbb", "grpo"), ("auto", "grpo"))
SECONDARY = (
    ("dbb", "grpo-wide"),
    ("dbb", "laplace"),
    ("auto", "dbb"),
    ("grpo-wide", "grpo"),
    ("laplace", "grpo"),
    ("dr_grpo-dbb", "dr_grpo"),
)
"""Contrasts (first - second) fixed before any run; Holm's correction is within each of the two tuples."""
FAMILIES = ("point", "laplace", "empirical_bayes", "ema", "dbb", "auto")
"""Estimators of mse.csv, in the order of tables and figures."""
TARGET = "n8"
"""Experiment whose GRPO runs set the accuracy to be reached."""
DRAWS = 2000
_DECIMALS = 12  # differences of accuracies that are equal on paper differ beyond


Curve = tuple[Floats, Floats]
"""Rollouts and accuracy of a run, both (E,)."""


class Paired(NamedTuple):
    """Differences of two arms, paired by seed.

    Attributes:
        n: pairs; without any, all other values are NaN, with one all but the mean.
        mean: of the differences.
        error: standard error of the mean.
        low, high: ends of the 95 % t-interval.
        p: two-sided paired t-test; with zero variance the exact sign-flip test.
        detectable: the true difference that gives p < 0.05 with probability 0.8, from the observed variance; NaN if
            that is zero.
        difference_R: the differences, by seed.
    """

    n: int
    mean: float
    error: float
    low: float
    high: float
    p: float
    detectable: float
    difference_R: Floats


class Share(NamedTuple):
    """Rollouts that an arm needs for GRPO's final accuracy, divided by those that GRPO itself needs.

    Attributes:
        n: paired seeds.
        share: of the mean curves; infinite if the arm's never gets there.
        low, high: ends of the 95 % bootstrap interval over seeds; infinite where the arm's curve never gets there.
    """

    n: int
    share: float
    low: float
    high: float


class Alignment(NamedTuple):
    """Gradients of an estimator: means over draws, then over n batches of all seeds."""

    n: int
    cosine: float
    error: float
    minus_point: Paired
    cosine_normalised: float
    mse: float


class Accuracy(NamedTuple):
    """MSE of an estimator at a discount (NaN if it has none), mean over n runs; ``ratio`` to ``point``."""

    n: int
    discount: float
    mse: float
    ratio: float


def mean_and_error(values: Sequence[float] | Floats) -> tuple[float, float]:
    """Mean and its standard error; NaN where there are too few values.

    Example:
        >>> mean_and_error([1.0, 2.0, 3.0])
        (2.0, 0.577)
    """
    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    return mean, float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.nan


def paired(first: Mapping[Any, float], second: Mapping[Any, float]) -> Paired:
    """Two-sided paired t-test of first - second over the seeds (or other keys) that both have.

    Raises:
        UsageError: scipy is not installed.
    """
    keys = sorted(first.keys() & second.keys())
    first_R, second_R = (np.array([values[key] for key in keys], dtype=np.float64) for values in (first, second))
    if not keys:
        return Paired(0, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, first_R)
    tested = paired_t(first_R - second_R, two_sided=True)
    mean, error, degrees = tested.difference, tested.error, tested.degrees
    half, detectable = error, math.nan  # without variance, or with a single pair
    if error > 0:
        from scipy.stats import t  # installed: paired_t has used it

        half = float(t.ppf((1 + LEVEL) / 2, degrees)) * error
        detectable = float(t.ppf(1 - ALPHA / 2, degrees) + t.ppf(POWER, degrees)) * error
    difference_R = np.round(first_R - second_R, _DECIMALS)
    return Paired(len(keys), mean, error, mean - half, mean + half, tested.p, detectable, difference_R)


def compare(study: Study, experiment: str, first: str, second: str, name: str = "accuracy") -> Paired:
    """:func:`paired` of an outcome (see :meth:`Study.outcome`) of two arms of an experiment."""
    return paired(study.outcome(experiment, first, name), study.outcome(experiment, second, name))


def against_baseline(study: Study, experiment: str, arms: Sequence[str]) -> dict[str, tuple[Paired, float]]:
    """Final accuracy of arms against GRPO, by arm: the test, and its p-value with Holm's correction over these arms."""
    tests = {arm: compare(study, experiment, arm, BASELINE) for arm in arms if arm != BASELINE}
    corrected = holm([test.p for test in tests.values()])
    return {arm: (test, float(p)) for (arm, test), p in zip(tests.items(), corrected, strict=True)}


def compared(study: Study, experiment: str) -> Study:
    """The study without seeds that GRPO alone has in the experiment: they set targets for other experiments only."""
    rows: list[RunRow | EpochRow] = [*study.runs, *study.epochs]
    seeds = {row.seed for row in rows if row.experiment == experiment and row.arm != BASELINE}
    return study.of_seeds(seeds) if seeds else study


def contrasts(study: Study, experiment: str, name: str) -> dict[tuple[str, str], tuple[Paired, float]]:
    """The contrasts of an experiment and their p-values with Holm's correction, primary and secondary separately.

    Args:
        study: the rows.
        experiment: whose arms are compared.
        name: the outcome, see :meth:`Study.outcome`.

    Returns:
        By (first, second), in order; contrasts without a common seed are left out.
    """
    found: dict[tuple[str, str], tuple[Paired, float]] = {}
    for family in (PRIMARY, SECONDARY):
        tests = {pair: compare(study, experiment, *pair, name) for pair in family}
        tests = {pair: test for pair, test in tests.items() if test.n}
        corrected = holm([test.p for test in tests.values()])
        found |= {pair: (test, float(p)) for (pair, test), p in zip(tests.items(), corrected, strict=True)}
    return found


def rollouts_needed(rollouts_E: Floats, accuracy_E: Floats, target: float) -> float:
    """Rollouts at which a curve, linear between its points, first reaches the target; infinite if it never does.

    Example:
        >>> rollouts_needed(np.array([0.0, 100.0, 200.0]), np.array([0.4, 0.5, 0.6]), 0.55)
        150.0
    """
    there_E = accuracy_E >= target
    if not there_E.any():
        return math.inf
    place = int(np.argmax(there_E))
    if place == 0:
        return float(rollouts_E[0])
    return float(np.interp(target, accuracy_E[place - 1 : place + 1], rollouts_E[place - 1 : place + 1]))


def efficiency(study: Study, experiment: str, arm: str) -> Share | None:
    """Share of GRPO's rollouts at N = 8 that the arm needs for the same accuracy; None if no seed has both."""
    return share_needed(study.curves(experiment, arm), study.curves(TARGET, BASELINE))


def share_needed(curves: Mapping[int, Curve], targets: Mapping[int, Curve]) -> Share | None:
    """Compare when two arms first reach the mean final accuracy of the second; None without a common seed.

    Both sides follow one rule: the first crossing of the curve of means over seeds. A median of single crossings would
    give the first arm the benefit of its fluctuations, and its bootstrap would choose between two seeds.

    Args:
        curves, targets: rollouts and accuracy, both (E,), by seed.
    """
    seeds = sorted(curves.keys() & targets.keys())
    if not seeds:
        return None
    drawn_B_R = np.random.default_rng(0).choice(np.array(seeds), size=(DRAWS, len(seeds)))
    shares_B = np.array([_share(curves, targets, drawn_R) for drawn_R in drawn_B_R])
    # An order statistic, since infinity cannot be interpolated.
    low, high = np.quantile(shares_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return Share(len(seeds), _share(curves, targets, seeds), float(low), float(high))


def _share(curves: Mapping[int, Curve], targets: Mapping[int, Curve], seeds: Iterable[int]) -> float:
    (rollouts_E, accuracy_E), (target_rollouts_E, target_accuracy_E) = (
        np.mean([arm[seed] for seed in seeds], axis=0) for arm in (curves, targets)
    )
    level = float(target_accuracy_E[-1])
    return rollouts_needed(rollouts_E, accuracy_E, level) / rollouts_needed(target_rollouts_E, target_accuracy_E, level)


def alignments(study: Study, n: int) -> dict[str, Alignment]:
    """Gradients at a frozen policy with n rollouts per prompt, by estimator, in file order."""
    draws: dict[str, dict[tuple[int, int], list[GradientRow]]] = defaultdict(lambda: defaultdict(list))
    for row in study.gradients:
        if row.n == n:
            draws[row.estimator][row.seed, row.batch].append(row)
    cosines = {
        name: {batch: float(np.mean([row.cosine for row in rows])) for batch, rows in batches.items()}
        for name, batches in draws.items()
    }
    return {
        name: Alignment(
            len(batches),
            *mean_and_error(list(cosines[name].values())),
            paired(cosines[name], cosines.get("point", {})),
            *(float(np.mean([np.mean([getattr(row, column) for row in rows]) for rows in batches.values()]))
              for column in ("cosine_normalised", "mse")),
        )
        for name, batches in draws.items()
    }  # fmt: skip


def errors(study: Study, n: int) -> dict[str, dict[float, Accuracy]]:
    """Errors of the estimates with n rollouts per prompt, by estimator and discount; means over runs with probes.

    An estimator without a discount has one entry, NaN.
    """
    found: dict[tuple[str, float | None], list[ErrorRow]] = defaultdict(list)
    for row in study.mse:
        if row.n == n:
            found[row.estimator, None if math.isnan(row.discount) else row.discount].append(row)
    curves: dict[str, dict[float, Accuracy]] = defaultdict(dict)
    for (name, discount), rows in found.items():
        value = math.nan if discount is None else discount
        ratio = float(np.mean([row.mse / row.mse_point for row in rows]))
        curves[name][value] = Accuracy(len(rows), value, float(np.mean([row.mse for row in rows])), ratio)
    return {name: curves[name] for name in [*FAMILIES, *sorted(curves.keys() - set(FAMILIES))] if name in curves}


def best(curve: Mapping[float, Accuracy]) -> Accuracy:
    """The entry with the lowest error in one estimator's :func:`errors`."""
    return min(curve.values(), key=lambda entry: entry.mse)
