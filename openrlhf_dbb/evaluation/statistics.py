"""Statistics of paired differences: tests, intervals, Holm's correction, what could have been detected.

Axes: R evaluation runs (seeds), P prompts of a benchmark. Accuracies are in [0, 1].

Tests generalize over prompts: two samples of the same prompt depend on each other, two prompts do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.evaluation.metrics import accuracy

Floats = NDArray[np.float64]

LEVEL = 0.95
"""Probability of an interval, two-sided."""
ALPHA = 0.05
"""Level of the tests."""
POWER = 0.8

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


def prompt_means(accuracy_R_P: Floats) -> Floats:
    """Accuracy of each prompt over its runs, (P,); NaN where no run has any."""
    return accuracy(accuracy_R_P.T)
