"""Estimators and discounts measured on simulated trainings, all on the same draws.

Axes: K seeds, E estimators, X discounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from estimators import RewardEstimator
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.simulation import Draws, Floats, draw, mean_squared_error


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
    sweeps = {name: setting.sweep(e, discounts, draws) for name, e in families(estimators).items()}
    _, dbb_X_K = sweeps["dbb"] if "dbb" in sweeps else setting.sweep(specs.parse("dbb"), discounts, draws)
    return Result(
        regime,
        rollouts,
        mse_E_K=setting.measure(estimators, draws),
        sweeps=sweeps,
        point_K=setting.measure([specs.parse("point")], draws)[0],
        best_K=dbb_X_K[dbb_X_K.mean(axis=1).argmin()],
    )


def families(estimators: Iterable[RewardEstimator]) -> dict[str, RewardEstimator]:
    """One estimator for each curve over the discount, by the curve's label."""
    return {specs.family(e): e for e in estimators if specs.knob(e)}
