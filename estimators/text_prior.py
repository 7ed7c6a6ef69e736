"""Features of prompts from their texts, prior means that a regression predicts from them; scores.

Axes: K regressions, P prompts, D features, W = D + 1 weights, S prompts with counts, C forecasts,
B bytes of texts.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import Floats

BUCKETS = 128
WIDTH = BUCKETS + 1  # D of the text features

_BEGIN = b"\x02"
_END = b"\x03"
# How long a number is tells more of its difficulty than which digits it has.
_DIGITS_ALIKE = bytes.maketrans(b"0123456789", b"0000000000")
_CHUNK = 1024  # texts at a time, for the memory
PART = 2**18  # bytes of them at a time, since one text may have megabytes
# 1 / variance that the logits between prompts are expected to have, however many features there are
RIDGE = 0.1
_HALVINGS = 20  # of a Newton step that overshoots


def text_features(texts: Sequence[str]) -> Floats:
    """Return the features of each text, (P, 129): signed hashes of its n-grams, and its length.

    Each n-gram of 1 to 3 bytes of the UTF-8 text between a begin and an end mark, with 0 in place
    of every digit, adds 1 or -1 to one of 128 buckets; a fixed hash gives both. A text's buckets
    are then scaled to the norm 1. The last column is log(1 + bytes).

    Source: feature hashing, arXiv:0902.2206; the mixing of the bits is that of SplitMix64.
    """
    parts = [np.empty((0, WIDTH))]
    for start in range(0, len(texts), _CHUNK):
        parts.append(_features(texts[start : start + _CHUNK]))
    return np.concatenate(parts)


def _features(texts: Sequence[str]) -> Floats:
    encoded = []
    for text in texts:
        content = text.encode("utf-8", "surrogatepass").translate(_DIGITS_ALIKE)
        encoded.append(_BEGIN + content + _END)
    sizes = np.array([len(content) for content in encoded])
    joined_B = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    text_B = np.repeat(np.arange(len(texts), dtype=np.int32), sizes)
    sums = np.zeros(len(texts) * BUCKETS)
    for start in range(0, len(joined_B), PART):
        end = start + PART + 2  # the longest n-gram that begins in this part has two bytes more
        _add_grams(joined_B[start:end].astype(np.uint64), text_B[start:end], sums)
    buckets = sums.reshape(-1, BUCKETS)
    norm = np.linalg.norm(buckets, axis=1, keepdims=True)
    return np.column_stack([buckets / np.maximum(norm, 1), np.log(sizes - 1)])


def _add_grams(bytes_B: NDArray[np.uint64], text_B: NDArray[np.int32], sums: Floats) -> None:
    """Add the signs of the n-grams of the first ``PART`` bytes to the buckets of their texts."""
    for n in (1, 2, 3):
        count = min(max(len(bytes_B) - n + 1, 0), PART)
        gram = np.full(count, n, dtype=np.uint64)
        for j in range(n):
            gram = gram * np.uint64(256) + bytes_B[j : j + count]
        first = text_B[:count]
        last = text_B[n - 1 : n - 1 + count]
        whole = first == last  # an n-gram does not go from one text into the next
        hashed = _mixed(gram[whole])
        bucket = (hashed % np.uint64(BUCKETS)).astype(np.int64)
        sign = 1.0 - 2.0 * (hashed >> np.uint64(63))
        sums += np.bincount(first[whole] * BUCKETS + bucket, sign, len(sums))


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number: SplitMix64's mixing."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def predicted(weights_K_W: Floats, features_P_D: Floats) -> Floats:
    """Return the mean that each regression predicts, (K, P), in [0.005, 0.995].

    The last weight is the constant.
    """
    slopes_K_D = weights_K_W[:, :-1]
    constants_K_1 = weights_K_W[:, -1:]
    return np.clip(_sigmoid(slopes_K_D @ features_P_D.T + constants_K_1), 0.005, 0.995)


def learned(
    weights_K_W: Floats,
    features_S_D: Floats,
    successes_K_S: Floats,
    rollouts_K_S: Floats,
) -> Floats:
    """Return the weights, (K, W), after one Newton step of a ridge logistic regression.

    It is a regression of the counts. With z_i the features minus their means, divided by their
    deviations over these prompts or by the root mean square of all deviations where that is larger,
    and D the number of features that vary, it maximises ::

        sum_i A_i log m_i + B_i log(1 - m_i) - RIDGE/2 (c^2 + D |v|^2)
        logit m_i = c + v . z_i

    Source: our own; Newton's step as in Bishop, Pattern Recognition and Machine Learning, section
    4.3.3.
    """
    center = features_S_D.mean(axis=0)
    spread = features_S_D.std(axis=0)
    varies = spread > 1e-12 * np.abs(center)  # rounding gives a constant column a spread, too
    # A column that hardly varies here tells nothing of a prompt that differs in it: it stays small.
    typical = np.sqrt(np.mean(spread[varies] ** 2)) if varies.any() else 1.0
    scale = np.maximum(spread, typical)
    z_S_D = np.where(varies, (features_S_D - center) / scale, 0.0)
    x_S_W = np.column_stack([z_S_D, np.ones(len(features_S_D))])
    penalty = np.full(len(scale) + 1, RIDGE)
    penalty[:-1] *= max(varies.sum(), 1.0)
    slopes_K_D = weights_K_W[:, :-1]
    constants_K = weights_K_W[:, -1] + slopes_K_D @ center
    start_K_W = np.column_stack([np.where(varies, slopes_K_D * scale, 0.0), constants_K])
    fitted_K_W = np.empty_like(start_K_W)
    for k, start in enumerate(start_K_W):
        fitted_K_W[k] = _newton_step(x_S_W, start, successes_K_S[k], rollouts_K_S[k], penalty)
    slopes_K_D = fitted_K_W[:, :-1] / scale
    return np.column_stack([slopes_K_D, fitted_K_W[:, -1] - slopes_K_D @ center])


def log_score(
    alpha_C_P: Floats,
    beta_C_P: Floats,
    successes: Floats,
    rollouts: Floats,
) -> Floats:
    """Return the beta-binomial log-probability by each forecast, (C, P).

    It is without the coefficient that all forecasts have in common.
    """
    of_successes = _log_rising(alpha_C_P, successes)
    of_failures = _log_rising(beta_C_P, rollouts - successes)
    return of_successes + of_failures - _log_rising(alpha_C_P + beta_C_P, rollouts)


def _log_rising(start_C_P: Floats, factors: Floats) -> Floats:
    """Return log(start (start + 1) ...), a product of ``factors`` factors."""
    total_C_P = np.zeros(start_C_P.shape)
    most = int(np.ceil(factors.max(initial=0)))
    for factor in range(most):
        total_C_P += np.where(factor < factors, np.log(start_C_P + factor), 0.0)
    return total_C_P


def _newton_step(
    x_S_W: Floats,
    weights: Floats,
    successes: Floats,
    rollouts: Floats,
    penalty: Floats,
) -> Floats:
    """Return the weights, (W,), after a Newton step that is halved until it does not lose."""

    def log_posterior(weights: Floats) -> float:
        logit = x_S_W @ weights
        likelihood = successes @ logit - rollouts @ np.logaddexp(0, logit)
        return float(likelihood - 0.5 * penalty @ weights**2)

    mean = _sigmoid(x_S_W @ weights)
    before = log_posterior(weights)
    gradient = x_S_W.T @ (successes - rollouts * mean) - penalty * weights
    curvature = (x_S_W.T * (rollouts * mean * (1 - mean))) @ x_S_W + np.diag(penalty)
    step = np.linalg.solve(curvature, gradient)
    for _ in range(_HALVINGS):
        nearer = weights + step
        if log_posterior(nearer) >= before - 1e-9 * abs(before):  # rounding
            return nearer
        step = 0.5 * step
    return weights


def _sigmoid(logit: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * logit)
