"""Measures of sampled answers: Acc@N, Best@N, pass@k, majority@N, length, share truncated, share missing.

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt. Functions of samples reduce the last axis.

A group is the N samples of a prompt in a run. A missing sample (score NaN: not verified) is left out of its group and
never counted as 0. A group without verified samples is NaN and is left out of means over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

import storage
from openrlhf_dbb.evaluation.results import Results

Floats = NDArray[np.float64]
PLUS_MINUS = "\u00b1"


def accuracy(scores: Floats) -> Floats:
    """Acc@N, the mean of the known values along the last axis; NaN where none is known."""
    known = ~np.isnan(scores)
    count = known.sum(axis=-1)
    total = np.where(known, scores, 0.0).sum(axis=-1)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def best(scores: Floats) -> Floats:
    """Best@N, the highest score; NaN where no sample is verified.

    With missing samples it is the best of fewer samples and so too low; :func:`pass_at_k` does not have this bias.
    """
    return np.asarray(np.fmax.reduce(scores, axis=-1))


def pass_at_k(scores: Floats, k: int) -> Floats:
    """Estimate without bias the probability that one of k samples is correct; NaN where fewer than k are verified.

    With c of n verified samples correct, pass@k = 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", Eq. 1.

    Args:
        scores: (..., N), each 0, 1 or NaN.
        k: 1 to N.
    """
    verified = (~np.isnan(scores)).sum(axis=-1)
    wrong = verified - np.nansum(scores, axis=-1)
    all_wrong = np.ones(verified.shape)
    for drawn in range(k):  # a product of ratios: the binomial coefficients of many samples overflow
        all_wrong *= np.maximum(wrong - drawn, 0) / np.maximum(verified - drawn, 1)
    return np.where(verified < k, np.nan, 1.0 - all_wrong)


def majority(scores: Floats, answers: NDArray[np.object_]) -> Floats:
    """majority@N, the score of the most frequent answer of a group; the mean score if answers tie.

    Samples without an answer and missing samples do not vote. If no sample of a group votes, its mean score counts.

    Args:
        scores: (..., N), NaN for missing.
        answers: (..., N), str or None.

    Returns:
        (...), NaN where no sample is verified, and everywhere if there is no answer at all.
    """
    if all(answer is None for answer in answers.flat):
        return np.full(scores.shape[:-1], np.nan)
    samples = scores.shape[-1]
    groups = zip(scores.reshape(-1, samples), answers.reshape(-1, samples), strict=True)
    return np.array([_group_majority(*group) for group in groups]).reshape(scores.shape[:-1])


def _group_majority(scores_N: Floats, answers_N: NDArray[np.object_]) -> float:
    votes: dict[str, list[float]] = {}
    for score, answer in zip(scores_N.tolist(), answers_N, strict=True):
        if answer is not None and not math.isnan(score):
            votes.setdefault(answer, []).append(score)
    if not votes:
        return float(accuracy(scores_N))
    most = max(map(len, votes.values()))
    # A verifier reads whole responses, so it may judge the same answer differently.
    return fmean(fmean(voted) for voted in votes.values() if len(voted) == most)


@dataclass(frozen=True)
class OverRuns:
    """A measure in each of R evaluation runs; the paper's cells are mean ± std."""

    by_run: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.by_run))

    @property
    def std(self) -> float:
        """Sample standard deviation (R - 1) over runs; NaN for a single run."""
        return float(np.std(self.by_run, ddof=1)) if len(self.by_run) > 1 else float("nan")

    @property
    def percent(self) -> str:
        """Mean and standard deviation in percent; the mean alone for a single run, "-" if it is not known."""
        if math.isnan(self.mean):
            return "-"
        spread = "" if math.isnan(self.std) else f" {PLUS_MINUS} {100 * self.std:.2f}"
        return f"{100 * self.mean:5.2f}{spread}"


def over_runs(values_R_P: Floats) -> OverRuns:
    """Return the mean over prompts in each run."""
    return OverRuns(tuple(accuracy(values_R_P).tolist()))


def macro_average(measures: Sequence[OverRuns]) -> OverRuns:
    """Return the mean over benchmarks in each run, with equal weights: the paper's Avg."""
    return OverRuns(tuple(np.mean([measure.by_run for measure in measures], axis=0).tolist()))


@dataclass(frozen=True)
class Summary:
    """The measures of one model on one benchmark, P prompts with N samples.

    Attributes:
        majority: NaN if the verifier gives no answers.
        pass_at: pass@k by k (powers of two, and N); empty if a score is neither 0 nor 1.
        length: mean length of a response, in tokens.
        truncated, missing: shares of the samples.
    """

    benchmark: str
    prompts: int
    samples: int
    accuracy: OverRuns
    best: OverRuns
    majority: OverRuns
    pass_at: dict[int, OverRuns]
    length: OverRuns
    truncated: OverRuns
    missing: OverRuns


def summarize(results: Results) -> Summary:
    """Compute all measures of one model on one benchmark."""
    scores = results.scores_R_P_N
    _, prompts, samples = scores.shape
    missing = np.isnan(scores)
    binary = bool(np.all(missing | (scores == 0) | (scores == 1)))
    ks = {2**power for power in range(samples.bit_length())} | {samples} if binary else ()
    return Summary(
        benchmark=results.benchmark,
        prompts=prompts,
        samples=samples,
        accuracy=over_runs(accuracy(scores)),
        best=over_runs(best(scores)),
        majority=over_runs(majority(scores, results.answers_R_P_N)),
        pass_at={k: over_runs(pass_at_k(scores, k)) for k in sorted(ks)},
        length=over_runs(results.tokens_R_P_N.mean(axis=-1)),
        truncated=over_runs(results.truncated_R_P_N.mean(axis=-1)),
        missing=over_runs(missing.mean(axis=-1)),
    )


def stored_rows(results: Results, prompt_ids: NDArray[np.int64]) -> storage.EvaluationRows:
    """Return results as the posterior store keeps them, summed over the samples of each prompt.

    Args:
        prompt_ids: (P,) of the prompts in the store.
    """
    scores = results.scores_R_P_N
    verified = ~np.isnan(scores)
    return storage.EvaluationRows(
        benchmark=results.benchmark,
        prompt_ids=prompt_ids,
        samples=np.full(scores.shape[:2], scores.shape[2]),
        verified=verified.sum(axis=-1),
        successes=np.where(verified, scores, 0.0).sum(axis=-1),
        best=best(scores),
        majority=majority(scores, results.answers_R_P_N),
        tokens=results.tokens_R_P_N.sum(axis=-1),
        truncated=results.truncated_R_P_N.sum(axis=-1),
    )
