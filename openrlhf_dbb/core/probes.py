"""Probes: extra rollouts of some prompts to measure the estimates against. Never trained on, never estimated from.

A fixed random part of the training prompts is probed: whenever one of them is in a rollout batch, M further responses
are sampled under the policy of that step. Their mean score is the reference for the prompt's success probability.

Axes: Q probed prompts of a step, M samples of each.

Source: paper, section 5.3 (a tenth of the prompts, M = 128).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

import storage
from estimators.probe_error import squared_errors
from openrlhf_dbb.core.rollouts import Key


@dataclass(frozen=True)
class Probes:
    """What the probes of a step found.

    Attributes:
        prompts: Q different prompts.
        scores_Q_M: the verifier's scores, shape (Q, M); NaN where missing.
    """

    prompts: list[Key]
    scores_Q_M: NDArray[np.float64]


def of(args: SimpleNamespace, texts: Iterable[str], labels: Iterable[str]) -> set[Key]:
    """The prompts that a run with these arguments probes."""
    return chosen(zip(texts, labels, strict=True), args.probe.fraction, args.train.seed)


def chosen(prompts: Iterable[Key], fraction: float, seed: int) -> set[Key]:
    """The prompts that are probed: about ``fraction`` of them.

    A prompt is chosen by a hash of itself and ``seed``, so neither its place in the data set nor a resume changes the
    choice. A larger fraction chooses the same prompts and more.
    """
    return {prompt for prompt in prompts if _draw(prompt, seed) < fraction}


def _draw(prompt: Key, seed: int) -> float:
    """A pseudo-random number in [0, 1) that depends on the prompt and the seed alone."""
    digest = hashlib.blake2b(storage.prompt_hash(*prompt), digest_size=6, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**48


def rows(prompt_ids_Q: NDArray[np.int64], scores_Q_M: NDArray[np.float64]) -> storage.ProbeRows:
    """The probes of a step, to be stored; at least one score in every row."""
    return storage.ProbeRows(
        prompt_ids=prompt_ids_Q,
        samples=np.sum(~np.isnan(scores_Q_M), axis=1),
        successes=np.nansum(scores_Q_M, axis=1),
        squares=np.nansum(scores_Q_M**2, axis=1),
    )


def metrics(
    means_Q: NDArray[np.float64], group_means_Q: NDArray[np.float64], rows: storage.ProbeRows
) -> dict[str, float]:
    """What is logged of a step's probes.

    Args:
        means_Q: the estimator's means that the step was scored with; compared with scores even if the estimator sees
            rewards after length penalties.
        group_means_Q: mean score of the groups that were trained on.
        rows: the Q probes.

    Returns:
        ``probe/groups``, and the mean squared errors of both, ``probe/mse`` and ``probe/mse_point``, if any probe has
        at least two scores.
    """
    logged = {"probe/groups": float(len(rows.samples))}
    if (rows.samples >= 2).any():
        for name, estimates_Q in (("probe/mse", means_Q), ("probe/mse_point", group_means_Q)):
            errors_Q = squared_errors(estimates_Q, rows.samples, rows.successes, rows.squares)
            logged[name] = float(np.nanmean(errors_Q))
    return logged
