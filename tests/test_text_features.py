"""Features of texts, against the same written out in plain Python."""

import math

import numpy as np

from openrlhf_dbb.estimators.text_prior import BUCKETS, WIDTH, text_features

MASK = 2**64 - 1


def mixed(value):
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def plain(text):
    alike = "".join("0" if character in "123456789" else character for character in text)
    encoded = b"\x02" + alike.encode("utf-8", "surrogatepass") + b"\x03"
    buckets = [0.0] * BUCKETS
    for n in (1, 2, 3):
        for start in range(len(encoded) - n + 1):
            hashed = mixed(int.from_bytes(bytes([n]) + encoded[start : start + n], "big"))
            buckets[hashed % BUCKETS] += -1 if hashed >> 63 else 1
    norm = max(math.sqrt(sum(value**2 for value in buckets)), 1)
    return [value / norm for value in buckets] + [math.log(len(encoded) - 1)]


TEXTS = ["740-1=", "", "½ + ٣", "Wie groß ist x, wenn x² = 4?", "\ud800", "問題", "a" * 5000, "two words\n"]


def test_each_row_is_what_the_documentation_says():
    assert text_features([]).shape == (0, WIDTH)
    found = text_features(TEXTS)
    assert found.shape == (len(TEXTS), WIDTH) and found.dtype == np.float64
    np.testing.assert_allclose(found, [plain(text) for text in TEXTS], rtol=1e-12)


def test_a_row_depends_on_its_text_alone():
    texts = [f"{i} + {i % 7} =" for i in range(2500)]  # more than are taken at a time
    np.testing.assert_array_equal(text_features(texts)[2100:2103], text_features(texts[2100:2103]))
    np.testing.assert_array_equal(text_features(texts[::-1])[::-1], text_features(texts))
