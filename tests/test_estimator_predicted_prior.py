"""A prior mean predicted from features, against numbers computed by hand and the conditions of its regression.

Axes: P prompts, D features.
"""

import numpy as np
import pytest
from scipy.special import betaln

from openrlhf_dbb.estimators import build, predicted_prior
from openrlhf_dbb.estimators.predicted_prior import DISCOUNTS_K
from openrlhf_dbb.estimators.text_features import WIDTH

ALIKE = np.zeros((2, 1))  # two prompts whose features do not differ


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def begun(features_P_D):
    """The estimator, and its initial state with some features, the rest of the columns 0."""
    padded = np.zeros((len(features_P_D), WIDTH))
    padded[:, : np.shape(features_P_D)[1]] = features_P_D
    prior = build("predicted_prior")
    return prior, prior.initial_state(len(padded)) | {"features": padded}


def means(estimator, state):
    """m of each prompt by the chosen discount: the forecast without the prompt's own counts."""
    own = [field for field in state if field.startswith(("successes", "failures"))]
    return estimator.predictive(state | {field: 0 * state[field] for field in own})[0] / 2


def test_two_visits_by_hand():
    prior, state = begun(ALIKE)
    state, first = prior.observe(state, [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, np.nan, 1.0]])
    # m = 1/2: alpha, beta = 1 + 3, 1 + 1 and 1 + 3, 1
    assert (state["alpha"].tolist(), state["beta"].tolist()) == ([4, 4], [2, 1])
    np.testing.assert_allclose(first.mean, [4 / 6, 4 / 5])
    np.testing.assert_allclose(first.variance, [8 / 36, 4 / 25])
    # By Beta(1, 1) three of four, in one order, have probability 1/20, three of three 1/4.
    np.testing.assert_allclose(state["evidence"], np.log(1 / 80))
    # 6 successes of 7, and ridge 1: the Newton step from logit 0 is (6 - 7/2) / (7/4 + 1)
    np.testing.assert_allclose(state["weights"].reshape(5, -1)[:, [0, -1]], [[0, 10 / 11]] * 5)
    mean, kept = sigmoid(10 / 11), DISCOUNTS_K[:, None]  # an update is a pass
    state, second = prior.observe(state, [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    np.testing.assert_allclose(state["alpha"], [2 * mean + 0.005 * 3, 2 * mean + 0.005 * 3 + 3])
    np.testing.assert_allclose(state["beta"], [2 * (1 - mean) + 0.005 + 4, 2 * (1 - mean) + 1])
    np.testing.assert_allclose(second.mean, state["alpha"] / (state["alpha"] + state["beta"]))
    alpha, beta = 2 * mean + kept * [3, 3], 2 * (1 - mean) + kept * [1, 0]
    scores = betaln(alpha + np.array([0, 3]), beta + np.array([4, 1])) - betaln(alpha, beta)
    np.testing.assert_allclose(state["evidence"], 0.5 ** (1 / 0.7) * np.log(1 / 80) + scores.sum(axis=1))
    assert state["discount"] == DISCOUNTS_K[state["evidence"].argmax()]


@pytest.mark.parametrize(("then", "discount"), [(2, 0.85), (8, 0.005)], ids=["stands still", "jumps"])
def test_the_discount_is_slow_for_a_policy_that_stands_still_and_fast_after_a_jump(then, discount):
    prior, state = begun(np.zeros((64, 1)))
    for update in range(48):  # 32 are a pass; the policy jumps in the second one
        successes = then if update >= 40 else 2
        prior.observe_at(state, 2 * update % 64 + np.arange(2), [[1.0] * successes + [0.0] * (8 - successes)] * 2)
    assert state["discount"] == discount


def test_counts_fade_to_the_prediction_where_a_prompt_does_not_come_back():
    prior, state = begun(ALIKE)
    prior.observe_at(state, np.array([0]), [[1.0, 1.0]])
    for _ in range(4):
        prior.observe_at(state, np.array([1]), [[1.0, 0.0]])
    alpha, beta = prior.predictive(state)
    mean = means(prior, state)
    # The next update is the sixth, five after that of prompt 0; two make a pass.
    assert alpha[0] == pytest.approx(2 * mean[0] + 2 * state["discount"][0] ** 2.5)
    assert beta[0] == pytest.approx(2 * (1 - mean[0]))


def test_late_groups_count_as_of_the_update_that_generated_them_in_any_order():
    for groups in (([1.0, 1.0], 0.5), ([0.0, 1.0], 2.0)), (([0.0, 1.0], 2.0), ([1.0, 1.0], 0.5)):
        prior, state = begun(ALIKE[:1])
        state |= {"clock": np.array([2.0, 2.0]), "prompts": np.ones(1)}
        for now, (rewards, generated_at) in enumerate(groups, start=3):
            state, _ = prior.observe(state, [rewards], [now - generated_at])
        # As of update 2, by discount 0.3: 2 * 0.3 ** 1.5 + 1 successes, 1 failure.
        found = [state[field][0] for field in ("successes_2", "failures_2", "seen_at")]
        np.testing.assert_allclose(found, [2 * 0.3**1.5 + 1, 1, 2])


def converged(estimator, state, rewards_P_G):
    """The state after one update, with weights that further steps of the regression would not change."""
    state, _ = estimator.observe(state, rewards_P_G)
    for _ in range(50):
        state |= estimator.learn(state)
    return state


def test_the_weights_are_the_maximum_of_the_penalised_likelihood():
    rng = np.random.default_rng(1)
    features = rng.normal(5, 3, (200, WIDTH))
    rewards_P_G = (rng.random((200, 4)) < sigmoid(0.5 * (features[:, :1] - 5))).astype(float)
    state = converged(*begun(features), rewards_P_G)
    z = (features - features.mean(axis=0)) / features.std(axis=0)
    *weights, last = state["weights"].reshape(5, -1)[2]
    logit = features @ weights + last
    slopes, constant = weights * features.std(axis=0), logit.mean()
    left = rewards_P_G.sum(axis=1) - 4 * sigmoid(logit)
    np.testing.assert_allclose(z.T @ left, WIDTH * slopes, atol=1e-7)  # ridge 1
    assert left.sum() == pytest.approx(constant, abs=1e-7)


@pytest.mark.parametrize(
    "features_P_D",
    [
        np.arange(40.0)[:, None],  # the first half fails, the second succeeds: separable
        np.ones((40, WIDTH)),
        1e6 + np.arange(40.0)[:, None] ** np.arange(1, 4),
    ],
    ids=["separable", "constant", "large"],
)
@pytest.mark.parametrize("rewards", ["halves", "all 0", "all 1"])
def test_it_stays_finite_and_clipped(features_P_D, rewards, monkeypatch):
    success_P = {"halves": np.arange(40) >= 20, "all 0": np.zeros(40), "all 1": np.ones(40)}[rewards]
    monkeypatch.setattr(predicted_prior, "RIDGE", 1e-6)
    prior, state = begun(features_P_D)
    for _ in range(20):
        state, estimate = prior.observe(state, np.repeat(success_P[:, None], 8, axis=1).astype(float))
        assert np.isfinite(state["weights"]).all()
        assert ((estimate.mean > 0) & (estimate.mean < 1)).all()
    found = means(prior, state)
    assert found.min() >= 0.02 - 1e-6 and found.max() <= 0.98 + 1e-6
    if rewards != "halves":
        np.testing.assert_allclose(found, 0.98 if rewards == "all 1" else 0.02, atol=1e-6)
