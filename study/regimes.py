"""Named ways in which success probabilities may change between visits, for simulation.

Axes: P prompts, T visits. A visit is one epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from estimators.base import Floats

_EDGE = 1e-6  # keeps logits finite


@dataclass(frozen=True)
class Regime:
    """A named family of success-probability paths.

    Attributes:
        name: as on the command line.
        description: one line.
        paths: function (rng, prompts, visits) -> p_P_T, success probability of every prompt at every visit.
    """

    name: str
    description: str
    paths: Callable[[np.random.Generator, int, int], Floats]


REGIMES: dict[str, Regime] = {}


def get(name: str) -> Regime:
    """The regime called ``name``.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name not in REGIMES:
        raise ValueError(f"unknown regime {name!r}; known: {', '.join(REGIMES)}")
    return REGIMES[name]


def _add(name: str, description: str, paths: Callable[[np.random.Generator, int, int], Floats]) -> None:
    REGIMES[name] = Regime(name, description, paths)


def _walk(
    start: tuple[float, float], moves: Callable[[int], tuple[float, float]]
) -> Callable[[np.random.Generator, int, int], Floats]:
    """Starts ~ Beta(start); before visit t (from 1) every logit moves by Normal(mean, sd) = moves(t)."""

    def paths(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
        logits = [_logit(rng.beta(*start, size=prompts))]
        for visit in range(1, visits):
            logits.append(logits[-1] + rng.normal(*moves(visit), size=prompts))
        return _sigmoid(np.stack(logits, axis=1))

    return paths


def _constant(mean: float, deviation: float) -> Callable[[int], tuple[float, float]]:
    return lambda visit: (mean, deviation)


def _one_after_another(moves: Sequence[tuple[float, float]]) -> Callable[[int], tuple[float, float]]:
    return lambda visit: moves[min(visit, len(moves)) - 1]


def _jumps(start: tuple[float, float], chance: float) -> Callable[[np.random.Generator, int, int], Floats]:
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
    slow = REGIMES["stationary-U"].paths(rng, prompts - prompts // 2, visits)
    fast = REGIMES["very-fast"].paths(rng, prompts // 2, visits)
    return np.concatenate([slow, fast])


def _oscillating(rng: np.random.Generator, prompts: int, visits: int) -> Floats:
    centre = _logit(rng.beta(0.5, 0.5, size=prompts))
    swing = rng.choice([-1.0, 1.0], size=prompts)[:, None] * np.where(np.arange(visits) % 2, 1.0, -1.0)
    return _sigmoid(centre[:, None] + swing)


def _logit(p: Floats) -> Floats:
    p = np.clip(p, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(p / (1 - p)))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))


# Ten that resemble training runs.
_add("stationary-U", "nothing moves; U-shaped Beta(0.3, 0.3)", _walk((0.3, 0.3), _constant(0, 0)))
_add("stationary-flat", "nothing moves; uniform", _walk((1, 1), _constant(0, 0)))
_add("paper-walk", "Beta(0.3, 0.3), logits walk, sd 0.9", _walk((0.3, 0.3), _constant(0, 0.9)))
_add("paper-drift", "Beta(0.25, 0.75), logits drift +0.6, sd 0.3", _walk((0.25, 0.75), _constant(0.6, 0.3)))
_add("slow-drift", "Beta(1, 3), logits drift +0.3, sd 0.3", _walk((1, 3), _constant(0.3, 0.3)))
_add("fast-drift", "Beta(1, 3), logits drift +1, sd 0.5", _walk((1, 3), _constant(1.0, 0.5)))
_add("fast-walk", "Beta(0.5, 2), logits walk, sd 1.5", _walk((0.5, 2), _constant(0, 1.5)))
_add(
    "decelerating",
    "Beta(0.5, 2), logits move by 2, 0.4, then 0.1 a visit: most is learnt in the first epoch",
    _walk((0.5, 2), _one_after_another([(2.0, 0.5), (0.4, 0.1), (0.1, 0.1)])),
)
_add("jumps", "Beta(0.5, 0.5), one prompt in ten starts anew at each visit", _jumps((0.5, 0.5), 0.1))
_add("very-fast", "Beta(0.5, 2), logits drift +1.5, sd 0.5", _walk((0.5, 2), _constant(1.5, 0.5)))

# Seven meant to be hard for an estimator whose prior and discount are shared by all prompts.
_add(
    "declining",
    "Beta(0.75, 0.25), logits drift -0.8, sd 0.3: the policy forgets",
    _walk((0.75, 0.25), _constant(-0.8, 0.3)),
)
_add("grokking", "hard prompts, each solved suddenly at a random visit", _grokking)
_add("two-speeds", "half of the prompts as stationary-U, half as very-fast", _two_speeds)
_add(
    "late-change",
    "stationary-U up to the third visit, then logits drift +1.5 a visit",
    _walk((0.3, 0.3), _one_after_another([(0, 0), (0, 0), (1.5, 0.3)])),
)
_add("oscillating", "logits swing by 2 from visit to visit: the past misleads", _oscillating)
_add("alike", "Beta(20, 20), nothing moves: all prompts are about equally hard", _walk((20, 20), _constant(0, 0)))
_add("hard", "Beta(0.1, 2), logits drift +0.3, sd 0.3: most groups are all wrong", _walk((0.1, 2), _constant(0.3, 0.3)))
