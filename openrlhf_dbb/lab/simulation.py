"""Simulated training: prompts visited in batches, every estimator fed the same successes.

Axes: P prompts, G rollouts per group, T visits; one visit of every prompt is an epoch.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimators import RewardEstimator
from openrlhf_dbb.lab import regimes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Draws:
    """What happened in one simulated training.

    Attributes:
        p_P_T: success probabilities.
        rewards_T_P_G: 0 or 1, sorted within a group: estimators know no order.
        order_T_P: the order in which an epoch visits the prompts.
    """

    p_P_T: Floats
    rewards_T_P_G: Floats
    order_T_P: NDArray[np.int64]


def draw(regime: str, rollouts: int, prompts: int, visits: int, seed: int) -> Draws:
    """One training of a regime; other values of ``rollouts`` see the same probabilities and order.

    Raises:
        ValueError: there is no such regime.
    """
    paths = regimes.get(regime).paths
    key = zlib.crc32(regime.encode())
    rng = np.random.default_rng([seed, key])
    p_P_T = paths(rng, prompts, visits)
    order_T_P = np.stack([rng.permutation(prompts) for _ in range(visits)])
    successes_P_T = np.random.default_rng([seed, key, rollouts]).binomial(rollouts, p_P_T)
    rewards_T_P_G = (np.arange(rollouts) < successes_P_T.T[:, :, None]).astype(np.float64)
    return Draws(p_P_T, rewards_T_P_G, order_T_P)


def play(estimator: RewardEstimator, draws: Draws, batch: int) -> Floats:
    """The means an estimator gives at each visit, (P, T), seeing ``batch`` prompts at a step.

    What has no run-wide state sees an epoch at once, which comes to the same.
    """
    visits, prompts, _ = draws.rewards_T_P_G.shape
    estimator = with_updates(estimator, -(-prompts // batch))
    state = estimator.initial_state(prompts)
    mean_T_P = np.empty((visits, prompts))
    for visit, rewards_P_G in enumerate(draws.rewards_T_P_G):
        if not estimator.shared_fields:
            state, estimate = estimator.observe(state, rewards_P_G)
            mean_T_P[visit] = estimate.mean
            continue
        for start in range(0, prompts, batch):
            seen = draws.order_T_P[visit, start : start + batch]
            rows = {field: state[field][seen] for field in estimator.state_fields}
            shared = {field: state[field] for field in estimator.shared_fields}
            new_state, estimate = estimator.observe(rows | shared, rewards_P_G[seen])
            for field in estimator.state_fields:
                state[field][seen] = new_state[field]
            state |= {field: new_state[field] for field in estimator.shared_fields}
            mean_T_P[visit, seen] = estimate.mean
    return mean_T_P.T


def mean_squared_error(estimator: RewardEstimator, draws: Draws, batch: int) -> float:
    """Mean over prompts and visits of (mean - p)^2."""
    return float(np.mean((play(estimator, draws, batch) - draws.p_P_T) ** 2))


def with_updates(estimator: RewardEstimator, updates: int) -> RewardEstimator:
    """The estimator told how many policy updates an epoch has, if it asks (``updates_per_epoch`` = 0)."""
    if getattr(estimator, "updates_per_epoch", None) != 0:
        return estimator
    told: RewardEstimator = dataclasses.replace(estimator, updates_per_epoch=float(updates))  # type: ignore[type-var]
    return told
