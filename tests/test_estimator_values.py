"""Estimators and advantages against numbers computed by hand."""

import math

import numpy as np
import pytest

import estimators
from estimators import Estimate, RewardEstimator, build, centered, standardized


def group(successes, size=8):
    return [1.0] * successes + [0.0] * (size - successes)


def test_dbb_follows_definition_2_over_two_visits():
    dbb = build("dbb", discount=0.5)
    state, first = dbb.observe(dbb.initial_state(1), [group(2)])
    # alpha = .5 * 1 + 2, beta = .5 * 1 + 6, mean = 2.5 / 9, variance = 2.5 * 6.5 / 81
    assert (state["alpha"][0], state["beta"][0]) == (2.5, 6.5)
    assert first.mean[0] == pytest.approx(2.5 / 9)
    assert first.variance[0] == pytest.approx(2.5 * 6.5 / 81)
    state, second = dbb.observe(state, [group(8)])
    # alpha = .5 * 2.5 + 8, beta = .5 * 6.5 + 0
    assert (state["alpha"][0], state["beta"][0]) == (9.25, 3.25)
    assert second.mean[0] == pytest.approx(9.25 / 12.5)


@pytest.mark.parametrize(
    ("successes", "correct", "wrong"),
    # first visit, prior (1, 1), discount .5: sqrt(beta / alpha) and -sqrt(alpha / beta)
    [
        (0, None, -math.sqrt(0.5 / 8.5)),
        (1, math.sqrt(7.5 / 1.5), -math.sqrt(1.5 / 7.5)),
        (4, 1.0, -1.0),
        (8, math.sqrt(0.5 / 8.5), None),
    ],
)
def test_dbb_advantages_of_the_first_visit(successes, correct, wrong):
    dbb = build("dbb", discount=0.5)
    rewards_P_G = np.array([group(successes)])
    _, estimate = dbb.observe(dbb.initial_state(1), rewards_P_G)
    advantages = standardized(rewards_P_G, estimate)[0]
    if correct is not None:
        assert advantages[0] == pytest.approx(correct, rel=1e-12)
    if wrong is not None:
        assert advantages[-1] == pytest.approx(wrong, rel=1e-12)


def test_dbb_with_discount_1_is_the_conjugate_update():
    dbb = build("dbb", discount=1.0, prior_alpha=2.0, prior_beta=3.0)
    state = dbb.initial_state(1)
    for successes in (1, 5, 8):
        state, _ = dbb.observe(state, [group(successes)])
    assert (state["alpha"][0], state["beta"][0]) == (2 + 14, 3 + 24 - 14)


@pytest.mark.parametrize("visits", [50, 100, 2000])
def test_dbb_variance_survives_any_number_of_unanimous_visits(visits):
    dbb = build("dbb", discount=0.5)
    state = dbb.initial_state(1)
    for _ in range(visits):
        state, estimate = dbb.observe(state, [group(8)])
    assert estimate.variance[0] > 0
    advantages = standardized(np.array([group(8)]), estimate)
    assert np.all((advantages >= 0) & (advantages < 1e-4))  # nearly mastered: nearly nothing to learn
    # the next wrong answer is scored by what it is: alpha = .5 * 16 + 7, beta = .5 * ~0 + 1
    _, estimate = dbb.observe(state, [group(7)])
    assert standardized(np.array([group(7)]), estimate)[0, -1] == pytest.approx(-math.sqrt(15), rel=1e-6)


def test_dbb_missing_rollouts_shrink_the_group():
    dbb = build("dbb", discount=0.5)
    rewards_P_G = np.array([[1.0, np.nan, 0.0, np.nan]])
    state, estimate = dbb.observe(dbb.initial_state(1), rewards_P_G)
    assert (state["alpha"][0], state["beta"][0]) == (1.5, 1.5)
    assert standardized(rewards_P_G, estimate).tolist() == [[1.0, 0.0, -1.0, 0.0]]


def test_dbb_takes_partial_credit_only_when_told():
    with pytest.raises(estimators.RewardSupportError, match=r"rewards\[0, 1\] = 0.5 is not 0 or 1"):
        build("dbb").observe(build("dbb").initial_state(1), [[1.0, 0.5]])
    dbb = build("dbb", discount=0.5, partial_credit=True)
    state, _ = dbb.observe(dbb.initial_state(1), [[1.0, 0.5]])
    assert (state["alpha"][0], state["beta"][0]) == (2.0, 1.0)
    with pytest.raises(estimators.RewardSupportError, match=r"= -0.5 is not in \[0, 1\]"):
        dbb.observe(state, [[1.0, -0.5]])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"discount": 0.0}, r"dbb.discount = 0.0 is not in \(0, 1\]"),
        ({"discount": 1.5}, r"dbb.discount = 1.5 is not in"),
        ({"discount": math.nan}, r"dbb.discount = nan is not in"),
        ({"prior_alpha": 0.0}, r"dbb.prior_alpha = 0.0 is not"),
        ({"prior_beta": math.inf}, r"dbb.prior_beta = inf is not"),
        (
            {"decay": 0.5},
            r"'dbb' has no parameter 'decay'; it has: discount, prior_alpha, prior_beta, partial_credit",
        ),
    ],
)
def test_parameters_out_of_range_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        build("dbb", **parameters)


@pytest.mark.parametrize(
    ("successes", "correct", "wrong"),
    # N = 8: mean S/8, variance 8/7 * p (1 - p)
    [(1, 2.4749, -0.3536), (2, 1.6202, -0.5401), (4, 0.9354, -0.9354), (7, 0.3536, -2.4749)],
)
def test_point_gives_grpo_advantages(successes, correct, wrong):
    rewards_P_G = np.array([group(successes)])
    _, estimate = build("point").observe({}, rewards_P_G)
    advantages = standardized(rewards_P_G, estimate)[0]
    assert advantages[0] == pytest.approx(correct, abs=1e-4)
    assert advantages[-1] == pytest.approx(wrong, abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3, -0.2])
def test_point_says_nothing_of_a_unanimous_group(value):
    rewards_P_G = np.full((1, 8), value)  # the mean of eight times 0.1 is not exactly 0.1
    _, estimate = build("point").observe({}, rewards_P_G)
    assert estimate.variance[0] == 0.0
    assert standardized(rewards_P_G, estimate).tolist() == [[0.0] * 8]


def test_centered_is_reward_minus_mean():
    estimate = Estimate(np.array([0.25, 0.5]), np.array([0.1, 0.0]))
    assert centered(np.array([[1.0, 0.0], [np.nan, 1.0]]), estimate).tolist() == [[0.75, -0.25], [0.0, 0.5]]


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown estimator 'dbbb'; known: dbb, point"):
        estimators.get("dbbb")


def test_module_and_class_name_an_estimator_outside_the_registry():
    assert estimators.get("estimators.dbb:DiscountedBetaBernoulli") is estimators.get("dbb")
    with pytest.raises(ValueError, match="cannot be imported"):
        estimators.get("estimators.dbb:Missing")
    with pytest.raises(ValueError, match="not a subclass"):
        estimators.get("math:sqrt")


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match=r"'dbb' is taken by estimators.dbb:DiscountedBetaBernoulli"):

        @estimators.register
        class Other(RewardEstimator):
            name = "dbb"


def test_an_estimator_may_read_before_it_updates():
    class Lagged(estimators.get("dbb")):
        reads = "before"

    lagged = Lagged(discount=0.5)
    state, estimate = lagged.observe(lagged.initial_state(1), [group(8)])
    assert estimate.mean[0] == 0.5  # the prior, untouched by this group
    assert state["alpha"][0] == 8.5
