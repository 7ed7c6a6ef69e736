"""Simulated trainings in time: prompts come back at irregular gaps, and change whether they are visited or not.

Axes: P prompts, U policy updates, B prompts of an update, G rollouts per group, T passes; K seeds, E estimators.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy.stats import betabinom

from estimators import RewardEstimator
from estimators.base import Floats, counts
from openrlhf_dbb.lab import specs
from study import regimes
from study.simulation import Setting

DRAWS = ("epoch", "uniform", "variance")
"""How an update draws its prompts: every prompt once a pass, in random order; at random from all prompts; in proportion
to their true p (1 - p). All without replacement within an update."""

FLOOR = 0.25
"""Share of the chances of ``variance`` that is the same for all prompts."""

_LEVEL = 0.8  # of the interval whose coverage is measured


@dataclass(frozen=True)
class Training:
    """What happened in one simulated training.

    Attributes:
        p_U_P: success probabilities at each of the updates, and at the one after the last: U + 1 rows.
        seen_U: the prompts of each update, (B,) each; the last update of a pass by epochs may have fewer.
        rewards_U: their rewards, 0 or 1, sorted within a group, (B, G) each.
        pass_updates: updates in a pass.
    """

    p_U_P: Floats
    seen_U: list[NDArray[np.int64]]
    rewards_U: list[Floats]
    pass_updates: int


def training(regime: str, drawn: str, rollouts: int, setting: Setting, seed: int) -> Training:
    """One training; probabilities do not depend on ``drawn``, nor probabilities and prompts on ``rollouts``.

    A regime says how a probability changes from one pass to the next. Every prompt takes its next value at a moment
    of its own within the pass, drawn once, so that the prompts together change with every update.

    Args:
        drawn: one of ``DRAWS``.

    Raises:
        ValueError: there is no such regime, or no such way to draw.
    """
    if drawn not in DRAWS:
        raise ValueError(f"unknown draw {drawn!r}; known: {', '.join(DRAWS)}")
    key = [seed, zlib.crc32(regime.encode())]
    rng = np.random.default_rng([*key, 1])
    prompts, batch, pass_updates = setting.prompts, min(setting.batch, setting.prompts), setting.pass_updates
    p_P_T = regimes.get(regime).paths(rng, prompts, setting.visits + 1)
    now_U = np.arange(setting.visits * pass_updates + 1) / pass_updates
    passed_U_P = np.floor(now_U[:, None] + rng.random(prompts)).astype(np.int64)
    p_U_P = p_P_T[np.arange(prompts), passed_U_P]
    rng = np.random.default_rng([*key, 2, DRAWS.index(drawn)])
    if drawn == "epoch":
        starts = range(batch, prompts, batch)
        seen_U = [seen for _ in range(setting.visits) for seen in np.split(rng.permutation(prompts), starts)]
    else:
        chances = [_chances(p_P) if drawn == "variance" else None for p_P in p_U_P[:-1]]
        seen_U = [rng.choice(prompts, batch, replace=False, p=chance_P) for chance_P in chances]
    rng = np.random.default_rng([*key, 3, DRAWS.index(drawn), rollouts])
    successes_U = [rng.binomial(rollouts, p_P[seen]) for p_P, seen in zip(p_U_P[:-1], seen_U, strict=True)]
    rewards_U = [(np.arange(rollouts) < successes[:, None]).astype(np.float64) for successes in successes_U]
    return Training(p_U_P, seen_U, rewards_U, pass_updates)


def _chances(p_P: Floats) -> Floats:
    """Of each prompt to be drawn first by ``variance``; the floor keeps the sum above 0."""
    spread_P = p_P * (1 - p_P) + 1e-12
    return np.asarray((1 - FLOOR) * spread_P / spread_P.sum() + FLOOR / len(p_P))


@dataclass(frozen=True)
class Measured:
    """How good an estimator was in one training. The last four are NaN without a predictive distribution.

    Attributes:
        visits: mean over visits of (mean - p)^2, of the estimates that groups are scored with.
        forecasts: mean over the ends of passes and all prompts, visited or not, of (mean - p)^2, where the mean is
            the predictive distribution's and p of the next update.
        spread: E[p (1 - p)] under the predictive distribution over the true p (1 - p), both summed over all prompts
            at the ends of passes; 1 is right.
        coverage: share of the true p in the central 80 % of the predictive distribution, there; 0.8 is right.
        log_score: mean log-probability of S before it was seen, nats per visit of a prompt seen before.
    """

    visits: float
    forecasts: float
    spread: float
    coverage: float
    log_score: float


MEASURES = tuple(field.name for field in fields(Measured))


def measure(estimator: RewardEstimator, run: Training) -> Measured:
    """Train with ``estimator`` on what happened in ``run``."""
    from scipy.special import betainc  # of the extra `lab`

    prompts = run.p_U_P.shape[1]
    estimator = specs.with_updates_per_epoch(estimator, run.pass_updates)
    state, known = estimator.initial_state(prompts), np.zeros(prompts, dtype=bool)
    squares: list[Floats] = []
    scores: list[Floats] = []
    ends: list[tuple[Floats, ...]] = []
    for update, (seen, rewards_B_G) in enumerate(zip(run.seen_U, run.rewards_U, strict=True)):
        again = known[seen]
        expected = estimator.predictive(estimator.state_at(state, seen))
        if expected is not None:
            alpha, beta = (values[again] for values in expected)
            scores.append(_log_scores(alpha, beta, rewards_B_G[again]))
        mean = estimator.observe_at(state, seen, rewards_B_G).mean
        squares.append((mean - run.p_U_P[update, seen]) ** 2)
        known[seen] = True
        if expected is not None and (update + 1) % run.pass_updates == 0:
            ends.append((*(estimator.predictive(state) or ()), run.p_U_P[update + 1]))
    if not ends:
        return Measured(float(np.concatenate(squares).mean()), *[float("nan")] * 4)
    alpha, beta, p = (np.concatenate(values) for values in zip(*ends, strict=True))
    total, below = alpha + beta, betainc(alpha, beta, p)
    return Measured(
        float(np.concatenate(squares).mean()),
        float(np.mean((alpha / total - p) ** 2)),
        float(np.sum(alpha / total * beta / (total + 1)) / np.sum(p * (1 - p))),
        float(np.mean(np.abs(below - 0.5) <= _LEVEL / 2)),
        float(np.concatenate(scores).mean()),
    )


def _log_scores(alpha: Floats, beta: Floats, rewards_B_G: Floats) -> Floats:
    successes, rollouts = counts(rewards_B_G)
    return np.asarray(betabinom.logpmf(successes, rollouts, alpha, beta))


@dataclass(frozen=True)
class Result:
    """One regime with one way to draw and one group size.

    Attributes:
        values_M_E_K: by measure, in the order of ``MEASURES``, estimator and seed.
    """

    drawn: str
    regime: str
    rollouts: int
    values_M_E_K: Floats


def simulate(estimators: Sequence[RewardEstimator], regime: str, drawn: str, rollouts: int, setting: Setting) -> Result:
    """Measure the E estimators on the same trainings, one for each seed.

    Raises:
        ValueError: there is no such regime, or no such way to draw.
    """
    seeds = range(setting.seed, setting.seed + setting.seeds)
    runs = [training(regime, drawn, rollouts, setting, seed) for seed in seeds]
    measured_E_K = [[measure(estimator, run) for run in runs] for estimator in estimators]
    values = [[[getattr(cell, name) for cell in row] for row in measured_E_K] for name in MEASURES]
    return Result(drawn, regime, rollouts, np.array(values))
