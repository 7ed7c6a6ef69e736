"""Features of texts, prior means predicted from them, and auto's forecasts: by hand, and as written out in Python.

Axes: P prompts, D features, K regressions.
"""

import math
import tracemalloc

import numpy as np
import pytest
from scipy.special import logit
from scipy.stats import betabinom

from openrlhf_dbb.estimators import build, text_prior
from openrlhf_dbb.estimators.auto import TEXT_DISCOUNTS_K, TEXT_WEIGHTS
from openrlhf_dbb.estimators.text_prior import BUCKETS, WIDTH, learned, predicted, text_features


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def padded(features_P_D):
    columns = np.zeros((len(features_P_D), WIDTH))
    columns[:, : np.shape(features_P_D)[1]] = features_P_D
    return columns


def begun(features_P_D):
    auto = build("auto")
    return auto, auto.initial_state(len(features_P_D)) | {"features": padded(features_P_D)}


def test_forecasts_and_regressions_after_a_visit_by_hand():
    auto, state = begun(np.zeros((2, 1)))  # two prompts that read alike
    state, _ = auto.observe(state, [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, np.nan, 1.0]])
    # By Beta(1, 1) three of four, in one order, have probability 1/20, three of three 1/4; by Beta(3, 3) 5/84 and 5/28.
    by_weight = [[1 / 80] * 4, [5 / 84 * 5 / 28] * 4]
    np.testing.assert_allclose(state["forecasts"], np.log(np.append(1 / 80, by_weight)))
    # 6 successes of 7, and ridge 0.1: the Newton step from logit 0 is (6 - 7/2) / (7/4 + 0.1)
    np.testing.assert_allclose(state["text_weights"].reshape(4, -1)[:, [0, -1]], [[0, 50 / 37]] * 4)
    # An update is a pass: each discount has kept itself of the counts.
    mean = sigmoid(50 / 37)
    kept = TEXT_DISCOUNTS_K[:, None]
    for chosen in range(1, 9):
        state["forecasts"] = np.where(np.arange(9) == chosen, 0.0, -50.0)
        weight = TEXT_WEIGHTS[(chosen - 1) // 4]
        at = (chosen - 1) % 4
        alpha, beta = auto.predictive(state)
        np.testing.assert_allclose(alpha, weight * mean + kept[at] * [3, 3])
        np.testing.assert_allclose(beta, weight * (1 - mean) + kept[at] * [1, 0])


def test_the_forecast_without_the_text_has_a_head_start():
    auto, state = begun([[0.0], [1.0]])
    state, _ = auto.observe(state, [[1.0, 1.0], [0.0, 0.0]])
    state["forecasts"] = np.array([0.0, *[0.9] * 8])
    alone = auto.predictive(
        {field: values for field, values in state.items() if field != "features"}
    )
    np.testing.assert_array_equal(auto.predictive(state), alone)
    state["forecasts"][3] = 1.1
    assert (auto.predictive(state)[0] != alone[0]).all()


def test_counts_fade_to_the_prediction_where_a_prompt_does_not_come_back():
    auto, state = begun(np.zeros((2, 1)))
    auto.observe_at(state, np.array([0]), [[1.0, 1.0]])
    for _ in range(4):
        auto.observe_at(state, np.array([1]), [[1.0, 0.0]])
    state["forecasts"][3] = 1e3  # weight 2, discount 0.3
    alpha, beta = auto.predictive(state)
    mean = predicted(state["text_weights"].reshape(4, -1), state["features"])[2, 0]
    # The next update is the sixth, five after that of prompt 0; two make a pass.
    assert alpha[0] == pytest.approx(2 * mean + 2 * 0.3**2.5)
    assert beta[0] == pytest.approx(2 * (1 - mean))


KINDS = {  # text; step at which the policy begins to learn it, steps until it has, success before and after
    "Copy this number: {}": (10, 10, 0.6, 0.998),
    "What is the largest of {}, 27, 91, 45?": (0, 128, 0.3, 0.6),
    "What is {} + 38 + 71?": (70, 10, 0.2, 0.8),
    "What is {} * 8126?": (0, 1, 0.03, 0.03),
}


def score_of_next_visits(random, texts, p_T_P, rollouts):
    """Nats a group of auto's forecasts with the texts and without, (2,): 256 prompts in turn, 8 a step, four passes."""
    scores = np.zeros(2)
    auto = build("auto")
    states = [build("auto").initial_state(256) for _ in range(2)]
    states[0]["features"] = text_features(texts)
    order = np.concatenate([random.permutation(256) for _ in range(4)]).reshape(-1, 8)
    for step, drawn in enumerate(order):
        successes = random.binomial(rollouts, p_T_P[step, drawn])
        for at, state in enumerate(states):
            expected = [values[drawn] for values in auto.predictive(state)]
            scores[at] += betabinom.logpmf(successes, rollouts, *expected).sum() * (step >= 32)
            auto.observe_at(state, drawn, (np.arange(rollouts) < successes[:, None]).astype(float))
    return scores / 768


@pytest.mark.parametrize("rollouts", [1, 8])
def test_forecasts_gain_by_texts_that_tell_and_lose_nothing_by_others(rollouts):
    """A policy learns four kinds of prompts at different times; docs/estimators.md has more pools."""
    random = np.random.default_rng(3)
    start, length, before, after = np.repeat(np.array(list(KINDS.values())).T, 64, axis=1)
    learned_T_P = np.clip((np.arange(128)[:, None] - start) / length, 0, 1)
    logit_T_P = (
        logit(before) + learned_T_P * (logit(after) - logit(before)) + 0.7 * random.normal(size=256)
    )
    texts = [
        text.format(number)
        for text in KINDS
        for number in random.choice(np.arange(1000, 10000), 64, False)
    ]
    shuffled = [texts[at] for at in random.permutation(256)]
    with_texts, without = score_of_next_visits(
        np.random.default_rng(4), texts, sigmoid(logit_T_P), rollouts
    )
    assert with_texts > without + 0.1
    with_texts, without = score_of_next_visits(
        np.random.default_rng(4), shuffled, sigmoid(logit_T_P), rollouts
    )
    assert with_texts > without - 0.02


def converged(features_P_D, successes_P, rollouts):
    weights_K_W = np.zeros((1, WIDTH + 1))
    for _ in range(50):
        weights_K_W = learned(
            weights_K_W, features_P_D, successes_P[None], np.full((1, len(successes_P)), rollouts)
        )
        assert np.isfinite(weights_K_W).all()
    return weights_K_W


def test_the_weights_are_the_maximum_of_the_penalised_likelihood():
    rng = np.random.default_rng(1)
    features = rng.normal(5, 3, (200, WIDTH))
    successes = (
        (rng.random((200, 4)) < sigmoid(0.5 * (features[:, :1] - 5))).sum(axis=1).astype(float)
    )
    spread = features.std(axis=0)
    scale = np.maximum(spread, np.sqrt((spread**2).mean()))
    z = (features - features.mean(axis=0)) / scale
    [[*weights, last]] = converged(features, successes, 4.0)
    logits = features @ weights + last
    slopes = weights * scale
    constant = logits.mean()
    left = successes - 4 * sigmoid(logits)
    np.testing.assert_allclose(z.T @ left, 0.1 * WIDTH * slopes, atol=1e-7)  # ridge 0.1
    assert left.sum() == pytest.approx(0.1 * constant, abs=1e-7)


@pytest.mark.parametrize(
    "features_P_D",
    [
        np.arange(40.0)[:, None],  # the first half fails, the second succeeds: separable
        np.ones((40, WIDTH)),
        1e6 + np.arange(40.0)[:, None] ** np.arange(1, 4),
    ],
    ids=["separable", "constant", "large"],
)
def test_the_predicted_mean_stays_between_0_005_and_0_995(features_P_D, monkeypatch):
    monkeypatch.setattr(text_prior, "RIDGE", 1e-6)
    features_P_D = padded(features_P_D)
    for success_P in (np.arange(40) >= 20, np.zeros(40), np.ones(40)):
        found = predicted(converged(features_P_D, 8.0 * success_P, 8.0), features_P_D)
        assert found.min() >= 0.005 and found.max() <= 0.995
    np.testing.assert_allclose(found, 0.995, atol=1e-6)


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


TEXTS = [
    "740-1=",
    "",
    "½ + ٣",
    "Wie groß ist x, wenn x² = 4?",
    "\ud800",
    "問題",
    "a" * 5000,
    "two words\n",
]


def test_each_row_of_features_is_what_the_documentation_says():
    np.testing.assert_allclose(text_features(TEXTS), [plain(text) for text in TEXTS], rtol=1e-12)


def test_a_row_of_features_depends_on_its_text_alone():
    texts = [f"{i} + {i % 7} =" for i in range(2500)]  # more than are taken at a time
    np.testing.assert_array_equal(text_features(texts)[2100:2103], text_features(texts[2100:2103]))
    np.testing.assert_array_equal(text_features(texts[::-1])[::-1], text_features(texts))


def test_the_features_of_long_texts_take_little_memory_and_are_those_of_their_parts(monkeypatch):
    texts = ["12 + \u6f22 = ?" * 60_000, "x", "y" * 500_000]
    tracemalloc.start()
    features = text_features(texts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # 1.3 MB of texts
    monkeypatch.setattr("openrlhf_dbb.estimators.text_prior.PART", 100_003)
    np.testing.assert_array_equal(text_features(texts), features)
