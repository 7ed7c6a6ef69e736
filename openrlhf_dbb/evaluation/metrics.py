"""Measures of sampled answers: Acc@N, Best@N, pass@k, majority@N, length, share truncated, share missing.

Axes: R evaluation runs (seeds), P prompts of a benchmark, N samples of a prompt. Functions of samples reduce the last
axis and keep the others.

A missing sample (score NaN: could not be verified) is never counted as 0. It is left out of its group (the samples of a
prompt in a run), whose number of verified samples n is then below N. A group without verified samples is NaN, and is
left out of means over prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.evaluation.results import Results

Floats = NDArray[np.float64]


def accuracy(scores: Floats) -> Floats:
    """Acc@N, the mean of the known values along the last axis; NaN where there are none.

    Example:
        >>> accuracy(np.array([[1.0, 0.0, np.nan], [np.nan, np.nan, np.nan]]))
        array([0.5, nan])
    """
    known = ~np.isnan(scores)
    count = known.sum(axis=-1)
    total = np.where(known, scores, 0.0).sum(axis=-1)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def best(scores: Floats) -> Floats:
    """Best@N, the highest score: for scores 0 and 1, whether any sample is correct; NaN where none is verified.

    With missing samples it is the best of fewer samples, and so too low; :func:`pass_at_k` does not have this bias.

    Example:
        >>> best(np.array([[1.0, 0.0, np.nan], [0.0, 0.25, 0.0]]))
        array([1.  , 0.25])
    """
    return np.asarray(np.fmax.reduce(scores, axis=-1))


def pass_at_k(scores: Floats, k: int) -> Floats:
    """The probability that any of k samples is correct, unbiased: 1 - C(n - c, k) / C(n, k), c of n verified correct.

    Drawing k of n with replacement instead would be biased low. Computed as 1 - prod_(j < k) (n - c - j) / (n - j), to
    avoid overflow.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", Eq. 1.

    Args:
        scores: (..., N), each 0, 1 or NaN.
        k: 1 to N.

    Returns:
        (...), NaN where n < k.

    Raises:
        ValueError: k is out of range, or a score is neither 0 nor 1.

    Example:
        >>> pass_at_k(np.array([[1.0, 0.0, 0.0, 0.0]]), 2)
        array([0.5])
    """
    samples = scores.shape[-1]
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k: k must be between 1 and {samples}, the samples of a prompt, got {k}")
    if not is_binary(scores):
        other = scores[~np.isnan(scores) & (scores != 0) & (scores != 1)][0]
        raise ValueError(f"pass@k needs scores of 0 or 1, got {other:g}; use Best@N")
    verified = (~np.isnan(scores)).sum(axis=-1)
    wrong = verified - np.nansum(scores, axis=-1)
    all_wrong = np.ones(verified.shape)
    for drawn in range(k):
        all_wrong *= np.maximum(wrong - drawn, 0) / np.maximum(verified - drawn, 1)
    return np.where(verified >= k, 1 - all_wrong, np.nan)


def is_binary(scores: Floats) -> bool:
    """Whether every verified score is 0 or 1."""
    return bool(np.all(np.isnan(scores) | (scores == 0) | (scores == 1)))


def pass_ks(samples: int) -> list[int]:
    """The values of k that are shown: powers of two below N, and N.

    Example:
        >>> pass_ks(8), pass_ks(6)
        ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})


def majority(scores: Floats, answers: NDArray[np.object_]) -> Floats:
    """majority@N: the score of the most frequent answer among a group's verified samples.

    Answers are the same if their texts are. The score of an answer is the mean over the samples that give it (a
    verifier reads whole responses and may judge them differently). If answers tie, the measure is the mean of their
    scores, the expectation of a random choice among them; taking the first one would make it depend on the order of the
    samples, which is arbitrary. Samples without an answer do not vote; if nobody in a group votes, its mean score is
    taken.

    Args:
        scores: (..., N), NaN for missing.
        answers: (..., N), str or None.

    Returns:
        (...), NaN where no sample is verified, and everywhere if there is no answer at all: the verifier gives none.

    Example:
        >>> majority(np.array([[1.0, 0.0, 1.0, 0.0]]), np.array([["3", "4", "3", None]], dtype=object))
        array([1.])
    """
    groups = scores.shape[:-1]
    numbers: dict[str, int] = {}
    flat = [-1 if answer is None else numbers.setdefault(answer, len(numbers)) for answer in answers.ravel()]
    if not numbers:
        return np.full(groups, np.nan)
    answer_G_N = np.array(flat).reshape(-1, scores.shape[-1])
    scores_G_N = scores.reshape(answer_G_N.shape)
    votes = (answer_G_N >= 0) & ~np.isnan(scores_G_N)
    ballot = np.nonzero(votes)[0] * len(numbers) + answer_G_N[votes]
    choices, choice, count = np.unique(ballot, return_inverse=True, return_counts=True)
    score = np.bincount(choice, scores_G_N[votes], len(choices)) / count
    group = choices // len(numbers)
    most = np.zeros(len(answer_G_N), dtype=count.dtype)
    np.maximum.at(most, group, count)
    wins = count == most[group]
    winners = np.bincount(group[wins], minlength=len(answer_G_N))
    total = np.bincount(group[wins], score[wins], len(answer_G_N))
    without_votes = accuracy(scores_G_N)
    return np.asarray(np.divide(total, winners, out=without_votes, where=winners > 0).reshape(groups))


@dataclass(frozen=True)
class OverRuns:
    """A measure in each of R evaluation runs, (R,), and over them; the paper's cells are mean ± std."""

    by_run: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.by_run))

    @property
    def std(self) -> float:
        """Sample standard deviation (R - 1) over runs; NaN for a single run."""
        return float(np.std(self.by_run, ddof=1)) if len(self.by_run) > 1 else float("nan")


def over_runs(values_R_P: Floats) -> OverRuns:
    """Mean over prompts in each run; NaN, a missing group, is left out."""
    return OverRuns(tuple(accuracy(values_R_P).tolist()))


def macro_average(measures: list[OverRuns]) -> OverRuns:
    """Mean over benchmarks in each run, with equal weights: the paper's Avg."""
    return OverRuns(tuple(np.mean([measure.by_run for measure in measures], axis=0).tolist()))


@dataclass(frozen=True)
class Summary:
    """The measures of one model on one benchmark.

    Attributes:
        prompts, samples: P and N.
        accuracy: Acc@N, in [0, 1] like the scores.
        best: Best@N.
        majority: majority@N; NaN if the verifier gives no answers.
        pass_at: pass@k by k, for k of :func:`pass_ks`; empty if any score is neither 0 nor 1.
        length: mean length of a response, in tokens.
        truncated: share of responses cut at the limit.
        missing: share of samples that could not be verified.
        missing_groups: groups (a prompt in a run) without a verified sample, over all runs.
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
    missing_groups: int


def summarize(results: Results) -> Summary:
    """All measures of one model on one benchmark."""
    scores = results.scores_R_P_N
    _, prompts, samples = results.shape
    ks = pass_ks(samples) if is_binary(scores) else []
    missing = np.isnan(scores)
    return Summary(
        benchmark=results.benchmark,
        prompts=prompts,
        samples=samples,
        accuracy=over_runs(accuracy(scores)),
        best=over_runs(best(scores)),
        majority=over_runs(majority(scores, results.answers_R_P_N)),
        pass_at={k: over_runs(pass_at_k(scores, k)) for k in ks},
        length=over_runs(results.tokens_R_P_N.mean(axis=-1)),
        truncated=over_runs(results.truncated_R_P_N.mean(axis=-1)),
        missing=over_runs(missing.mean(axis=-1)),
        missing_groups=int(missing.all(axis=-1).sum()),
    )
