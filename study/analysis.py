"""Compares arms: paired differences, rollouts to a target, errors of estimates.

Axes: R seeds, E points of a curve (the first is before training), B bootstrap draws. Accuracies are in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation import paired_tests
from study.rows import TASKS, Study

LEVEL, ALPHA, POWER = 0.95, 0.05, 0.8
"""Probability of an interval, level of a test, and the power that ``Paired.detectable`` asks for."""
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
"""Contrasts (first - second) that were fixed before any run. Holm's correction is within each of the two tuples."""
FAMILIES = ("point", "laplace", "empirical_bayes", "ema", "dbb", "auto")
"""Estimators of mse.csv, in the order of the table."""
FIXED = 0.5
"""The paper's discount."""
PROBED_SEEDS = (1, 2)
"""Seeds of the protocol ``estimates`` whose errors are compared, so that all tasks count alike."""
DRAWS = 2000

Curve = tuple[Floats, Floats]
"""Rollouts and accuracy, both (E,)."""
Curves = Mapping[int, Curve]
"""A curve for each seed."""


class Paired(NamedTuple):
    """Differences of two arms, paired by seed. Without a pair all but ``n`` is NaN, with one pair all but the mean."""

    n: int
    mean: float
    error: float  # standard error of the mean
    low: float  # ends of the 95 % t-interval
    high: float
    p: float  # of the two-sided paired t-test
    detectable: float  # true difference that gives p < 0.05 with probability 0.8, from the observed variance


def paired(first: Any, second: Any) -> Paired:
    """Test first - second, two Series over seeds, on the seeds that both have."""
    difference_R = (first - second).dropna().to_numpy(dtype=np.float64)
    n = len(difference_R)
    if n < 2:
        return Paired(n, float(difference_R.mean()) if n else math.nan, *[math.nan] * 5)
    test = paired_tests.stratified_t([difference_R], two_sided=True)
    errors = float(stats.t.ppf(1 - ALPHA / 2, n - 1) + stats.t.ppf(POWER, n - 1))
    detectable = errors * test.error if test.error else math.nan
    return Paired(n, test.difference, test.error, test.low, test.high, test.p, detectable)


def with_holm(tests: Mapping[Any, Paired]) -> dict[Any, tuple[Paired, float]]:
    """Return each test with its p-value after Holm's correction over all of them."""
    corrected = paired_tests.holm([test.p for test in tests.values()]).tolist()
    return {key: (test, p) for (key, test), p in zip(tests.items(), corrected, strict=True)}


def mean_and_error(values: Any) -> tuple[float, float]:
    """Return the mean and its standard error. They are NaN where there are too few values."""
    count = len(values)
    return float(np.mean(values)) if count else math.nan, float(stats.sem(values)) if count > 1 else math.nan


def compare(study: Study, experiment: str, first: str, second: str, name: str = "accuracy") -> Paired:
    """Test an outcome (see :meth:`Study.outcome`) of two arms of an experiment."""
    return paired(study.outcome(experiment, first, name), study.outcome(experiment, second, name))


def against_baseline(
    study: Study, experiment: str, arms: Sequence[str], name: str = "accuracy"
) -> dict[str, tuple[Paired, float]]:
    """Test an outcome of arms against GRPO's, with Holm's correction over these arms."""
    return with_holm({arm: compare(study, experiment, arm, BASELINE, name) for arm in arms if arm != BASELINE})


def compared(study: Study, experiment: str) -> Study:
    """Return the study without the seeds that only GRPO has in the experiment."""
    mine = study.runs[study.runs.experiment == experiment]
    seeds = set(mine.seed[mine.arm != BASELINE])
    return study.of_seeds(seeds) if seeds else study


def contrasts(study: Study, experiment: str, name: str) -> dict[tuple[str, str], tuple[Paired, float]]:
    """Test the contrasts of the protocol that have a common seed, with Holm's correction in each of both families."""
    tested: dict[tuple[str, str], tuple[Paired, float]] = {}
    for family in (PRIMARY, SECONDARY):
        tests = {pair: compare(study, experiment, *pair, name) for pair in family}
        tested |= with_holm({pair: test for pair, test in tests.items() if test.n})
    return tested


def curves(rows: Any, experiment: str, arm: str) -> dict[int, Curve]:
    """Return accuracy over rollouts of each of an arm's runs, from the rows of epochs.csv or points.csv."""
    mine = rows[(rows.experiment == experiment) & (rows.arm == arm)].dropna(subset=["accuracy"])
    mine = mine.drop_duplicates(["seed", "rollouts"], keep="last").sort_values("rollouts")
    return {
        int(seed): (part.rollouts.to_numpy(dtype=np.float64), part.accuracy.to_numpy(dtype=np.float64))
        for seed, part in mine.groupby("seed")
    }


class Share(NamedTuple):
    """Rollouts that an arm needs for GRPO's final accuracy, divided by those that GRPO itself needs."""

    n: int  # paired seeds
    share: float  # of the mean curves; infinite if the arm's curve never gets there
    low: float  # ends of the 95 % bootstrap interval over seeds
    high: float


def rollouts_needed(rollouts_E: Floats, accuracy_E: Floats, target: float) -> float:
    """Return the rollouts at which a curve first reaches the target, infinite if it never does.

    Example:
        >>> rollouts_needed(np.array([0.0, 100.0, 200.0]), np.array([0.4, 0.5, 0.6]), 0.55)
        150.0
    """
    reached_E = accuracy_E >= target
    if not reached_E.any():
        return math.inf
    place = int(np.argmax(reached_E))
    if place == 0:
        return float(rollouts_E[0])
    return float(np.interp(target, accuracy_E[place - 1 : place + 1], rollouts_E[place - 1 : place + 1]))


def share_needed(arm: Curves, target: Curves) -> Share | None:
    """Compare when two arms first reach the mean final accuracy of the second. Return None without a common seed."""
    # Both sides follow one rule: the first crossing of the curve of means over seeds. A median of single crossings
    # would give the first arm the benefit of its fluctuations, and its bootstrap would choose between two seeds.
    seeds = sorted(arm.keys() & target.keys())
    if not seeds:
        return None
    drawn_B_R = np.random.default_rng(0).choice(np.array(seeds), size=(DRAWS, len(seeds)))
    shares_B = np.array([_share(arm, target, drawn_R) for drawn_R in drawn_B_R])
    # An order statistic, because infinity cannot be interpolated.
    low, high = np.quantile(shares_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return Share(len(seeds), _share(arm, target, seeds), float(low), float(high))


def _share(arm: Curves, target: Curves, seeds: Iterable[int]) -> float:
    (rollouts_E, accuracy_E), (target_rollouts_E, target_accuracy_E) = (
        np.mean([curves[seed] for seed in seeds], axis=0) for curves in (arm, target)
    )
    level = float(target_accuracy_E[-1])
    return rollouts_needed(rollouts_E, accuracy_E, level) / rollouts_needed(target_rollouts_E, target_accuracy_E, level)


def at_equal_seconds(study: Study, first: tuple[str, str], second: tuple[str, str]) -> Paired:
    """Test the accuracy of two (experiment, arm), paired by seed, at the time when the faster run of a pair ends."""
    # Evaluations divide a run into equal parts. Between them the accuracy is interpolated.
    accuracy: tuple[dict[int, float], dict[int, float]] = ({}, {})
    every = [(study.outcome(*key, "seconds"), curves(study.epochs, *key)) for key in (first, second)]
    for seed in set.intersection(*(set(seconds.index) & set(of_seed) for seconds, of_seed in every)):
        end = min(seconds[seed] for seconds, _ in every)
        for found, (seconds, of_seed) in zip(accuracy, every, strict=True):
            accuracy_E = of_seed[seed][1]
            found[seed] = float(np.interp(end, np.linspace(0, seconds[seed], len(accuracy_E)), accuracy_E))
    return paired(*(pd.Series(found, dtype=np.float64) for found in accuracy))


def errors(study: Study) -> Any:
    """Return runs, MSE and ratio to ``point`` by N, estimator and discount, means over the runs with probes."""
    rows = study.mse.assign(ratio=study.mse.mse / study.mse.mse_point)
    by = rows.groupby(["n", "estimator", "discount"], dropna=False, sort=False)
    means = by.agg(runs=("run", "size"), mse=("mse", "mean"), ratio=("ratio", "mean")).reset_index()
    place = means.estimator.map({name: place for place, name in enumerate(FAMILIES)})
    return means.assign(place=place).sort_values(["n", "place", "discount"]).drop(columns="place")


def by_task(study: Study) -> Any:
    """Return the rows of mse.csv of the protocol ``estimates`` with their task and ratio to ``point``, task by task."""
    experiment = study.mse.run.map(study.runs.set_index("run").experiment).astype(str)
    task = experiment.str.removeprefix("probed-").str.removesuffix("-n2")
    rows = study.mse.assign(task=task, ratio=study.mse.mse / study.mse.mse_point)
    rows = rows[task.isin(TASKS) & rows.seed.isin(PROBED_SEEDS)]
    place = rows.task.map({name: place for place, name in enumerate(TASKS)})
    return rows.assign(place=place).sort_values(["place", "n"], ascending=[True, False], kind="stable")


def errors_tested(study: Study) -> dict[tuple[int, str], tuple[Paired, float]]:
    """Test the logarithm of the error of ``dbb`` and ``auto`` over ``point``'s, by N and estimator, with Holm's p."""
    rows = by_task(study)
    rows = rows[(rows.estimator == "auto") | ((rows.estimator == "dbb") & (rows.discount == FIXED))]
    logs = {key: np.log(part.set_index("run").ratio) for key, part in rows.groupby(["n", "estimator"])}
    return with_holm({key: paired(log, 0 * log) for key, log in logs.items()})
