"""Simulated trainings, where the truth is known: every estimator is measured on the same draws.

Axes: P prompts, U policy updates, B prompts of an update, G rollouts per group, T passes; K seeds, E estimators, X
discounts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc
from scipy.stats import betabinom

from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.estimators.base import Floats, counts
from openrlhf_dbb.lab import candidates
from study import regimes

DRAWS = ("visits", "epoch", "uniform", "variance")
"""How prompts come back. "visits" visits every prompt once a pass, and all probabilities change between two passes.
With the others a prompt takes its next probability at a moment of its own within a pass, visited or not. "epoch"
visits every prompt once a pass, "uniform" draws at random, "variance" draws in proportion to the true p (1 - p)."""
FLOOR = 0.25
"""Share of the chances of ``variance`` that is the same for all prompts."""
_LEVEL = 0.8  # of the interval whose coverage is measured


@dataclass(frozen=True)
class Setting:
    """The size of all simulated trainings."""

    prompts: int = 2048
    visits: int = 4  # passes
    batch: int = 128  # prompts in a policy update
    seeds: int = 3
    seed: int = 0  # of the first training

    @property
    def pass_updates(self) -> int:
        """Policy updates in a pass."""
        return -(-self.prompts // self.batch)


@dataclass(frozen=True)
class Training:
    """A simulated training."""

    p_U_P: Floats  # success probabilities at each update, and, except with "visits", after the last one
    seen_U: list[NDArray[np.int64]]  # the prompts of each update, (B,) each
    # Their rewards, 0 or 1, (B, G) each, sorted in a group: estimators ignore the order
    rewards_U: list[Floats]
    pass_updates: int


def training(regime: str, drawn: str, rollouts: int, setting: Setting, seed: int) -> Training:
    """Simulate one training. Probabilities do not depend on ``rollouts``, nor do the prompts of an update."""
    paths, key = regimes.REGIMES[regime], [seed, zlib.crc32(regime.encode())]
    prompts, batch = setting.prompts, min(setting.batch, setting.prompts)
    starts = range(batch, prompts, batch)
    if drawn == "visits":
        rng = np.random.default_rng(key)
        p_P_T = paths(rng, prompts, setting.visits)
        seen_U = [
            seen
            for _ in range(setting.visits)
            for seen in np.split(rng.permutation(prompts), starts)
        ]
        p_U_P = np.repeat(p_P_T.T, setting.pass_updates, axis=0)
        successes_P_T = np.random.default_rng([*key, rollouts]).binomial(rollouts, p_P_T)
        of_pass_U = np.arange(len(seen_U)) // setting.pass_updates
        successes_U = [
            successes_P_T[seen, visit] for seen, visit in zip(seen_U, of_pass_U, strict=True)
        ]
    else:
        rng = np.random.default_rng([*key, 1])
        p_P_T = paths(rng, prompts, setting.visits + 1)
        now_U = np.arange(setting.visits * setting.pass_updates + 1) / setting.pass_updates
        passed_U_P = np.floor(now_U[:, None] + rng.random(prompts)).astype(np.int64)
        p_U_P = p_P_T[np.arange(prompts), passed_U_P]
        place = DRAWS.index(drawn) - 1
        rng = np.random.default_rng([*key, 2, place])
        if drawn == "epoch":
            seen_U = [
                seen
                for _ in range(setting.visits)
                for seen in np.split(rng.permutation(prompts), starts)
            ]
        else:
            chances = [_chances(p_P) if drawn == "variance" else None for p_P in p_U_P[:-1]]
            seen_U = [rng.choice(prompts, batch, replace=False, p=chance_P) for chance_P in chances]
        rng = np.random.default_rng([*key, 3, place, rollouts])
        successes_U = [
            rng.binomial(rollouts, p_P[seen]) for p_P, seen in zip(p_U_P[:-1], seen_U, strict=True)
        ]
    rewards_U = [
        (np.arange(rollouts) < successes[:, None]).astype(np.float64) for successes in successes_U
    ]
    return Training(p_U_P, seen_U, rewards_U, setting.pass_updates)


def _chances(p_P: Floats) -> Floats:
    """Return each prompt's chance to be drawn first by ``variance``. The floor keeps the sum above 0."""
    spread_P = p_P * (1 - p_P) + 1e-12
    return np.asarray((1 - FLOOR) * spread_P / spread_P.sum() + FLOOR / len(p_P))


@dataclass(frozen=True)
class Measured:
    """Errors of an estimator in one training. The last four are NaN without a predictive distribution.

    Forecasts are predictive distributions of all prompts, visited or not, at the ends of passes. The truth is the p of
    the next update.
    """

    visits: float  # mean over visits of (mean - p)^2, of the estimates that groups are scored with
    forecasts: float  # mean of (mean - p)^2
    spread: float  # forecast over true p (1 - p), summed over prompts; 1 is right
    coverage: float  # share of the true p in the central 80 % of their forecasts; 0.8 is right
    log_score: float  # mean log-probability of S before it was seen, nats per visit of a prompt seen before


MEASURES = tuple(field.name for field in fields(Measured))


def measure(estimator: RewardEstimator, run: Training) -> Measured:
    """Feed a simulated training to an estimator, and measure its estimates and forecasts."""
    prompts = run.p_U_P.shape[1]
    state, known = estimator.initial_state(prompts), np.zeros(prompts, dtype=bool)
    squares: list[Floats] = []
    scores: list[Floats] = []
    ends: list[tuple[Floats, ...]] = []
    for update, (seen, rewards_B_G) in enumerate(zip(run.seen_U, run.rewards_U, strict=True)):
        again = known[seen]
        expected = estimator.predictive(estimator.state_at(state, seen))
        if expected is not None:
            successes, rollouts = counts(rewards_B_G[again])
            scores.append(
                betabinom.logpmf(successes, rollouts, *(values[again] for values in expected))
            )
        mean = estimator.observe_at(state, seen, rewards_B_G).mean
        squares.append((mean - run.p_U_P[update, seen]) ** 2)
        known[seen] = True
        passed = (update + 1) % run.pass_updates == 0 and update + 1 < len(run.p_U_P)
        if expected is not None and passed:
            ends.append((*(estimator.predictive(state) or ()), run.p_U_P[update + 1]))
    visits = float(np.concatenate(squares).mean())
    if not ends:
        return Measured(visits, *[float("nan")] * 4)
    alpha, beta, p = (np.concatenate(values) for values in zip(*ends, strict=True))
    total, below = alpha + beta, betainc(alpha, beta, p)
    return Measured(
        visits,
        float(np.mean((alpha / total - p) ** 2)),
        float(np.sum(alpha / total * beta / (total + 1)) / np.sum(p * (1 - p))),
        float(np.mean(np.abs(below - 0.5) <= _LEVEL / 2)),
        float(np.concatenate(scores).mean()),
    )


@dataclass(frozen=True)
class Result:
    """One regime with one way to draw and one group size."""

    drawn: str
    regime: str
    rollouts: int
    values_M_E_K: Floats  # by measure (see ``MEASURES``), estimator and seed
    best_K: Floats  # errors at the visits of ``dbb`` at the one discount that is best in hindsight over all seeds
    # Discounts (or smoothings) and errors of each family, (X,) both
    sweeps: dict[str, tuple[Floats, Floats]]


def simulate(
    estimators: Sequence[RewardEstimator],
    discounts: Iterable[float],
    regime: str,
    drawn: str,
    rollouts: int,
    setting: Setting,
) -> Result:
    """Measure E estimators on the same trainings, one for each seed, and their families at all discounts."""
    runs = [
        training(regime, drawn, rollouts, setting, setting.seed + later)
        for later in range(setting.seeds)
    ]
    measured = [[measure(estimator, run) for run in runs] for estimator in estimators]
    values = [[[getattr(cell, name) for cell in row] for row in measured] for name in MEASURES]
    families = {"dbb": candidates.parse("dbb")} | {
        candidates.family(e): e for e in estimators if candidates.knob(e)
    }
    errors = {}
    for name, estimator in families.items():
        swept = candidates.swept(estimator, discounts)
        errors[name] = (
            np.array([candidates.knob_value(e) for e in swept]),
            np.array([[measure(e, run).visits for run in runs] for e in swept]),
        )
    dbb_X_K = errors["dbb"][1]
    sweeps = {name: (x, mse_X_K.mean(axis=1)) for name, (x, mse_X_K) in errors.items()}
    return Result(
        drawn, regime, rollouts, np.array(values), dbb_X_K[dbb_X_K.mean(axis=1).argmin()], sweeps
    )
