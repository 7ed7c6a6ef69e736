"""Laws every registered estimator obeys. Axes: P prompts, G rollouts per prompt."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import estimators

NAMES = sorted(estimators.available())
VISITS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 8)),  # visits, prompts, rollouts
    elements=st.sampled_from([0.0, 1.0]),
)


def replay(estimator, visits_T_P_G):
    state = estimator.initial_state(visits_T_P_G.shape[1])
    estimates = []
    for rewards_P_G in visits_T_P_G:
        state, estimate = estimator.observe(state, rewards_P_G)
        estimates.append(estimate)
    return state, estimates


def same(first, second):
    return all(np.array_equal(first[field], second[field]) for field in first) and first.keys() == second.keys()


@pytest.mark.parametrize("name", NAMES)
@given(visits_T_P_G=VISITS)
@settings(max_examples=30, deadline=None)
def test_mean_is_within_the_rewards_and_variance_is_not_negative(name, visits_T_P_G):
    for estimate in replay(estimators.build(name), visits_T_P_G)[1]:
        assert np.all((estimate.mean >= 0) & (estimate.mean <= 1))
        assert np.all(estimate.variance >= 0)
        assert estimate.mean.shape == estimate.variance.shape == (visits_T_P_G.shape[1],)


@pytest.mark.parametrize("name", NAMES)
@given(visits_T_P_G=VISITS)
@settings(max_examples=30, deadline=None)
def test_a_batch_of_prompts_equals_one_by_one(name, visits_T_P_G):
    estimator = estimators.build(name)
    state, estimates = replay(estimator, visits_T_P_G)
    for p in range(visits_T_P_G.shape[1]):
        alone, alone_estimates = replay(estimator, visits_T_P_G[:, p : p + 1])
        assert same(alone, {field: values[p : p + 1] for field, values in state.items()})
        assert [e.mean[0] for e in alone_estimates] == [e.mean[p] for e in estimates]
        assert [e.variance[0] for e in alone_estimates] == [e.variance[p] for e in estimates]


@pytest.mark.parametrize("name", NAMES)
@given(visits_T_P_G=VISITS, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_order_of_rollouts_does_not_matter(name, visits_T_P_G, seed):
    estimator = estimators.build(name)
    order = np.random.default_rng(seed).permutation(visits_T_P_G.shape[2])
    state, estimates = replay(estimator, visits_T_P_G)
    other, other_estimates = replay(estimator, visits_T_P_G[:, :, order])
    assert same(state, other)
    np.testing.assert_allclose(estimates[-1].mean, other_estimates[-1].mean, rtol=1e-12)
    np.testing.assert_allclose(estimates[-1].variance, other_estimates[-1].variance, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(visits_T_P_G=VISITS)
@settings(max_examples=30, deadline=None)
def test_missing_rollouts_equal_a_smaller_group(name, visits_T_P_G):
    estimator = estimators.build(name)
    padded = np.concatenate([visits_T_P_G, np.full_like(visits_T_P_G, np.nan)], axis=2)
    state, estimates = replay(estimator, visits_T_P_G)
    other, other_estimates = replay(estimator, padded)
    assert same(state, other)
    np.testing.assert_allclose(estimates[-1].mean, other_estimates[-1].mean, rtol=1e-12)
    np.testing.assert_allclose(estimates[-1].variance, other_estimates[-1].variance, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(visits_T_P_G=VISITS)
@settings(max_examples=30, deadline=None)
def test_a_restored_state_continues_as_if_never_stopped(name, visits_T_P_G):
    estimator = estimators.build(name)
    state = estimator.initial_state(visits_T_P_G.shape[1])
    for rewards_P_G in visits_T_P_G:
        columns = [state[field].tobytes() for field in estimator.state_fields]  # what a store keeps
        state = {f: np.frombuffer(c) for f, c in zip(estimator.state_fields, columns, strict=True)}
        state, _ = pickle.loads(pickle.dumps(estimator)).observe(state, rewards_P_G)
    assert same(state, replay(estimator, visits_T_P_G)[0])


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name):
    estimator = estimators.build(name)
    rewards_P_G, state = np.array([[1.0, 0.0]]), estimator.initial_state(1)
    before = {field: values.copy() for field, values in state.items()}
    estimator.observe(state, rewards_P_G)
    assert same(state, before)
    assert rewards_P_G.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_without_any_reward_is_refused(name):
    estimator = estimators.build(name)
    with pytest.raises(ValueError, match=r"rewards\[1\] holds no reward"):
        estimator.observe(estimator.initial_state(2), [[1.0, 0.0], [np.nan, np.nan]])


@pytest.mark.parametrize("name", NAMES)
def test_infinite_rewards_are_refused(name):
    estimator = estimators.build(name)
    with pytest.raises(estimators.RewardSupportError, match=r"rewards\[0, 1\] = inf"):
        estimator.observe(estimator.initial_state(1), [[1.0, np.inf]])
