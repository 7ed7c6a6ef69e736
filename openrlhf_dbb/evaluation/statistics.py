"""Statistics of paired differences: tests, bootstrap intervals, Holm's correction, what could have been detected.

Axes: M models, R evaluation runs (seeds), P prompts of a benchmark, B bootstrap draws. Accuracies are in [0, 1].

Tests generalize over prompts: two samples of the same prompt depend on each other, two prompts do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.evaluation.metrics import accuracy

Floats = NDArray[np.float64]

DRAWS = 10_000
LEVEL = 0.95
"""Probability of an interval, two-sided."""
ALPHA = 0.05
"""Level of the tests."""
POWER = 0.8

_CHUNK = 50_000  # resampled prompts at a time, to fit into a core's cache; a million took five times as long
_DECIMALS = 12  # differences of accuracies that are equal on paper may differ beyond


class PairedTest(NamedTuple):
    """A paired t-test.

    Attributes:
        difference: mean of the differences.
        error: its standard error.
        degrees: of freedom.
        t: difference / error; NaN if the differences have no variance.
        p: NaN if there are too few differences.
    """

    difference: float
    error: float
    degrees: float
    t: float
    p: float


def paired_t(difference_P: Floats, *, two_sided: bool = False) -> PairedTest:
    """Paired t-test over the differences of pairs, such as two models' accuracies on each prompt (paper, section 4.1).

    Without variance among the differences, t does not exist, but the exact sign-flip test does. One-sided, its p is 1
    if all differences are 0 (the same model twice) or the same negative number, and 2**-P if they are the same
    positive number.

    Args:
        difference_P: first minus second of each pair; P >= 1.
        two_sided: H1: the means differ; else H1: the first mean is higher.

    Returns:
        The test; error, t and p are NaN for a single pair.
    """
    return stratified_t([difference_P], two_sided=two_sided)


def stratified_t(differences: Sequence[Floats], *, two_sided: bool = False) -> PairedTest:
    """t-test of the mean over K benchmarks of the mean differences, for the paper's Avg.

    Every benchmark has the same weight. The error is ``sqrt(sum_k s_k^2 / P_k) / K``, with the degrees of freedom of
    Satterthwaite 1946, "An approximate distribution of estimates of variance components". With a single benchmark this
    is the paired t-test.

    Args:
        differences: of each benchmark, (P_k,), first minus second by prompt.
        two_sided: as in :func:`paired_t`.

    Returns:
        The test; without any variance as in :func:`paired_t`, NaN if a benchmark has a single prompt.
    """
    from scipy.stats import t as student

    differences = [_rounded(values) for values in differences]
    difference = float(np.mean([values.mean() for values in differences]))
    if min(map(len, differences)) < 2:
        return PairedTest(difference, np.nan, np.nan, np.nan, np.nan)
    degrees_K = np.array([len(values) - 1 for values in differences])
    squares_K = np.array([values.var(ddof=1) / len(values) for values in differences])
    if all(np.ptp(values) == 0 for values in differences):
        p = _sign_flips(np.concatenate(differences), two_sided)
        return PairedTest(difference, 0.0, float(degrees_K.sum()), np.nan, p)
    error = float(np.sqrt(squares_K.sum())) / len(differences)
    degrees = float(squares_K.sum() ** 2 / (squares_K**2 / degrees_K).sum())
    t = difference / error
    p = 2 * student.sf(abs(t), degrees) if two_sided else student.sf(t, degrees)
    return PairedTest(difference, error, degrees, t, float(p))


def _sign_flips(difference_P: Floats, two_sided: bool) -> float:
    """p of the exact sign-flip test where no difference has the wrong sign, else 1, which is on the safe side."""
    if two_sided:
        return min(1.0, 2 * min(_sign_flips(difference_P, False), _sign_flips(-difference_P, False)))
    return 1.0 if np.any(difference_P < 0) else float(0.5 ** np.count_nonzero(difference_P))


def t_interval(test: PairedTest) -> tuple[float, float]:
    """Bounds of the two-sided 95 % interval of the mean difference: where 0 is outside, two-sided p < 0.05.

    Returns:
        NaN for a single pair; without any variance, the difference twice.
    """
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, test.degrees)) * test.error
    return test.difference - half, test.difference + half


def wilcoxon_signed_rank(difference_P: Floats) -> float:
    """One-sided p-value of Wilcoxon's signed-rank test, H1: the differences are above 0; 1 if all are 0.

    Differences of 0 are left out. Exact where scipy can (few prompts, no ties), else by the normal approximation.
    """
    from scipy.stats import wilcoxon

    difference_P = _rounded(difference_P)
    if not difference_P.any():
        return 1.0
    return float(wilcoxon(difference_P, zero_method="wilcox", alternative="greater").pvalue)


def sign_test(difference_P: Floats) -> float:
    """One-sided exact p-value of the sign test, H1: more differences are above 0 than below; 1 if all are 0."""
    from scipy.stats import binomtest

    difference_P = _rounded(difference_P)
    wins, losses = int((difference_P > 0).sum()), int((difference_P < 0).sum())
    if not wins + losses:
        return 1.0
    return float(binomtest(wins, wins + losses, alternative="greater").pvalue)


def _rounded(difference_P: Floats) -> Floats:
    return np.round(difference_P, _DECIMALS)


def holm(p_values: Sequence[float]) -> Floats:
    """Holm's correction: p-values that hold for all tests together; NaN is not a test and stays NaN.

    The i-th smallest of m is multiplied by m + 1 - i, then made monotonic and capped at 1.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".

    Example:
        >>> holm([0.01, 0.04, 0.03])
        array([0.03, 0.06, 0.06])
    """
    corrected = np.asarray(p_values, dtype=float).copy()
    tests = np.flatnonzero(~np.isnan(corrected))
    order = tests[np.argsort(corrected[tests], kind="stable")]
    corrected[order] = np.minimum(np.maximum.accumulate(corrected[order] * np.arange(len(order), 0, -1)), 1.0)
    return corrected


def minimum_detectable(test: PairedTest, *, two_sided: bool = False) -> float:
    """The true difference that the test finds (p < 0.05) with probability 0.8: (t_0.95 + t_0.8) * error.

    Computed from the observed variance of the differences: how large a difference these prompts can show, whatever the
    observed one is. Two-sided, t_0.975 takes the place of t_0.95.

    Source: Zar 1999, "Biostatistical Analysis", minimum detectable difference of a one-sample t-test.

    Returns:
        NaN if no variance was observed.
    """
    if not test.error > 0:
        return float("nan")
    from scipy.stats import t

    level = ALPHA / 2 if two_sided else ALPHA
    return float(t.ppf(1 - level, test.degrees) + t.ppf(POWER, test.degrees)) * test.error


def bootstrap_means(accuracies: Sequence[Floats], rng: np.random.Generator, draws: int = DRAWS) -> Floats:
    """Accuracies of M models as they might have been with other prompts and other runs, (M, B).

    Each draw takes P prompts with replacement, the same ones for all models, so that differences of models stay paired,
    and R runs with replacement, separately for each model. A model's accuracy in a draw is that of the drawn prompts,
    over all runs, plus the mean of the drawn runs' :func:`run_effects`.

    The drawn runs' accuracies are not used as they are, because the accuracies of the prompts already contain the
    variance of sampling answers. Drawing runs of drawn prompts would count it 1 + 2 (R - 1) / R times, 2.5 times with
    4 runs, and the interval of two equal models would be half again too wide.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap"; the factor sqrt(P / (P - 1)) on the prompts'
    part corrects the narrowness bias of Hesterberg 2015, "What Teachers Should Know About the Bootstrap".

    Args:
        accuracies: of each model, (R, P), NaN where a prompt has no verified sample in a run; every prompt has one in
            some run. R may differ between models, P >= 1 may not.
        rng: the same state gives the same draws.
        draws: B.
    """
    mean_P_M = np.stack([prompt_means(accuracy_R_P) for accuracy_R_P in accuracies], axis=1)
    prompts = len(mean_P_M)
    around_P_M = (mean_P_M - mean_P_M.mean(axis=0)) * np.sqrt(prompts / max(prompts - 1, 1))
    chunk = _CHUNK // prompts + 1
    by_prompts = [
        _times_drawn(rng, prompts, min(chunk, draws - start)) @ around_P_M / prompts for start in range(0, draws, chunk)
    ]
    means_B_M = mean_P_M.mean(axis=0) + np.concatenate(by_prompts)
    for model, accuracy_R_P in enumerate(accuracies):
        effects_R = run_effects(accuracy_R_P)
        means_B_M[:, model] += _times_drawn(rng, len(effects_R), draws) @ effects_R / len(effects_R)
    return np.asarray(means_B_M.T)


def _times_drawn(rng: np.random.Generator, size: int, draws: int) -> Floats:
    """How often each of ``size`` items is drawn when ``size`` are drawn with replacement, (draws, size)."""
    chosen = rng.integers(size, size=(draws, size)) + size * np.arange(draws)[:, None]
    return np.bincount(chosen.ravel(), minlength=draws * size).reshape(draws, size).astype(np.float64)


def prompt_means(accuracy_R_P: Floats) -> Floats:
    """Accuracy of each prompt over its runs, (P,); NaN where no run has any."""
    return accuracy(accuracy_R_P.T)


def run_effects(accuracy_R_P: Floats) -> Floats:
    """By how much each run as a whole is better than the mean, beyond the noise of sampling answers, (R,).

    Two-way layout: ``accuracy[r, p] = prompt[p] + effect[r] + noise[r, p]``. Noise alone gives the runs' means a
    variance of ``within``; of their variance ``between`` the part above it is kept (nothing if it is below), and
    R / (R - 1) makes up for the narrowness of a resample of R runs. Independent samples have no run effects, and then
    little is kept.

    Source: variance components by the method of moments; Searle, Casella and McCulloch 1992, "Variance Components".
    """
    runs, prompts = accuracy_R_P.shape
    if runs < 2 or prompts < 2:
        return np.zeros(runs)
    around_R_P = accuracy_R_P - prompt_means(accuracy_R_P)
    effect_R = np.nan_to_num(accuracy(around_R_P))
    effect_R -= effect_R.mean()  # it is not 0 where groups are missing
    within = np.nansum((around_R_P - effect_R[:, None]) ** 2) / ((runs - 1) * (prompts - 1) * prompts)
    between = effect_R.var(ddof=1)
    if not between > within:
        return np.zeros(runs)
    return np.asarray(effect_R * np.sqrt((1 - within / between) * runs / (runs - 1)))


def interval(draws_B: Floats) -> tuple[float, float]:
    """Bounds of the central 95 % of bootstrap draws."""
    low, high = np.quantile(draws_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
