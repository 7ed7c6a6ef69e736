"""Estimators and advantages against numbers computed by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.estimators import RewardEstimator, build, standardized


def group(successes, size=8):
    return [1.0] * successes + [0.0] * (size - successes)


def test_dbb_takes_partial_credit_only_when_told():
    with pytest.raises(estimators.RewardSupportError, match=r"rewards\[0, 1\] = 0.5 is not 0 or 1"):
        build("dbb").observe(build("dbb").initial_state(1), [[1.0, 0.5]])
    dbb = build("dbb", discount=0.5, partial_credit=True)
    state, _ = dbb.observe(dbb.initial_state(1), [[1.0, 0.5]])
    assert (state["alpha"][0], state["beta"][0]) == (2.0, 1.0)
    with pytest.raises(estimators.RewardSupportError, match=r"= -0.5 is not in \[0, 1\]"):
        dbb.observe(state, [[1.0, -0.5]])
    # A sum of decimals is told from 1: 0.7 + 0.2 + 0.1.
    sum_of_parts = 0.9999999999999999
    with pytest.raises(estimators.RewardSupportError, match=r"= 0.9999999999999999 is not 0 or 1"):
        build("dbb").observe(build("dbb").initial_state(1), [[0.0, sum_of_parts]])


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("dbb", {"discount": 0.0}, r"dbb.discount = 0.0 is not in \(0, 1\]"),
        ("dbb", {"prior_beta": math.nan}, r"dbb.prior_beta = nan is not in \(0, inf\)"),
        (
            "point",
            {"memory": "all"},
            r"point.memory = 'all' is none of auto, predicted_prior, dbb, gaussian",
        ),
        (
            "dbb",
            {"decay": 0.5},
            r"'dbb' has no parameter 'decay'; it has: discount, prior_alpha, prior_beta, partial",
        ),
    ],
)
def test_parameters_out_of_range_are_named(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        build(name, **parameters)


def test_ema_averages_the_group_means():
    ema = build("ema", discount=0.25)
    state, first = ema.observe(ema.initial_state(1), [group(2)])
    assert (first.mean[0], first.variance[0]) == (0.25, 0.25 * 0.75)  # no prior: S / N
    state, second = ema.observe(state, [group(8)])
    assert second.mean[0] == 0.25 * 0.25 + 0.75 * 1.0
    state, third = ema.observe(state, [group(0)])
    assert third.mean[0] == pytest.approx(0.25 * 0.8125)
    assert (
        ema.group_weight(state, np.array([group(0)])).tolist() == [0.75]
        and not ema.can_leave_one_out()
    )


def test_ema_of_zero_variance_groups_is_exact_and_gives_no_advantage():
    ema = build("ema", discount=0.3)
    state = ema.initial_state(3)
    rewards_P_G = np.array([[1.0] * 7, [0.0] * 7, [0.5] * 7])
    for _ in range(100):
        state, estimate = ema.observe(state, rewards_P_G)
        assert estimate.mean.tolist() == [1.0, 0.0, 0.5]
        assert estimate.variance.tolist() == [0.0, 0.0, 0.25]
        assert standardized(rewards_P_G, estimate).tolist() == [[0.0] * 7] * 3
    # the next wrong answer: mean = 1 - 0.7 / 7
    _, estimate = ema.observe(state, [[1.0] * 6 + [0.0], [0.0] * 7, [0.5] * 7])
    assert standardized(np.array([[0.0]] * 3), estimate)[0, 0] == pytest.approx(
        -0.9 / math.sqrt(0.9 * 0.1)
    )


def test_laplace_adds_as_many_successes_as_failures_as_a_first_visit_of_dbb():
    dbb = build("dbb", discount=0.5, prior_alpha=3.0, prior_beta=3.0)
    laplace = build("laplace", smoothing=1.5)
    for successes in (0, 2, 8):
        _, of_dbb = dbb.observe(dbb.initial_state(1), [group(successes)])
        state, of_laplace = laplace.observe({}, [group(successes)])
        assert (
            of_laplace.mean[0] == of_dbb.mean[0] == pytest.approx((successes + 1.5) / 11, rel=1e-15)
        )
        assert of_laplace.variance[0] == of_dbb.variance[0]
        assert laplace.group_weight(state, np.array([group(successes)])).tolist() == [8 / 11]


def test_empirical_bayes_takes_binomial_noise_out_of_the_moments():
    # S/N = 0, 0.25, 0.75, 1 of N = 4: mean 0.5, N-1 variance 0.625 / 3
    # rho = (0.8333 - 0.25) / 0.75 = 7 / 9, nu = 2 / 7
    rewards_P_G = np.array([group(successes, size=4) for successes in (0, 1, 3, 4)])
    eb = build("empirical_bayes")
    state, estimate = eb.observe(eb.initial_state(4), rewards_P_G)
    assert state["moments"].tolist() == [4.0, 2.0, 0.0625 + 0.5625 + 1.0, 1.0]
    assert state["prior"] == pytest.approx([1 / 7, 1 / 7])
    assert estimate.mean == pytest.approx([(1 / 7 + s) / (4 + 2 / 7) for s in (0, 1, 3, 4)])
    assert eb.group_weight(state, rewards_P_G) == pytest.approx([4 / (4 + 2 / 7)] * 4)


def test_empirical_bayes_shrinks_most_where_all_prompts_are_alike_and_knows_no_weight_at_n_1():
    eb = build("empirical_bayes")
    # Less spread than binomial noise alone
    state, _ = eb.observe(eb.initial_state(3), [group(4)] * 3)
    assert state["prior"] == pytest.approx([500.0, 500.0])
    state, estimate = eb.observe(eb.initial_state(4), [[1.0], [0.0], [0.0], [0.0]])
    assert state["prior"] == pytest.approx([0.5, 1.5])
    assert estimate.mean == pytest.approx([1.5 / 3, 0.5 / 3, 0.5 / 3, 0.5 / 3])


AUTO_FIRST = (0, 1, 3, 4)  # successes of 4 prompts, N = 4, on their first visit
AUTO_SECOND = (1, 1, 4, 2)  # and on their second
# Where auto's scores of pairs have those of a prior weight, a way to count ages, and a discount.
AUTO_SHAPE = (5, 2, 21)
WEIGHTS = {0.05: 0, 0.25: 1, 0.5: 2, 1.0: 3, 2.0: 4}
IN_VISITS = 0
IN_TIME = 1
DISCOUNTS = {0.02: 0, 0.25: 5, 0.5: 10, 1.0: 20}


def of_four(successes):
    return np.array([group(count, size=4) for count in successes])


def test_auto_forgets_old_groups_in_the_prior_and_scores_first_visits_with_all_of_it():
    auto = build("auto")
    first, estimate = auto.observe(auto.initial_state(4), of_four(AUTO_FIRST))
    assert first["prior"] == pytest.approx([1 / 7, 1 / 7])  # as in empirical_bayes
    # (1/7 + S) / (2/7 + 4)
    assert estimate.mean == pytest.approx([1 / 30, 8 / 30, 22 / 30, 29 / 30])
    state, _ = auto.observe(first, of_four(AUTO_SECOND))
    kept = 0.5 ** (1 / 0.15)  # one pass over the 4 prompts
    assert state["moments"] == pytest.approx(
        kept * first["moments"] + [4, 2, 2 * 0.0625 + 1 + 0.25, 1]
    )
    assert state["prompts"].tolist() == [4.0]
    assert state["successes_1"].tolist() == [1, 1, 4, 2]
    assert state["successes_2"].tolist() == [0, 1, 3, 4]


def auto_with_prior_1_1(num_prompts):
    """A state of ``auto`` whose prior is Beta(1, 1), whatever it observes."""
    state = build("auto").initial_state(num_prompts)
    # Of so many groups of 4 that no other counts: the mean is 1/2, the variance (1/4 + 3/4 * 1/3) * 1/4 = 1/8.
    state["moments"] = 1e14 * np.array([1, 1 / 2, 1 / 4 + 1 / 8, 1 / 4])
    return state


@pytest.mark.parametrize(
    ("successes", "weight", "discount"),
    [
        # All right twice: the risk is (weight / (2 weight + 4 discount + 4))^2.
        ((4, 4), 0.05, 1.0),
        # All right, then all wrong: ((weight + 4 discount) / (2 weight + 4 discount + 4))^2.
        ((4, 0), 0.05, 0.02),
        # All right, then half: with weight 2 and t = discount / (discount + 2) the risk is t^2 / 4 - t / 12, the least
        # at t = 1/6.
        ((4, 2), 2.0, 0.4),
    ],
)
def test_auto_chooses_the_pair_of_least_estimated_risk(successes, weight, discount):
    auto = build("auto")
    state = auto_with_prior_1_1(1)
    for count in successes:
        state, _ = auto.observe(state, of_four([count]))
    assert state["weight"] == pytest.approx([weight])
    assert state["discount"] == pytest.approx([discount])


def test_auto_scores_a_pair_by_minus_the_estimated_squared_error_of_its_mean():
    auto = build("auto")
    state, _ = auto.observe(auto_with_prior_1_1(1), of_four([4]))
    state, estimate = auto.observe(state, of_four([1]))
    scores = state["evidence"].reshape(AUTO_SHAPE)
    # Weight 1, discount 1/2: alpha 1 + 2 + 1, of 8: the mean is 1/4 above the share 1/4, whose noise is
    # 1/4 * 3/4 / 3 = 1/16; 1 - 2 * 4/8 of it is taken off, which is nothing.
    assert scores[WEIGHTS[1.0], IN_VISITS, DISCOUNTS[0.5]] == pytest.approx(-1 / 16)
    # Weight 1/2, discount 1/4: 5/2 of 6 is 1/6 above; 1 - 2 * 4/6 = -1/3: 1/36 + 1/48
    assert scores[WEIGHTS[0.5], IN_VISITS, DISCOUNTS[0.25]] == pytest.approx(-7 / 144)
    # Weight 2, discount 1: 7 of 12 is 1/3 above; 1 - 2 * 4/12 = 1/3: 1/9 - 1/48
    assert scores[WEIGHTS[2.0], IN_VISITS, DISCOUNTS[1.0]] == pytest.approx(-13 / 144)
    # One prompt in each update: a pass is one visit.
    assert scores[:, IN_TIME] == pytest.approx(scores[:, IN_VISITS])
    # The best is weight 2, discount 0.02: 3.08 of 8.08.
    assert estimate.mean == pytest.approx([3.08 / 8.08])


def test_auto_adds_up_the_scores_of_the_prompts_of_an_update():
    auto = build("auto")
    state, _ = auto.observe(auto_with_prior_1_1(2), of_four([4, 4]))
    state, _ = auto.observe(state, of_four([1, 4]))
    # As above, and 7 of 8 where all are right: 1/8 below the share, which has no noise.
    score = state["evidence"].reshape(AUTO_SHAPE)[WEIGHTS[1.0], IN_VISITS, DISCOUNTS[0.5]]
    assert score == pytest.approx(-1 / 16 - 1 / 64)


def test_auto_with_one_rollout_judges_the_last_estimate_too_from_the_third_visit():
    auto = build("auto")
    state = auto_with_prior_1_1(1)
    scores = []
    for reward in (1.0, 1.0, 0.0):
        state, _ = auto.observe(state, [[reward]])
        scores.append(
            state["evidence"].reshape(AUTO_SHAPE)[WEIGHTS[1.0], IN_VISITS, DISCOUNTS[0.5]]
        )
    # Weight 1, discount 1/2. The second reward, 1, was forecast as (1 + 1/2) / (2 + 1/2).
    second = -((1 - 3 / 5) ** 2)
    # The third, 0, as (1 + 1/2 + 1/4) / (2 + 1/2 + 1/4); the second visit's mean was (1 + 1 + 1/2) / (2 + 1 + 1/2).
    third = -((7 / 11) ** 2) - (5 / 7) ** 2
    one_pass = 0.5 ** (1 / 0.7)
    assert scores == pytest.approx([0, second, one_pass * second + third])


def test_auto_with_one_rollout_learns_the_prior_s_weight_from_successive_rewards():
    auto = build("auto")
    state, _ = auto.observe(auto.initial_state(5), [[1.0], [0.0], [0.0], [0.0], [0.0]])
    assert state["prior"] == pytest.approx([0.2 * 2, 0.8 * 2])  # no pairs yet: weight 2
    state, _ = auto.observe(auto.state_at(state, np.arange(4)), [[1.0], [1.0], [0.0], [0.0]])
    # 5 prompts, 9 groups in 2 updates: a pass is 10 / 9 updates, and the four gaps are 0.9 passes
    assert state["pairs"] == pytest.approx([4 * 0.9, 2 * 0.9, 0.9, 0.9])
    # means 1/2 and 1/4, both 1/4: covariance 1/8, deviations 1/2 and sqrt(3)/4, correlation 1 / sqrt(3)
    correlation = (3.6 / 3**0.5 + 50 / 3) / 53.6
    kept = 0.5 ** (4 / 5 / 0.15)
    mean = (kept * 1 + 0.9 * 2) / (kept * 5 + 0.9 * 4)
    weight = 1 / correlation - 1
    assert state["prior"] == pytest.approx([mean * weight, (1 - mean) * weight])


def in_steps(state, steps):
    """Let ``auto`` observe steps of {prompt: successes of 8}, in place."""
    for groups in steps:
        rewards_P_G = np.array([group(successes) for successes in groups.values()])
        build("auto").observe_at(state, np.array(list(groups)), rewards_P_G)


IRREGULAR = [
    {0: 8, 1: 2},
    {0: 4, 2: 1},
    {2: 3, 1: 6},
    {0: 1, 2: 7},
]  # prompt 0 in updates 1, 2 and 4


def test_auto_forgets_by_time_where_ages_are_in_time():
    state = auto_with_prior_1_1(3)
    settled = np.zeros(AUTO_SHAPE)
    settled[WEIGHTS[0.5], IN_TIME, DISCOUNTS[0.25]] = 1e9  # the best pair, whatever is observed
    state["evidence"] = settled.ravel()
    in_steps(state, IRREGULAR)
    # 3 prompts, 8 groups in 4 updates: a pass is 3/2 updates. Ages of prompt 0: update 2 is 4/3 passes ago, update 1
    # 1/2 pass more, which it was discounted by at update 4, when it was no longer one of the two latest
    old = 0.25 ** (4 / 3 + 2 / 3)
    latest = 0.25 ** (4 / 3)
    assert state["alpha"][0] == pytest.approx(0.5 + 1 + latest * 4 + old * 8)
    assert state["beta"][0] == pytest.approx(0.5 + 7 + latest * 4)
    assert state["seen_1"].tolist() == [4, 3, 4]
    assert state["seen_2"].tolist() == [2, 1, 3]
    assert state["timed"].tolist() == [1]
    assert state["clock"].tolist() == [4, 8]
    assert state["prompts"].tolist() == [3]
    # forecasts of update 5: prompt 1 was last seen 2 updates before, 4/3 passes, and first 4, 8/3 passes
    alpha, beta = build("auto").predictive(state)
    assert alpha[1] == pytest.approx(0.5 + 0.25 ** (4 / 3) * 6 + 0.25 ** (8 / 3) * 2)
    assert beta[1] == pytest.approx(0.5 + 0.25 ** (4 / 3) * 2 + 0.25 ** (8 / 3) * 6)


def test_auto_counts_ages_in_time_where_that_predicts_better():
    """Prompts 0 and 1 come back at once as they were, prompts 2 and 3 after a pass as the opposite."""
    auto = build("auto")
    same = [group(8), group(0)]
    other = [group(0), group(8)]
    state = auto.initial_state(4)
    auto.observe_at(state, np.arange(4), np.array([*same, *same]))
    for _ in range(8):
        auto.observe_at(state, np.array([0, 1]), np.array(same))
    auto.observe_at(state, np.array([2, 3]), np.array(other))
    assert state["timed"].tolist() == [1]
    means = state["alpha"] / (state["alpha"] + state["beta"])
    assert means[0] > 0.95 and means[1] < 0.05 and means[2] < 0.05 and means[3] > 0.95


def test_auto_s_prior_counts_a_group_as_the_passes_since_the_prompt_s_last_visit():
    state = build("auto").initial_state(2)
    # First visits count 1 each: shares 1 and 0, 1/N = 1/8.
    in_steps(state, [{0: 8, 1: 0}])
    assert state["moments"] == pytest.approx([2, 1, 1, 1 / 4])
    # 2 prompts, 3 groups in 2 updates: a pass is 4/3 updates, so that prompt 0 was last seen 3/4 passes ago. Before,
    # half of the prompts seen fade the sums.
    in_steps(state, [{0: 8}])
    faded = 0.5 ** (1 / 2 / 0.15)
    second = [2 * faded + 3 / 4, faded + 3 / 4, faded + 3 / 4, faded / 4 + 3 / 4 / 8]
    assert state["moments"] == pytest.approx(second)
    # 5 groups in 3 updates: a pass is 6/5 updates; prompt 0 was last seen 5/6 passes ago, prompt 1 two updates, 5/3
    # passes. Shares 1 and 1/4; all prompts fade the sums.
    in_steps(state, [{0: 8, 1: 2}])
    faded = 0.5 ** (1 / 0.15)
    assert state["moments"] == pytest.approx(
        [
            second[0] * faded + 5 / 6 + 5 / 3,
            second[1] * faded + 5 / 6 + 5 / 3 / 4,
            second[2] * faded + 5 / 6 + 5 / 3 / 16,
            second[3] * faded + (5 / 6 + 5 / 3) / 8,
        ]
    )


def test_gaussian_follows_the_normal_inverse_gamma_update_over_two_visits():
    gaussian = build("gaussian", discount=0.5, prior_mean=0.0, prior_variance=1.0, prior_weight=2.0)
    state, first = gaussian.observe(gaussian.initial_state(1), [[2.0, 4.0, 3.0]])
    # kept 1, xbar 3, SS 2: weight 1 + 3, mean 9 / 4, spread 0.5 * 2 + 2 + 1 * 3 * 3^2 / 4
    assert [state[field][0] for field in ("weight", "mean", "spread")] == [4.0, 2.25, 9.75]
    assert first.variance[0] == 9.75 / 4
    state, second = gaussian.observe(state, [[-1.0, -0.5]])
    # kept 2, xbar -0.75, SS 0.125: weight 4, mean (4.5 - 1.5) / 4, spread 4.875 + 0.125 + 2 * 2 * 3^2 / 4
    assert [state[field][0] for field in ("weight", "mean", "spread")] == [4.0, 0.75, 14.0]
    assert second.variance[0] == 3.5


@pytest.mark.parametrize(
    ("name", "value"), [("dbb", 1.0), ("gaussian", 0.0), ("gaussian", 0.1), ("gaussian", 1e6 + 0.1)]
)
@pytest.mark.parametrize(("size", "discount"), [(8, 0.5), (7, 0.95)])
def test_a_variance_survives_any_number_of_zero_variance_groups(name, value, size, discount):
    estimator = build(name, discount=discount)
    rewards_P_G = np.full((1, size), value)
    state = estimator.initial_state(1)
    for _ in range(2000):
        state, estimate = estimator.observe(state, rewards_P_G)
        assert estimate.variance[0] > 0
    # Sevenths of 0.7 are not quite 0.1
    assert np.all(np.abs(standardized(rewards_P_G, estimate)) < 1e-4)
    # The next reward that is lower by 1: of total weight w = N / (1 - discount) the mean is 1 / w lower, and the
    # variance (1 - 1 / w) / w, as of 0s and 1s.
    rewards_P_G[0, -1] -= 1
    _, estimate = estimator.observe(state, rewards_P_G)
    expected = -math.sqrt(size / (1 - discount) - 1)
    assert standardized(rewards_P_G, estimate)[0, -1] == pytest.approx(expected, rel=1e-6)


def test_estimators_go_by_name_or_class_and_a_taken_name_is_refused():
    assert estimators.get("openrlhf_dbb.estimators.dbb:DiscountedBetaBernoulli") is estimators.get(
        "dbb"
    )
    with pytest.raises(
        ValueError, match=r"'dbb' is taken by openrlhf_dbb.estimators.dbb:DiscountedBetaBernoulli"
    ):

        @estimators.register
        class Other(RewardEstimator):
            name = "dbb"


def test_spo_scores_by_the_past_and_forgets_by_a_constant():
    spo = build("spo")
    state, estimate = spo.observe(spo.initial_state(4), np.ones((4, 1)))
    assert estimate.mean.tolist() == [0.5] * 4
    assert (state["alpha"].tolist(), state["beta"].tolist()) == ([1.48] * 4, [0.48] * 4)
    state, estimate = spo.observe(state, [[1.0, 0.0, 0.0]] * 4)
    assert estimate.mean == pytest.approx([1.48 / 1.96] * 4)
    assert estimate.variance == pytest.approx([1.48 * 0.48 / 1.96**2] * 4)
    np.testing.assert_allclose(state["alpha"], 0.96 * 1.48 + 1, rtol=1e-12)
    np.testing.assert_allclose(state["beta"], 0.96 * 0.48 + 2, rtol=1e-12)
    assert spo.predictive(state) == (
        state["alpha"],
        state["beta"],
    )  # what the next visit is scored by


def test_the_estimator_in_contributing_averages():
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    [source] = [
        code
        for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        if "RewardEstimator" in code
    ]
    names = {"__name__": "contributing_example"}
    exec(source.replace("@register\n", ""), names)
    average = names["MovingAverage"](keep=0.5)
    state, estimate = average.observe(average.initial_state(1), np.array([[1.0, 1.0, np.nan]]))
    # 0.5 * 0.5 + 0.5 * 1
    assert (state["average"][0], estimate.mean[0], estimate.variance[0]) == (0.75, 0.75, 0.1875)
