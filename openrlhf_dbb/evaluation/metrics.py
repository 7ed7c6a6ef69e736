"""Measures of sampled answers, and paired tests of their differences.

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt (reduced), K benchmarks.

A group is the N samples of a prompt in a run. A missing sample (score NaN: not verified) is left
out of its group and never counted as 0. A group without verified samples is NaN and is left out of
means over prompts.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import storage
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.results import Results

ALPHA = 0.05  # level of the tests


def accuracy(scores: Floats) -> Floats:
    """Acc@N, the mean of the known values along the last axis; NaN where none is known."""
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        return np.asarray(np.nansum(scores, axis=-1) / (~np.isnan(scores)).sum(axis=-1))


def best(scores: Floats) -> Floats:
    """Best@N, the highest score along the last axis; NaN where no sample is verified.

    Missing samples bias it low, unlike pass@k.
    """
    return np.asarray(np.fmax.reduce(scores, axis=-1))


def pass_at_k(verified: Floats, correct: Floats, k: int) -> Floats:
    """Return 1 - C(n - c, k) / C(n, k), where c of n samples are right; NaN where n < k.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", Eq. 1.

    Args:
        verified, correct: n and c of each group, of one shape.
    """
    from scipy.stats import hypergeom

    # P(none of k draws is correct); the binomial coefficients of many samples would overflow.
    return np.asarray(1.0 - hypergeom.pmf(0, verified, correct, k))


def majority(scores: Floats, answers: NDArray[np.object_]) -> Floats:
    """majority@N, the score of the most frequent answer of each group, along the last axis.

    It is the mean score if answers tie or nobody votes: samples without an answer or a verdict do
    not vote. NaN where none is verified; everywhere if there is no answer.
    """
    majorities = np.full(scores.shape[:-1], np.nan)
    if _has_answers(answers):
        for group in np.ndindex(majorities.shape):
            majorities[group] = _majority(scores[group], answers[group])
    return majorities


def _has_answers(answers: NDArray[np.object_]) -> bool:
    return any(answer is not None for answer in answers.flat)


def _majority(scores_N: Floats, answers_N: NDArray[np.object_]) -> float:
    votes: dict[str, list[float]] = {}
    for score, answer in zip(scores_N.tolist(), answers_N, strict=True):
        if answer is not None and not math.isnan(score):
            votes.setdefault(answer, []).append(score)
    if not votes:
        return float(accuracy(scores_N))
    most = max(map(len, votes.values()))
    # A verifier reads whole responses, so it may judge the same answer differently.
    return fmean(fmean(voted) for voted in votes.values() if len(voted) == most)


def measures(results: Results) -> dict[str, Floats]:
    """Return the measures of one model on one benchmark by their logged names.

    Each has shape (R,): the mean over prompts in each run. All are in [0, 1] but
    response_length_mean, in tokens. pass@k needs scores 0 and 1; k is N or a power of two.
    """
    scores = results.scores_R_P_N
    missing = np.isnan(scores)
    samples = scores.shape[2]
    by_prompt = {f"mean@{samples}": accuracy(scores), f"best@{samples}": best(scores)}
    if _has_answers(results.answers_R_P_N):
        by_prompt[f"majority@{samples}"] = majority(scores, results.answers_R_P_N)
    if np.all(missing | (scores == 0) | (scores == 1)):
        verified = (~missing).sum(axis=-1)
        correct = np.nansum(scores, axis=-1)
        for k in sorted({samples, *(2**power for power in range(samples.bit_length()))}):
            by_prompt[f"pass@{k}"] = pass_at_k(verified, correct, k)
    by_prompt["missing"] = missing.mean(axis=-1)
    by_prompt["truncated_rate"] = results.truncated_R_P_N.mean(axis=-1)
    by_prompt["response_length_mean"] = results.tokens_R_P_N.mean(axis=-1)
    return {name: accuracy(values_R_P) for name, values_R_P in by_prompt.items()}


def percent(values_R: Floats) -> str:
    """Write mean and sample standard deviation over runs in percent; "-" if unknown."""
    if np.isnan(values_R).any():
        return "-"
    mean = f"{100 * np.mean(values_R):5.2f}"
    if len(values_R) == 1:
        return mean
    return f"{mean} \u00b1 {100 * np.std(values_R, ddof=1):.2f}"


def stored_rows(results: Results, store: storage.PosteriorStore) -> storage.EvaluationRows:
    """Return results as the store keeps them, summed over samples; register their prompts.

    Raises:
        StoreError: the prompts cannot be registered.
    """
    scores = results.scores_R_P_N
    return storage.EvaluationRows(
        benchmark=results.benchmark,
        prompt_ids=store.register_prompts(results.prompts, results.labels),
        samples=np.full(scores.shape[:2], scores.shape[2]),
        verified=(~np.isnan(scores)).sum(axis=-1),
        successes=np.nansum(scores, axis=-1),
        best=best(scores),
        majority=majority(scores, results.answers_R_P_N),
        tokens=results.tokens_R_P_N.sum(axis=-1),
        truncated=results.truncated_R_P_N.sum(axis=-1),
    )


class PairedTest(NamedTuple):
    """A paired t-test of a mean difference; p is NaN if the differences have no variance."""

    difference: float
    low: float  # ends of the two-sided 95 % interval of the mean difference
    high: float
    p: float


def stratified_t(differences: Sequence[Floats], *, two_sided: bool = False) -> PairedTest:
    """Test the mean over K benchmarks of mean differences, first minus second model.

    H1: the mean is above 0; ``two_sided``: it is not 0. The test is over prompts: samples of one
    prompt depend on each other. With one benchmark it is the paired t-test of the paper, section
    4.1; else the error is ``sqrt(sum_k s_k^2 / P_k) / K``, with the degrees of freedom of
    Satterthwaite 1946, "An approximate distribution of estimates of variance components".

    Args:
        differences: (P_k,) of each benchmark.

    Returns:
        The test; all but the difference are NaN if a benchmark has a single prompt.
    """
    from scipy.stats import t as student

    # Differences of accuracies that are equal on paper may differ beyond.
    differences = [np.round(values, 12) for values in differences]
    difference = float(np.mean([values.mean() for values in differences]))
    if min(map(len, differences)) < 2:
        return PairedTest(difference, math.nan, math.nan, math.nan)
    if all(np.ptp(values) == 0 for values in differences):
        return PairedTest(difference, difference, difference, math.nan)
    degrees_K = np.array([len(values) - 1 for values in differences])
    squares_K = np.array([values.var(ddof=1) / len(values) for values in differences])
    degrees = squares_K.sum() ** 2 / (squares_K**2 / degrees_K).sum()
    error = float(np.sqrt(squares_K.sum())) / len(differences)
    test = student(df=degrees, scale=error)
    p = test.sf(difference)
    if two_sided:
        p = 2 * test.sf(abs(difference))
    half = float(test.ppf(0.975))
    return PairedTest(difference, difference - half, difference + half, float(p))


def holm(p_values: Sequence[float]) -> Floats:
    """Return Holm's p-values, which hold for all tests together; NaN is not a test and stays NaN.

    The i-th smallest of m is multiplied by m + 1 - i, then made monotonic and capped at 1.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    corrected = np.asarray(p_values, dtype=float).copy()
    tests = np.flatnonzero(~np.isnan(corrected))
    order = tests[np.argsort(corrected[tests], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    increasing = np.maximum.accumulate(corrected[order] * factors)
    corrected[order] = np.minimum(increasing, 1.0)
    return corrected


def p_value(p: float) -> str:
    """Return a p-value with four digits, never as 0; "-" for NaN."""
    if math.isnan(p):
        return "-"
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"
