"""Simulated trainings, where the truth is known: every estimator and every discount on the same draws.

Axes: P prompts, G rollouts per group, T visits (one visit of every prompt is an epoch); K seeds, E estimators, X
discounts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb.lab import specs
from study import regimes


@dataclass(frozen=True)
class Draws:
    """What happened in one simulated training.

    Attributes:
        p_P_T: success probabilities.
        rewards_T_P_G: 0 or 1, sorted within a group: estimators ignore the order.
        order_T_P: the order in which an epoch visits the prompts.
    """

    p_P_T: Floats
    rewards_T_P_G: Floats
    order_T_P: NDArray[np.int64]


def draw(regime: str, rollouts: int, prompts: int, visits: int, seed: int) -> Draws:
    """One training of a regime; probabilities and order do not depend on ``rollouts``.

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


def estimated_means(estimator: RewardEstimator, draws: Draws, batch: int) -> Floats:
    """The means an estimator gives at each visit, (P, T), with ``batch`` prompts per policy step.

    Estimators without run-wide state take a whole epoch per call; the result is identical.
    """
    visits, prompts, _ = draws.rewards_T_P_G.shape
    estimator = specs.with_updates_per_epoch(estimator, -(-prompts // batch))
    size = batch if estimator.shared_fields else prompts
    state = estimator.initial_state(prompts)
    mean_T_P = np.empty((visits, prompts))
    for visit, rewards_P_G in enumerate(draws.rewards_T_P_G):
        for start in range(0, prompts, size):
            seen = draws.order_T_P[visit, start : start + size]
            mean_T_P[visit, seen] = estimator.observe_at(state, seen, rewards_P_G[seen]).mean
    return mean_T_P.T


def mean_squared_error(estimator: RewardEstimator, draws: Draws, batch: int) -> float:
    """Mean over prompts and visits of (mean - p)^2."""
    return float(np.mean((estimated_means(estimator, draws, batch) - draws.p_P_T) ** 2))


@dataclass(frozen=True)
class Setting:
    """What all simulated trainings have in common.

    Attributes:
        prompts, visits: every prompt is visited once in each of ``visits`` epochs.
        batch: prompts in a policy step.
        seeds, seed: number of trainings, and the seed of the first.
    """

    prompts: int = 2048
    visits: int = 4
    batch: int = 128
    seeds: int = 3
    seed: int = 0

    @property
    def pass_updates(self) -> int:
        """Policy updates in an epoch."""
        return -(-self.prompts // self.batch)

    def draws(self, regime: str, rollouts: int) -> list[Draws]:
        """One training for each seed."""
        seeds = range(self.seed, self.seed + self.seeds)
        return [draw(regime, rollouts, self.prompts, self.visits, seed) for seed in seeds]

    def measure(self, estimators: Iterable[RewardEstimator], draws: Sequence[Draws]) -> Floats:
        """Mean squared errors, (E, K)."""
        return np.array([[mean_squared_error(e, drawn, self.batch) for drawn in draws] for e in estimators])

    def sweep(
        self, estimator: RewardEstimator, discounts: Iterable[float], draws: Sequence[Draws]
    ) -> tuple[Floats, Floats]:
        """The values among ``discounts`` that the estimator allows, (X,), and its errors there, (X, K)."""
        candidates = specs.swept(estimator, discounts)
        return np.array(list(candidates)), self.measure(candidates.values(), draws)


@dataclass(frozen=True)
class Result:
    """One regime with one group size.

    Attributes:
        mse_E_K: mean squared errors of the estimators.
        sweeps: for each curve over the discount (or smoothing) its values (X,) and errors (X, K).
        point_K: errors of the group's own mean.
        best_K: errors of ``dbb``, prior (1, 1), at the one discount that is best in hindsight over all seeds.
    """

    regime: str
    rollouts: int
    mse_E_K: Floats
    sweeps: dict[str, tuple[Floats, Floats]]
    point_K: Floats
    best_K: Floats

    @property
    def ratio_E_K(self) -> Floats:
        """Errors in units of ``best_K``."""
        return self.mse_E_K / self.best_K


def simulate(
    estimators: Sequence[RewardEstimator], discounts: Sequence[float], regime: str, rollouts: int, setting: Setting
) -> Result:
    """Simulate one regime with one group size.

    Args:
        estimators: E of them, as they are.
        discounts: in (0, 1]: tried with every family of estimators that has a discount or smoothing.
        regime: its name.
        rollouts: N >= 1.
        setting: size and seeds.

    Raises:
        ValueError: there is no such regime.
    """
    draws = setting.draws(regime, rollouts)
    sweeps = {name: setting.sweep(e, discounts, draws) for name, e in specs.families(estimators).items()}
    _, dbb_X_K = sweeps["dbb"] if "dbb" in sweeps else setting.sweep(specs.parse("dbb"), discounts, draws)
    return Result(
        regime,
        rollouts,
        mse_E_K=setting.measure(estimators, draws),
        sweeps=sweeps,
        point_K=setting.measure([specs.parse("point")], draws)[0],
        best_K=dbb_X_K[dbb_X_K.mean(axis=1).argmin()],
    )
