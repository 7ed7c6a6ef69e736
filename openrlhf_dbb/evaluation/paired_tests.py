"""Paired t-tests over prompts, their intervals, and Holm's correction.

Two samples of the same prompt depend on each other, two prompts do not: so tests generalize over prompts.

Axes: P prompts of a benchmark, K benchmarks. Accuracies are in [0, 1].
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from openrlhf_dbb.estimators.base import Floats

ALPHA = 0.05  # level of the tests

_DECIMALS = 12  # differences of accuracies that are equal on paper may differ beyond


class PairedTest(NamedTuple):
    """A paired t-test of the mean difference; t and p are NaN if the differences have no variance."""

    difference: float
    low: float  # ends of the two-sided 95 % interval of the mean difference
    high: float
    error: float  # standard error of the mean difference
    degrees: float  # of freedom
    t: float
    p: float


def stratified_t(differences: Sequence[Floats], *, two_sided: bool = False) -> PairedTest:
    """Test the mean over K benchmarks of mean differences (P_k,), first minus second model; H1: it is above 0.

    With one benchmark this is the paired t-test of the paper, section 4.1. The error is
    ``sqrt(sum_k s_k^2 / P_k) / K``, with the degrees of freedom of Satterthwaite 1946, "An approximate distribution of
    estimates of variance components". All but the difference are NaN if a benchmark has a single prompt.
    """
    from scipy.stats import t as student

    differences = [np.round(values, _DECIMALS) for values in differences]
    difference = float(np.mean([values.mean() for values in differences]))
    if min(map(len, differences)) < 2:
        return PairedTest(difference, *[math.nan] * 6)
    degrees_K = np.array([len(values) - 1 for values in differences])
    if all(np.ptp(values) == 0 for values in differences):
        return PairedTest(difference, difference, difference, 0.0, float(degrees_K.sum()), math.nan, math.nan)
    squares_K = np.array([values.var(ddof=1) / len(values) for values in differences])
    error = float(np.sqrt(squares_K.sum())) / len(differences)
    degrees = float(squares_K.sum() ** 2 / (squares_K**2 / degrees_K).sum())
    t = difference / error
    p = 2 * student.sf(abs(t), degrees) if two_sided else student.sf(t, degrees)
    half = float(student.ppf(0.975, degrees)) * error
    return PairedTest(difference, difference - half, difference + half, error, degrees, t, float(p))


def holm(p_values: Sequence[float]) -> Floats:
    """Return Holm's p-values, which hold for all tests together; NaN is not a test and stays NaN.

    The i-th smallest of m is multiplied by m + 1 - i, then made monotonic and capped at 1.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    corrected = np.asarray(p_values, dtype=float).copy()
    tests = np.flatnonzero(~np.isnan(corrected))
    order = tests[np.argsort(corrected[tests], kind="stable")]
    corrected[order] = np.minimum(np.maximum.accumulate(corrected[order] * np.arange(len(order), 0, -1)), 1.0)
    return corrected


def p_value(p: float) -> str:
    """Return a p-value with four digits, never as 0; "-" for NaN."""
    return "-" if math.isnan(p) else "<0.0001" if p < 1e-4 else f"{p:.4f}"
