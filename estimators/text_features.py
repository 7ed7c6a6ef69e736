"""Features of prompts that need their texts alone: no model, no data set, no randomness.

Axes: P prompts, D features, B buckets; C bytes of some texts together.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKETS = 128
WIDTH = BUCKETS + 1  # D of the text features

_LONGEST = 3  # bytes of an n-gram
_BEGIN, _END = b"\x02", b"\x03"
# How long a number is tells more of its difficulty than which digits it has.
_DIGITS_ALIKE = bytes.maketrans(b"0123456789", b"0000000000")
_CHUNK = 1024  # texts at a time, for the memory


def text_features(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return signed hashes of the n-grams of 1 to 3 bytes of each text, and the logarithm of its length.

    Each n-gram of the UTF-8 text between a begin and an end mark, with 0 in place of every digit, adds 1 or -1 to one
    of 128 buckets; a fixed hash gives both. A text's buckets are then scaled to the norm 1. The last column is
    log(1 + bytes).

    Source: feature hashing, arXiv:0902.2206; the mixing of the bits is that of SplitMix64.
    """
    parts = [_features(texts[start : start + _CHUNK]) for start in range(0, len(texts), _CHUNK)]
    return np.concatenate([np.empty((0, WIDTH)), *parts])


def _features(texts: Sequence[str]) -> NDArray[np.float64]:
    encoded = [_BEGIN + text.encode("utf-8", "surrogatepass").translate(_DIGITS_ALIKE) + _END for text in texts]
    sizes = np.array([len(text) for text in encoded])
    bytes_C = np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.uint64)
    text_C = np.repeat(np.arange(len(texts)), sizes)
    counted = np.zeros(len(texts) * BUCKETS)
    for n in range(1, _LONGEST + 1):
        count = max(len(bytes_C) - n + 1, 0)
        gram = np.full(count, n, dtype=np.uint64)
        for j in range(n):
            gram = gram * np.uint64(256) + bytes_C[j : j + count]
        whole = text_C[:count] == text_C[n - 1 : n - 1 + count]
        hashed = _mixed(gram[whole])
        place = text_C[:count][whole] * BUCKETS + (hashed % np.uint64(BUCKETS)).astype(np.int64)
        sign = 1.0 - 2.0 * (hashed >> np.uint64(63))
        counted += np.bincount(place, sign, len(counted))
    buckets = counted.reshape(-1, BUCKETS)
    norm = np.linalg.norm(buckets, axis=1, keepdims=True)
    return np.column_stack([buckets / np.maximum(norm, 1), np.log(sizes - 1)])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
