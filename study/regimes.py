"""Named ways in which success probabilities change between visits, for simulation.

Axes: P prompts, T visits. A visit is one epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from openrlhf_dbb.estimators.base import Floats

_EDGE = 1e-6  # keeps logits finite

Paths = Callable[[np.random.Generator, int, int], Floats]
"""Function (rng, prompts, visits) -> p_P_T, the success probability of every prompt at every visit."""


def _walk(start: tuple[float, float], moves: Callable[[int], tuple[float, float]]) -> Paths:
    """Starts ~ Beta(start); before visit t (from 1) every logit moves by Normal(mean, sd) = moves(t)."""

    def paths(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
        logits = [_logit(rng.beta(*start, size=prompts))]
        for visit in range(1, visits):
            logits.append(logits[-1] + rng.normal(*moves(visit), size=prompts))
        return _sigmoid(np.stack(logits, axis=1))

    return paths


def _constant(mean: float, deviation: float) -> Callable[[int], tuple[float, float]]:
    return lambda visit: (mean, deviation)


def _one_after_another(
    moves: Sequence[tuple[float, float]],
) -> Callable[[int], tuple[float, float]]:
    return lambda visit: moves[min(visit, len(moves)) - 1]


def _jumps(start: tuple[float, float], chance: float) -> Paths:
    """Before each visit a prompt gets a new probability from Beta(start) with probability ``chance``."""

    def paths(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
        p_P_T = rng.beta(*start, size=(prompts, visits))
        stays = rng.random((prompts, visits)) >= chance
        for visit in range(1, visits):
            p_P_T[:, visit] = np.where(stays[:, visit], p_P_T[:, visit - 1], p_P_T[:, visit])
        return p_P_T

    return paths


def _grokking(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
    start = rng.beta(0.5, 4, size=prompts)
    solved_from = rng.integers(1, 2 * visits, size=prompts)
    solved = np.arange(visits) >= solved_from[:, None]
    return np.where(solved, rng.beta(20, 1, size=prompts)[:, None], start[:, None])


def _two_speeds(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
    slow = REGIMES["stationary-U"](rng, prompts - prompts // 2, visits)
    fast = REGIMES["very-fast"](rng, prompts // 2, visits)
    return np.concatenate([slow, fast])


def _oscillating(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
    centre = _logit(rng.beta(0.5, 0.5, size=prompts))
    swing = rng.choice([-1.0, 1.0], size=prompts)[:, None] * np.where(
        np.arange(visits) % 2, 1.0, -1.0
    )
    return _sigmoid(centre[:, None] + swing)


def _logit(p: Floats) -> Floats:
    p = np.clip(p, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(p / (1 - p)))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))


REGIMES: dict[str, Paths] = {
    # Ten that resemble training runs.
    "stationary-U": _walk((0.3, 0.3), _constant(0, 0)),
    "stationary-flat": _walk((1, 1), _constant(0, 0)),
    "paper-walk": _walk((0.3, 0.3), _constant(0, 0.9)),
    "paper-drift": _walk((0.25, 0.75), _constant(0.6, 0.3)),
    "slow-drift": _walk((1, 3), _constant(0.3, 0.3)),
    "fast-drift": _walk((1, 3), _constant(1.0, 0.5)),
    "fast-walk": _walk((0.5, 2), _constant(0, 1.5)),
    # Most is learnt in the first epoch.
    "decelerating": _walk((0.5, 2), _one_after_another([(2.0, 0.5), (0.4, 0.1), (0.1, 0.1)])),
    "jumps": _jumps((0.5, 0.5), 0.1),
    "very-fast": _walk((0.5, 2), _constant(1.5, 0.5)),
    # Seven that are hard for an estimator whose prior and discount are shared by all prompts.
    "declining": _walk((0.75, 0.25), _constant(-0.8, 0.3)),
    "grokking": _grokking,
    "two-speeds": _two_speeds,
    "late-change": _walk((0.3, 0.3), _one_after_another([(0, 0), (0, 0), (1.5, 0.3)])),
    "oscillating": _oscillating,
    "alike": _walk((20, 20), _constant(0, 0)),
    "hard": _walk((0.1, 2), _constant(0.3, 0.3)),
}
