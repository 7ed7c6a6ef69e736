"""A prior mean predicted from features, against numbers computed by hand and the conditions of its regression.

Axes: P prompts, D features.
"""

import numpy as np
import pytest

from openrlhf_dbb.estimators import build, predicted_prior
from openrlhf_dbb.estimators.text_features import WIDTH

ALIKE = np.zeros((2, 1))  # two prompts whose features do not differ


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def predicted(**parameters):
    return build("predicted_prior", **({"updates_per_epoch": 2.0} | parameters))


def begun(estimator, features_P_D):
    """The initial state with some features, the rest of the columns 0."""
    padded = np.zeros((len(features_P_D), WIDTH))
    padded[:, : np.shape(features_P_D)[1]] = features_P_D
    return estimator.initial_state(len(padded)) | {"features": padded}


def means(estimator, state):
    """m of each prompt."""
    alpha, _ = estimator.predictive(state)
    kept = estimator.discount ** ((state["updates"] + 1 - state["seen_at"]) / estimator.updates_per_epoch)
    return (alpha - kept * state["successes"]) / estimator.prior_weight


def test_two_visits_by_hand():
    prior = predicted(prior_weight=2.0, discount=0.25)
    state, first = prior.observe(begun(prior, ALIKE), [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, np.nan, 1.0]])
    # m = 1/2: alpha, beta = 1 + 3, 1 + 1 and 1 + 3, 1
    assert (state["alpha"].tolist(), state["beta"].tolist()) == ([4, 4], [2, 1])
    np.testing.assert_allclose(first.mean, [4 / 6, 4 / 5])
    np.testing.assert_allclose(first.variance, [8 / 36, 4 / 25])
    constant = state["weights"][-1]
    assert not state["weights"][:-1].any()
    # 6 successes of 7, and ridge 1: the logit c solves 6 - 7 sigmoid(c) = c
    assert 6 - 7 * sigmoid(constant) == pytest.approx(constant, abs=1e-3)
    mean = sigmoid(constant)
    state, second = prior.observe(state, [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    # one update of the two of an epoch: counts fade by 0.25 ** (1 / 2)
    np.testing.assert_allclose(state["alpha"], [2 * mean + 1.5, 2 * mean + 1.5 + 3])
    np.testing.assert_allclose(state["beta"], [2 * (1 - mean) + 0.5 + 4, 2 * (1 - mean) + 1])
    np.testing.assert_allclose(second.mean, state["alpha"] / (state["alpha"] + state["beta"]))


def test_counts_fade_to_the_prediction_where_a_prompt_does_not_come_back():
    prior = predicted(discount=0.5, updates_per_epoch=2.0)
    state = begun(prior, ALIKE)
    prior.observe_at(state, np.array([0]), [[1.0, 1.0]])
    for _ in range(4):
        prior.observe_at(state, np.array([1]), [[1.0, 0.0]])
    alpha, beta = prior.predictive(state)
    mean = sigmoid(state["weights"][-1])
    # The next update is the sixth, five after that of prompt 0.
    assert alpha[0] == pytest.approx(2 * mean + 2 * 0.5**2.5)
    assert beta[0] == pytest.approx(2 * (1 - mean))


def test_late_groups_count_as_of_the_update_that_generated_them_in_any_order():
    prior = predicted(discount=0.5, updates_per_epoch=1.0)
    for groups in (([1.0, 1.0], 0.5), ([0.0, 1.0], 2.0)), (([0.0, 1.0], 2.0), ([1.0, 1.0], 0.5)):
        state = begun(prior, ALIKE[:1]) | {"updates": np.array([2.0])}
        for now, (rewards, generated_at) in enumerate(groups, start=3):
            state, _ = prior.observe(state, [rewards], [now - generated_at])
        # As of update 2: 2 * 0.5 ** 1.5 + 1 successes, 1 failure.
        found = [state[field][0] for field in ("successes", "failures", "seen_at")]
        np.testing.assert_allclose(found, [2 * 0.5**1.5 + 1, 1, 2])


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
    prior = predicted(discount=1.0)
    state = converged(prior, begun(prior, features), rewards_P_G)
    z = (features - features.mean(axis=0)) / features.std(axis=0)
    logit = features @ state["weights"][:-1] + state["weights"][-1]
    slopes, constant = state["weights"][:-1] * features.std(axis=0), logit.mean()
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
    prior = predicted(discount=1.0)
    state = begun(prior, features_P_D)
    for _ in range(20):
        state, estimate = prior.observe(state, np.repeat(success_P[:, None], 8, axis=1).astype(float))
        assert np.isfinite(state["weights"]).all()
        assert ((estimate.mean > 0) & (estimate.mean < 1)).all()
    found = means(prior, state)
    assert found.min() >= 0.02 - 1e-6 and found.max() <= 0.98 + 1e-6
    if rewards != "halves":
        np.testing.assert_allclose(found, 0.98 if rewards == "all 1" else 0.02, atol=1e-6)
