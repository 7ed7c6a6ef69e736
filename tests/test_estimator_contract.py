"""Laws every registered estimator obeys. Axes: T visits, P prompts, G rollouts per prompt."""

import functools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from openrlhf_dbb import estimators
from openrlhf_dbb.estimators.text_prior import WIDTH

CASES = {name: estimators.build(name) for name in estimators.available()}
LOCAL = [case for case, estimator in CASES.items() if not estimator.shared_fields]

POSITIVE = (
    "auto",
    "dbb",
    "empirical_bayes",
    "gaussian",
    "laplace",
    "spo",
)  # their variance, of equal rewards too

every_case = pytest.mark.parametrize("case", CASES)
some_examples = settings(max_examples=30, deadline=None)


def visits_of(elements):
    """Rewards of 1 to 5 visits of 1 to 4 prompts, 2 to 8 rollouts each: rewards_T_P_G."""
    shape = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 8))
    return hnp.arrays(np.float64, shape, elements=elements)


BINARY = visits_of(st.sampled_from([0.0, 1.0]))
UNIT = visits_of(st.sampled_from([0.0, 0.25, 1.0]))
REAL = visits_of(st.floats(-1e3, 1e3))


def draw_visits(data, estimator):
    return data.draw({"binary": BINARY, "unit": UNIT, "real": REAL}[estimator.support])


def begin(estimator, prompts):
    """The initial state; if the estimator reads features, with some that differ between prompts."""
    if not estimator.reads_texts:
        return estimator.initial_state(prompts)
    features = np.random.default_rng(0).normal(3, 2, (prompts, WIDTH))
    return estimator.initial_state(prompts) | {"features": features}


def replay(estimator, visits_T_P_G, order=None):
    """State and estimates after some visits; ``order``: of the prompts, if it is not that of ``begin``."""
    state = begin(estimator, visits_T_P_G.shape[1])
    estimates = []
    if order is not None and "features" in state:
        state["features"] = state["features"][order]
    for rewards_P_G in visits_T_P_G:
        state, estimate = estimator.observe(state, rewards_P_G)
        estimates.append(estimate)
    return state, estimates


def assert_close(first, second, scale, rtol=1e-9, atol=1e-12):
    """States and estimates agree up to rounding; variances of rewards around ``scale`` are around its square."""
    first_state, first_estimates = first
    second_state, second_estimates = second
    assert first_state.keys() == second_state.keys()
    for field, values in first_state.items():
        np.testing.assert_allclose(values, second_state[field], rtol=rtol, atol=atol * scale**2)
    for one, other in zip(first_estimates, second_estimates, strict=True):
        np.testing.assert_allclose(one.mean, other.mean, rtol=rtol, atol=atol * scale)
        np.testing.assert_allclose(one.variance, other.variance, rtol=rtol, atol=atol * scale**2)


assert_same = functools.partial(assert_close, scale=1.0, rtol=0, atol=0)  # bit for bit


def scale_of(visits_T_P_G):
    return max(1.0, np.abs(visits_T_P_G).max())


def of_prompts(estimator, replayed, prompts):
    """What ``replay`` gave, for some of the prompts."""
    state, estimates = replayed
    own = (*estimator.state_fields, "features")
    state = {field: values[prompts] if field in own else values for field, values in state.items()}
    return state, [estimators.Estimate(e.mean[prompts], e.variance[prompts]) for e in estimates]


@every_case
@given(data=st.data())
@some_examples
def test_means_lie_within_the_rewards_and_variances_are_positive(case, data):
    estimator = CASES[case]
    visits_T_P_G = draw_visits(data, estimator)
    _, estimates = replay(estimator, visits_T_P_G)
    # Priors lie in [0, 1].
    slack = 1e-12 * scale_of(visits_T_P_G) if estimator.support == "real" else 0.0
    low = min(0.0, visits_T_P_G.min()) - slack
    high = max(1.0, visits_T_P_G.max()) + slack
    for estimate in estimates:
        assert estimate.mean.shape == estimate.variance.shape == (visits_T_P_G.shape[1],)
        assert np.all((estimate.mean >= low) & (estimate.mean <= high))
        assert np.all(estimate.variance >= 0)
        if case in POSITIVE:
            assert np.all(estimate.variance > 0)


@every_case
@given(data=st.data())
@some_examples
def test_a_state_is_finite_doubles_by_prompt_and_for_the_run(case, data):
    estimator = CASES[case]
    visits_T_P_G = draw_visits(data, estimator)
    state, _ = replay(estimator, visits_T_P_G)
    assert set(state) - {"features"} == {*estimator.state_fields, *estimator.shared_fields}
    for values in state.values():
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
    for field in estimator.state_fields:
        assert state[field].shape == (visits_T_P_G.shape[1],)
    for field in estimator.shared_fields:
        assert state[field].ndim == 1


@every_case
@given(data=st.data(), seed=st.integers(0, 99))
@some_examples
def test_neither_the_order_of_rollouts_nor_that_of_prompts_matters_and_a_missing_rollout_is_none(
    case, data, seed
):
    estimator = CASES[case]
    random = np.random.default_rng(seed)
    visits_T_P_G = draw_visits(data, estimator)
    scale = scale_of(visits_T_P_G)
    replayed = replay(estimator, visits_T_P_G)
    shuffled = visits_T_P_G[:, :, random.permutation(visits_T_P_G.shape[2])]
    assert_close(replayed, replay(estimator, shuffled), scale)
    padded = np.concatenate([visits_T_P_G, np.full_like(visits_T_P_G, np.nan)], axis=2)
    assert_close(replayed, replay(estimator, padded), scale)
    order = random.permutation(visits_T_P_G.shape[1])
    assert_close(
        of_prompts(estimator, replayed, order),
        replay(estimator, visits_T_P_G[:, order], order),
        scale,
    )


@pytest.mark.parametrize("case", [*POSITIVE, "ema", "point"])
def test_a_zero_variance_group_gives_an_advantage_by_a_prior_or_a_past_alone(case):
    estimator = CASES[case]
    rewards_P_G = np.array([[1.0] * 8, [0.0] * 8])
    _, estimate = estimator.observe(begin(estimator, 2), rewards_P_G)
    advantages_P_G = estimators.standardized(rewards_P_G, estimate)
    signs = [1, -1] if case in POSITIVE else [0, 0]
    assert np.sign(advantages_P_G).tolist() == [[sign] * 8 for sign in signs]


@every_case
@given(data=st.data())
@some_examples
def test_a_restored_state_continues_as_if_never_stopped_and_inputs_are_left_alone(case, data):
    estimator = CASES[case]
    visits_T_P_G = draw_visits(data, estimator)
    state = begin(estimator, visits_T_P_G.shape[1])
    estimates = []
    features = {"features": state["features"]} if "features" in state else {}
    for rewards_P_G in visits_T_P_G:
        # As a store keeps them: doubles for the prompts, JSON for the run.
        columns = {field: state[field].tobytes() for field in estimator.state_fields}
        shared = json.dumps({field: state[field].tolist() for field in estimator.shared_fields})
        state = {field: np.frombuffer(column) for field, column in columns.items()} | features
        state |= {field: np.array(values) for field, values in json.loads(shared).items()}
        for values in (rewards_P_G, *state.values()):
            values.flags.writeable = False
        state, estimate = pickle.loads(pickle.dumps(estimator)).observe(state, rewards_P_G)
        estimates.append(estimate)
    assert_same((state, estimates), replay(estimator, visits_T_P_G))


@pytest.mark.parametrize("case", LOCAL)
@given(visits_T_P_G=BINARY)
@some_examples
def test_group_weight_is_what_one_more_success_moves(case, visits_T_P_G):
    estimator = CASES[case]
    rollouts = visits_T_P_G.shape[2]
    state, _ = replay(estimator, visits_T_P_G[:-1])
    without = visits_T_P_G[-1].copy()
    with_one_more = visits_T_P_G[-1].copy()
    without[:, 0] = 0.0
    with_one_more[:, 0] = 1.0
    new_state, lower = estimator.observe(state, without)
    _, higher = estimator.observe(state, with_one_more)
    weight = estimator.group_weight(new_state, without)
    np.testing.assert_allclose((higher.mean - lower.mean) * rollouts, weight, rtol=1e-9)
    assert np.all(((weight > 0) == (estimator.reads == "after")) & (weight <= 1))


@pytest.mark.parametrize("case", [case for case in LOCAL if CASES[case].can_leave_one_out()])
@given(data=st.data())
@some_examples
def test_the_mean_without_a_rollout_is_that_of_running_without_it(case, data):
    estimator = CASES[case]
    visits_T_P_G = draw_visits(data, estimator)
    state, _ = replay(estimator, visits_T_P_G[:-1])
    found = estimator.observe(state, visits_T_P_G[-1], leave_one_out=True)[1].without_each
    for rollout in range(visits_T_P_G.shape[2]):
        others = visits_T_P_G[-1].copy()
        others[:, rollout] = np.nan
        expected = estimator.observe(state, others)[1].mean
        np.testing.assert_allclose(
            found[:, rollout], expected, rtol=1e-9, atol=1e-9 * scale_of(visits_T_P_G)
        )


@pytest.mark.parametrize("case", ["auto", "empirical_bayes"])
def test_the_mean_without_a_rollout_is_nearly_that_where_prompts_share_a_prior(case):
    """The prior has seen the rollout as well: of 256 groups of 4, it is one of 1,024."""
    estimator = CASES[case]
    random = np.random.default_rng(5)
    visits_T_P_G = (random.random((2, 256, 4)) < random.random((256, 1))).astype(float)
    state, _ = replay(estimator, visits_T_P_G[:-1])
    rewards_P_G = visits_T_P_G[-1]
    _, estimate = estimator.observe(state, rewards_P_G, leave_one_out=True)
    for prompt in range(8):
        alone = rewards_P_G.copy()
        alone[prompt, 0] = np.nan
        expected = estimator.observe(state, alone)[1].mean[prompt]
        assert estimate.without_each[prompt, 0] == pytest.approx(expected, abs=0.01)
    # Leaving one out matters more than that
    assert np.abs(estimate.without_each - estimate.mean[:, None]).max() > 0.05


@pytest.mark.parametrize("case", ["dbb", "auto"])
@given(visits_T_P_G=BINARY)
@some_examples
def test_the_prediction_is_a_beta_distribution_to_which_the_next_visit_adds(case, visits_T_P_G):
    estimator = CASES[case]
    successes = visits_T_P_G[-1].sum(axis=1)
    state, _ = replay(estimator, visits_T_P_G[:-1])
    alpha, beta = estimator.predictive(state)
    assert estimator.can_predict() and np.all((alpha > 0) & (beta > 0))
    if case != "auto":  # which fits its prior and discount to the visit, too
        new_state, _ = estimator.observe(state, visits_T_P_G[-1])
        np.testing.assert_allclose(new_state["alpha"], alpha + successes, rtol=1e-12)
        np.testing.assert_allclose(
            new_state["beta"], beta + visits_T_P_G.shape[2] - successes, rtol=1e-12
        )


@given(visits_T_P_G=BINARY, discount=st.floats(0.05, 1.0))
@some_examples
def test_gaussian_on_rewards_0_and_1_is_dbb(visits_T_P_G, discount):
    dbb, gaussian = (estimators.build(name, discount=discount) for name in ("dbb", "gaussian"))
    for of_dbb, of_gaussian in zip(
        replay(dbb, visits_T_P_G)[1], replay(gaussian, visits_T_P_G)[1], strict=True
    ):
        np.testing.assert_allclose(of_gaussian.mean, of_dbb.mean, rtol=1e-9)
        np.testing.assert_allclose(of_gaussian.variance, of_dbb.variance, rtol=1e-9)


@every_case
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_step_without_any_group_teaches_nothing(case):
    estimator = CASES[case]
    rewards_P_G = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    state = begin(estimator, 2)
    wanted = estimator.observe(begin(estimator, 2), rewards_P_G)[1]
    estimator.observe_at(state, np.array([], dtype=np.int64), np.empty((0, 3)))
    for field in estimator.state_fields:
        np.testing.assert_array_equal(state[field], estimator.initial_state(2)[field])
    after, estimate = estimator.observe(state, rewards_P_G)
    assert all(np.isfinite(values).all() for values in after.values())
    np.testing.assert_allclose(estimate.mean, wanted.mean, rtol=1e-12)


@every_case
def test_what_cannot_be_observed_is_refused_and_changes_nothing(case):
    estimator = CASES[case]
    good = [[1.0, 0.0], [1.0, 1.0]]
    state = begin(estimator, 3)
    before = begin(estimator, 3)
    for rewards_P_G, message in (
        ([[1.0, 0.0], [np.nan, np.nan]], r"rewards\[1\] holds no reward"),
        ([[1.0, np.inf], [1.0, 0.0]], r"rewards\[0, 1\] = inf is not "),
    ):
        with pytest.raises(ValueError, match=message):
            estimator.observe_at(state, np.array([2, 0]), rewards_P_G)
        assert_same((state, []), (before, []))
    if estimator.state_fields:
        with pytest.raises(ValueError, match="rewards have 2 rows, the state 3 prompts"):
            estimator.observe(state, good)


def test_texts_change_forecasts_alone():
    estimator = CASES["auto"]
    visits_T_P_G = (np.random.default_rng(2).random((6, 8, 4)) < 0.3).astype(float)
    state = estimator.initial_state(8)
    without = []
    for rewards_P_G in visits_T_P_G:
        state, estimate = estimator.observe(state, rewards_P_G)
        without.append(estimate)
    with_texts, estimates = replay(estimator, visits_T_P_G)
    read = {"features", "text_weights", "forecasts"}
    own = {field: values for field, values in with_texts.items() if field not in read}
    assert_same(
        (own, estimates),
        ({field: values for field, values in state.items() if field not in read}, without),
    )


@every_case
def test_observing_some_prompts_in_place_is_observing_them_alone(case):
    estimator = CASES[case]
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    state = begin(estimator, 5)
    untouched = begin(estimator, 5)
    places = np.array([3, 0])
    rewards_P_G = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    alone = estimator.state_at(state, places)
    for _ in range(2):
        alone, wanted = estimator.observe(alone, rewards_P_G)
        estimate = estimator.observe_at(state, places, rewards_P_G)
        same([estimate.mean, estimate.variance], [wanted.mean, wanted.variance])
    for field in estimator.state_fields:
        same(state[field][places], alone[field])
        assert (state[field][[1, 2, 4]] == untouched[field][[1, 2, 4]]).all()
    for field in estimator.shared_fields:
        same(state[field], alone[field])
