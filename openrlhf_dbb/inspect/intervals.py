"""Credible intervals of Beta posteriors with numpy alone: the installed command does not need scipy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_HALVINGS = 22
_TERMS = 400
_TINY = 1e-300


def beta_interval(alpha: Floats, beta: Floats, level: float = 0.9) -> tuple[Floats, Floats]:
    """The central credible interval of Beta(alpha, beta).

    Args:
        alpha, beta: (V,), > 0.
        level: probability inside, in (0, 1).

    Returns:
        Lower and upper bounds, (V,) each, to 2e-7.
    """
    pairs, inverse = np.unique(np.stack([alpha, beta], axis=1), axis=0, return_inverse=True)
    a, b = pairs.T
    inverse = inverse.reshape(-1)
    tail = (1 - level) / 2
    return _quantile(a, b, tail)[inverse], _quantile(a, b, 1 - tail)[inverse]


def _quantile(a: Floats, b: Floats, probability: float) -> Floats:
    low, high = np.zeros_like(a), np.ones_like(a)
    log_beta = np.array([math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y) for x, y in zip(a, b, strict=True)])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = _distribution(middle, a, b, log_beta) < probability
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.asarray((low + high) / 2)


def _distribution(x: Floats, a: Floats, b: Floats, log_beta: Floats) -> Floats:
    """P(X <= x) for X ~ Beta(a, b), 0 < x < 1."""
    # The continued fraction converges fast only left of the mean; right of it, 1 - P(1 - X < 1 - x).
    right = x > (a + 1) / (a + b + 2)
    x, a, b = np.where(right, 1 - x, x), np.where(right, b, a), np.where(right, a, b)
    front = np.exp(a * np.log(x) + b * np.log1p(-x) - log_beta) / a
    left_tail = front * _fraction(x, a, b)
    return np.where(right, 1 - left_tail, left_tail)


def _fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    """Continued fraction of the incomplete beta function, by Lentz's method.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22 and 3.10(ii).
    """
    c = np.ones_like(x)
    d = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d.copy()
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = value
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            value = value * c * d
        if np.all(np.abs(value - before) <= 1e-9 * np.abs(value)):
            break
    return value


def _nonzero(values: Floats) -> Floats:
    return np.where(np.abs(values) < _TINY, _TINY, values)
