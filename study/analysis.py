"""Compares arms: differences and their intervals, rollouts to a target, errors of estimates.

Axes: R seeds, E points of a curve (the first is before training), B bootstrap draws. Accuracies are in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import holm
from study.rows import TASKS, Study

LEVEL, ALPHA, POWER = 0.95, 0.05, 0.8
"""Probability of an interval, level of a test, and the power that ``Difference.detectable`` asks for."""
BASELINE = "grpo"
PAIRED = ("n2", "n4", "n8", "hard", "thin", "long-n2", "sweep-n2", "sweep-n8", "small-n2")
"""Experiments in which a seed also fixes the model and the problems: their arms correlate by 0.96 to 1.00 over seeds.

In the others a seed fixes the order of prompts alone. Their arms correlate by -0.29 to +0.58, in ``real``, which has 91
pairs of arms, by 0.01. There pairs would only cost degrees of freedom.
"""
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

Arm = tuple[str, str]  # experiment and arm
Curve = tuple[Floats, Floats]
"""Rollouts and accuracy, both (E,)."""
Curves = Mapping[int, Curve]
"""A curve for each seed."""


class Difference(NamedTuple):
    """A difference of two means, NaN without a run of either arm. Beside a single run only the mean is known."""

    n: int  # pairs, or runs of the arm that has fewer
    runs: str  # pairs, or runs of both arms
    mean: float
    error: float  # standard error of the mean
    low: float  # ends of the 95 % t-interval
    high: float
    p: float  # of the two-sided t-test
    detectable: float  # true difference that gives p < 0.05 with probability 0.8, from the observed variance


def _difference(n: int, runs: str, mean: float, error: float, degrees: int) -> Difference:
    if n < 2:
        return Difference(n, runs, mean, *[math.nan] * 5)
    half = float(stats.t.ppf((1 + LEVEL) / 2, degrees)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, degrees)) if error else math.nan
    return Difference(n, runs, mean, error, mean - half, mean + half, p, detectable(error, degrees))


def detectable(error: float, degrees: int) -> float:
    """Return the true difference that gives p < 0.05 with probability 0.8, NaN without an error."""
    return (
        float(stats.t.ppf(1 - ALPHA / 2, degrees) + stats.t.ppf(POWER, degrees)) * error or math.nan
    )


def paired(first: Any, second: Any) -> Difference:
    """Test first - second, two Series over seeds, on the seeds that both have."""
    # Equal on paper is equal
    difference_R = (first - second).dropna().to_numpy(dtype=np.float64).round(12)
    n = len(difference_R)
    return _difference(n, str(n), *mean_and_error(difference_R), n - 1)


def unpaired(first: Any, second: Any, arms: Iterable[Any]) -> Difference:
    """Test the mean of first - that of second, with the deviation of the runs of all ``arms`` from their arm's mean."""
    n, others = len(first), len(second)
    deviation, degrees = pooled(arms)
    error = deviation * math.sqrt(1 / n + 1 / others) if n and others else math.nan
    return _difference(
        min(n, others), f"{n}, {others}", float(first.mean() - second.mean()), error, degrees
    )


def stratified(pairs: Sequence[tuple[Any, Any]], arms: Iterable[Any]) -> Difference:
    """Test the mean over strata of first - second, with the deviation of the runs of all ``arms``.

    ``pairs`` holds the outcomes of the runs of two arms, one pair for each stratum, such as a
    version of the code. A stratum counts alike, whatever its number of runs.
    """
    deviation, degrees = pooled(arms)
    differences = [first.mean() - second.mean() for first, second in pairs]
    variance = sum(1 / len(first) + 1 / len(second) for first, second in pairs) / len(pairs) ** 2
    least = min(min(len(first), len(second)) for first, second in pairs)
    runs = " and ".join(f"{len(first)}, {len(second)}" for first, second in pairs)
    error = deviation * math.sqrt(variance)
    return _difference(least, runs, float(np.mean(differences)), error, degrees)


def pooled(arms: Iterable[Any]) -> tuple[float, int]:
    """Return the deviation of a run from the mean of its arm, and its degrees of freedom."""
    residuals = [arm - arm.mean() for arm in arms if len(arm)]
    degrees = sum(len(arm) - 1 for arm in residuals)
    return math.sqrt(
        sum((arm**2).sum() for arm in residuals) / degrees
    ) if degrees else math.nan, degrees


def with_holm(tests: Mapping[Any, Difference]) -> dict[Any, tuple[Difference, float]]:
    """Return each test with its p-value after Holm's correction over all of them."""
    corrected = holm([test.p for test in tests.values()]).tolist()
    return {key: (test, p) for (key, test), p in zip(tests.items(), corrected, strict=True)}


def mean_and_error(values: Any) -> tuple[float, float]:
    """Return the mean and its standard error. They are NaN where there are too few values."""
    count = len(values)
    return float(np.mean(values)) if count else math.nan, float(
        stats.sem(values)
    ) if count > 1 else math.nan


def compare(
    study: Study, first: Arm, second: Arm, outcome: Callable[[str, str], Any]
) -> Difference:
    """Test an outcome of two arms: by pairs in ``PAIRED``, else with the deviation of all arms of their experiments."""
    if first[0] in PAIRED:
        return paired(outcome(*first), outcome(*second))
    return unpaired(
        outcome(*first), outcome(*second), outcomes(study, {first[0], second[0]}, outcome)
    )


def outcomes(
    study: Study, experiments: Iterable[str], outcome: Callable[[str, str], Any]
) -> list[Any]:
    """Return an outcome of every arm of some experiments."""
    wanted = set(experiments)
    return [outcome(*arm) for arm in study.runs_of if arm[0] in wanted]


def against_baseline(
    study: Study, experiment: str, arms: Sequence[str], name: str = "accuracy"
) -> dict[str, tuple[Difference, float]]:
    """Test an outcome of arms against GRPO's, with Holm's correction over these arms."""
    grpo, outcome = (experiment, BASELINE), partial(study.outcome, name=name)
    return with_holm(
        {arm: compare(study, (experiment, arm), grpo, outcome) for arm in arms if arm != BASELINE}
    )


def compared(study: Study, experiment: str) -> Study:
    """Return the study without the seeds that only GRPO has in the experiment."""
    mine = study.runs[study.runs.experiment == experiment]
    seeds = set(mine.seed[mine.arm != BASELINE])
    return study.of_seeds(seeds) if seeds else study


def contrasts(
    study: Study, experiment: str, name: str
) -> dict[tuple[str, str], tuple[Difference, float]]:
    """Test the contrasts of the protocol that have runs, with Holm's correction in each of both families."""
    tested: dict[tuple[str, str], tuple[Difference, float]] = {}
    for family in (PRIMARY, SECONDARY):
        outcome = partial(study.outcome, name=name)
        tests = {
            (a, b): compare(study, (experiment, a), (experiment, b), outcome) for a, b in family
        }
        tested |= with_holm({pair: test for pair, test in tests.items() if test.n})
    return tested


def curves(rows: Any, experiment: str, arm: str) -> dict[int, Curve]:
    """Return accuracy over rollouts of each of an arm's runs, from the rows of epochs.csv or points.csv."""
    mine = rows[(rows.experiment == experiment) & (rows.arm == arm)].dropna(subset=["accuracy"])
    mine = mine.drop_duplicates(["seed", "rollouts"], keep="last").sort_values("rollouts")
    return {
        int(seed): (
            part.rollouts.to_numpy(dtype=np.float64),
            part.accuracy.to_numpy(dtype=np.float64),
        )
        for seed, part in mine.groupby("seed")
    }


class Share(NamedTuple):
    """Rollouts that an arm needs for GRPO's final accuracy, divided by those that GRPO itself needs."""

    n: int  # paired seeds
    share: float  # of the mean curves; infinite if the arm's curve never gets there
    low: float  # ends of the 95 % bootstrap interval over seeds
    high: float


def rollouts_needed(rollouts_E: Floats, accuracy_E: Floats, target: Any) -> Any:
    """Return the rollouts at which curves (..., E) first reach their targets (...), infinite where they never do.

    Example:
        >>> float(rollouts_needed(np.array([0.0, 100.0, 200.0]), np.array([0.4, 0.5, 0.6]), 0.55))
        150.0
    """
    reached_E = accuracy_E >= np.expand_dims(target, -1)
    after = reached_E.argmax(axis=-1)[..., None]
    (x, right), (y, top) = (
        [
            np.take_along_axis(values_E, place, -1)[..., 0]
            for place in (np.maximum(after - 1, 0), after)
        ]
        for values_E in (rollouts_E, accuracy_E)
    )
    # 1 where the curve begins above
    part = np.divide(target - y, top - y, out=np.ones_like(y), where=top > y)
    return np.where(reached_E.any(axis=-1), x + part * (right - x), math.inf)


def share_needed(arm: Curves, target: Curves) -> Share | None:
    """Compare when two arms first reach the mean final accuracy of the second. Return None without a common seed."""
    # Both sides follow one rule: the first crossing of the curve of means over seeds. A median of single crossings
    # would give the first arm the benefit of its fluctuations, and its bootstrap would choose between two seeds.
    seeds = sorted(arm.keys() & target.keys())
    if not seeds:
        return None
    both = [np.array([curves[seed] for seed in seeds]) for curves in (arm, target)]  # (R, 2, E)
    drawn_B_R = np.random.default_rng(0).choice(len(seeds), size=(DRAWS, len(seeds)))
    shares_B = _share(*(curves_R[drawn_B_R].mean(axis=1) for curves_R in both))
    # An order statistic, because infinity cannot be interpolated.
    low, high = np.quantile(shares_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return Share(
        len(seeds),
        float(_share(*(curves_R.mean(axis=0) for curves_R in both))),
        float(low),
        float(high),
    )


def _share(arm: Floats, target: Floats) -> Any:
    """Return the share of mean curves, (..., 2, E)."""
    level = target[..., 1, -1]
    needed, baseline = (
        rollouts_needed(curves[..., 0, :], curves[..., 1, :], level) for curves in (arm, target)
    )
    return needed / baseline


def at_equal_seconds(study: Study, first: Arm, second: Arm) -> list[Any]:
    """Return the accuracy of two arms over their common seeds, when the faster one of a seed's two runs ends."""
    # Evaluations divide a run into equal parts. Between them the accuracy is interpolated.
    accuracy: tuple[dict[int, float], dict[int, float]] = ({}, {})
    every = [
        (study.outcome(*key, "seconds"), curves(study.epochs, *key)) for key in (first, second)
    ]
    for seed in set.intersection(
        *(set(seconds.index) & set(of_seed) for seconds, of_seed in every)
    ):
        end = min(seconds[seed] for seconds, _ in every)
        for found, (seconds, of_seed) in zip(accuracy, every, strict=True):
            accuracy_E = of_seed[seed][1]
            found[seed] = float(
                np.interp(end, np.linspace(0, seconds[seed], len(accuracy_E)), accuracy_E)
            )
    return [pd.Series(found, dtype=np.float64) for found in accuracy]


def by_task(study: Study) -> Any:
    """Return the rows of mse.csv of the protocol ``estimates`` with their task and ratio to ``point``, task by task."""
    experiment = study.mse.run.map(study.runs.set_index("run").experiment).astype(str)
    task = experiment.str.removeprefix("probed-").str.removesuffix("-n2")
    rows = study.mse.assign(task=task, ratio=study.mse.mse / study.mse.mse_point)
    rows = rows[task.isin(TASKS) & rows.seed.isin(PROBED_SEEDS)]
    place = rows.task.map({name: place for place, name in enumerate(TASKS)})
    return rows.assign(place=place).sort_values(
        ["place", "n"], ascending=[True, False], kind="stable"
    )


def errors_tested(study: Study) -> dict[tuple[int, str], tuple[Difference, float]]:
    """Test the logarithm of the error of ``dbb`` and ``auto`` over ``point``'s, by N and estimator, with Holm's p.

    A task counts once, because its runs have the same prompts.
    """
    rows = by_task(study)
    rows = rows[(rows.estimator == "auto") | ((rows.estimator == "dbb") & (rows.discount == FIXED))]
    rows = rows.assign(log=np.log(rows.ratio))
    logs = {key: part.groupby("task").log.mean() for key, part in rows.groupby(["n", "estimator"])}
    return with_holm({key: paired(log, 0 * log) for key, log in logs.items()})
