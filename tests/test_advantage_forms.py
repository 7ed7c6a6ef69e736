"""Advantage forms: by hand, and laws that every registered one obeys with every estimator that can serve it.

Axes: P prompts, G rollouts per prompt.
"""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb import Posteriors, Responses, StepExtras, estimators
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.estimators.text_prior import WIDTH

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
NAN = math.nan
FORM_NAMES = list(FORMS.available())
ESTIMATORS = {name: estimators.build(name) for name in estimators.available()}
EXACT = [name for name, estimator in ESTIMATORS.items() if estimator.can_leave_one_out()]
PAIRS = [
    (form, name)
    for form in FORM_NAMES
    for name in (EXACT if FORMS.get(form).leave_one_out else ESTIMATORS)
]
every_pair = pytest.mark.parametrize(("form", "estimator"), PAIRS)


def scored(form, estimator, rewards_P_G, state=None):
    """The advantages of one visit."""
    rewards_P_G = np.array(rewards_P_G)
    if state is None:
        state = estimator.initial_state(len(rewards_P_G)) | {
            "features": np.zeros((len(rewards_P_G), WIDTH))
        }
    form = FORMS.build(form)
    _, estimate = estimator.observe(state, rewards_P_G, leave_one_out=form.leave_one_out)
    return form.advantages(rewards_P_G, estimate)


GROUPS = [[1, 0, NAN, 0], [1, 1, 1, 1]]
ROOT = math.sqrt
C = (0.625 - 2 * 0.375 + 4 * 0.1) / 7  # the mean of the 7 advantages of "dr_grpo" with "dbb"


@pytest.mark.parametrize(
    ("form", "estimator", "expected"),
    [
        # Means 1/3 and 1; N-1 variances 1/3 and 0.
        ("dr_grpo", "point", [[2 / 3, -1 / 3, 0, -1 / 3], [0] * 4]),
        ("reinforce_baseline", "point", [[2 / 3, -1 / 3, 0, -1 / 3], [0] * 4]),
        ("group_norm", "point", [[2 / ROOT(3), -1 / ROOT(3), 0, -1 / ROOT(3)], [0] * 4]),
        # 1 against the mean of 0 0, 0 against that of 1 0
        ("rloo", "point", [[1, -0.5, 0, -0.5], [0] * 4]),
        # alpha, beta = 1.5, 2.5 and 4.5, 0.5: means 0.375 and 0.9
        ("dr_grpo", "dbb", [[0.625, -0.375, 0, -0.375], [0.1] * 4]),
        ("reinforce_baseline", "dbb", [[0.625, -0.375, 0, -0.375], [0.1] * 4]),
        ("group_norm", "dbb", [[ROOT(5 / 3), -ROOT(3 / 5), 0, -ROOT(3 / 5)], [1 / 3] * 4]),
        ("batch_centered", "point", [[2 / 3, -1 / 3, 0, -1 / 3], [0] * 4]),
        ("batch_centered", "dbb", [[0.625 - C, -0.375 - C, 0, -0.375 - C], [0.1 - C] * 4]),
        # 5 of 7 rewards are 1
        ("batch_mean", "point", [[2 / 7, -5 / 7, 0, -5 / 7], [2 / 7] * 4]),
        ("batch_mean", "dbb", [[2 / 7, -5 / 7, 0, -5 / 7], [2 / 7] * 4]),
        # 1 against 0.5 / 3, 0 against 1.5 / 3; 1 against 3.5 / 4
        ("rloo", "dbb", [[1 - 0.5 / 3, -0.5, 0, -0.5], [0.125] * 4]),
        ("max_rl", "point", [[2, -1, 0, -1], [0] * 4]),
        ("max_rl", "dbb", [[5 / 3, -1, 0, -1], [1 / 9] * 4]),
    ],
)
def test_the_advantages_of_each_form_by_hand(form, estimator, expected):
    np.testing.assert_allclose(scored(form, ESTIMATORS[estimator], GROUPS), expected, rtol=1e-12)


def test_max_rl_gives_an_all_wrong_group_0_by_its_own_mean_and_minus_1_by_any_posterior():
    wrong = np.zeros((2, 3))
    state = {"alpha": np.array([0.01, 50.0]), "beta": np.array([80.0, 2.0])}
    assert scored("max_rl", ESTIMATORS["point"], wrong).tolist() == [[0] * 3] * 2
    assert scored("max_rl", ESTIMATORS["dbb"], wrong, state) == pytest.approx(-np.ones((2, 3)))


def test_rloo_compares_a_single_rollout_with_the_prior_and_by_a_point_estimate_with_nothing():
    # alpha, beta = 1.5, 0.5 with it, 0.5, 0.5 without; a point estimate has nothing to compare it with
    assert scored("rloo", ESTIMATORS["dbb"], [[1.0]]).tolist() == [[0.5]]
    assert scored("rloo", ESTIMATORS["point"], [[1.0], [0.0]]).tolist() == [[0.0], [0.0]]


def test_rloo_leaves_out_the_score_that_the_posterior_has_seen_on_any_visit(open_new):
    prompts = ["1+1="] * 4
    labels = ["2"] * 4
    with Posteriors.create(
        open_new("sqlite"), "run", prompts[:1], labels[:1], estimator="dbb"
    ) as posteriors:
        first = posteriors.observe(
            1, prompts, labels, [0.5, 1, 0, -0.5], scores=[1, 1, 0, 0], form="rloo"
        )
        second = posteriors.observe(2, prompts[:2], labels[:2], [1, 0], form="rloo")
    # alpha, beta = 2.5, 2.5: without a success 1.5 / 4, without a failure 2.5 / 4
    np.testing.assert_allclose(first.advantages, [0.125, 0.625, -0.625, -1.125], rtol=1e-12)
    # alpha, beta = 0.5 * 2.5 + 1 twice: without the success 1.25 / 3.5, without the failure 2.25 / 3.5
    np.testing.assert_allclose(second.advantages, [1 - 1.25 / 3.5, -2.25 / 3.5], rtol=1e-12)


@pytest.mark.parametrize(
    ("form", "sums", "factors"),
    [
        # dbb 0.5 from alpha, beta = 1, 1 and 2.5, 0.7: n = 1 and 1.6, p0 = 0.5 and 0.78125, N = 2, M = 3 and 3.6, R = 4
        (
            "dr_grpo",
            [2 * 1 * (0.2 - 0.5) / 3, 2 * 1.6 * (0.6 - 0.78125) / 3.6],
            [1 - 1 / 3, 1 - 1 / 3.6],
        ),
        ("rloo", [2 * 1 * (0.2 - 0.5) / 2, 2 * 1.6 * (0.6 - 0.78125) / 2.6], [1, 1]),
        # the sums less their mean: -0.2 and -0.161111 are 0.019444 from it
        (
            "batch_centered",
            [-0.7 / 36, 0.7 / 36],
            [1 - 1 / 3 - 1 / 12, 1 - 1 / 3.6 - 1.6 / 3.6 / 4],
        ),
    ],
)
def test_the_expected_sum_and_gradient_over_all_rewards_are_those_of_the_formulas(
    form, sums, factors
):
    q = np.array([[0.2], [0.6]])
    state = {"alpha": np.array([1, 2.5]), "beta": np.array([1, 0.7])}
    sum_P = np.zeros(2)
    gradient_P = np.zeros(2)
    for rewards in itertools.product((0.0, 1.0), repeat=4):
        rewards_P_G = np.reshape(rewards, (2, 2))
        probability = np.where(rewards_P_G == 1, q, 1 - q).prod()
        advantages_P_G = scored(form, ESTIMATORS["dbb"], rewards_P_G, state)
        sum_P += probability * advantages_P_G.sum(axis=1)
        # X - q is the derivative of a rollout's log-probability by the prompt's logit, q (1 - q) that of q
        gradient_P += probability * (advantages_P_G * (rewards_P_G - q)).mean(axis=1)
    np.testing.assert_allclose(sum_P, sums, rtol=1e-12)
    np.testing.assert_allclose(gradient_P, np.array(factors) * [0.16, 0.24], rtol=1e-12)


# Rewards that every estimator takes; one group of zero variance, one with missing rollouts.
REWARDS = np.array(
    [[1.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, NAN, NAN], [1.0, 1.0, 1.0, 1.0, 1.0]]
)


@every_pair
def test_better_rollouts_have_greater_advantages_and_missing_ones_change_none(form, estimator):
    before = REWARDS.copy()
    found = scored(form, ESTIMATORS[estimator], REWARDS)
    order = [4, 2, 0, 3, 1]
    np.testing.assert_array_equal(REWARDS, before)
    # A missing rollout has no advantage and changes none.
    assert found.shape == (3, 5) and np.isfinite(found).all()
    assert found[1, 3:].tolist() == [0, 0]
    padded = np.concatenate([REWARDS, np.full((3, 2), NAN)], axis=1)
    np.testing.assert_allclose(
        scored(form, ESTIMATORS[estimator], padded)[:, :5], found, rtol=1e-12
    )
    # A better rollout of a group has the greater advantage, equal ones have equal advantages, in any order.
    assert found[0, [0, 2]].min() > 0 > found[0, [1, 3, 4]].max()
    assert found[1, 2] > 0 > found[1, :2].max()
    assert len(set(found[0, [0, 2]])) == len(set(found[0, [1, 3, 4]])) == len(set(found[2])) == 1
    shuffled = scored(form, ESTIMATORS[estimator], REWARDS[:, order])
    np.testing.assert_allclose(shuffled, found[:, order], rtol=1e-12)


# A group with a missing rollout, one of zero variance, one with a filtered rollout.
STORED = """SELECT step, reward, baseline, scale, weight, advantage, form
    FROM rollouts JOIN steps USING (run_id, step) JOIN prompts USING (prompt_id) ORDER BY step, prompt, sample"""


@every_pair
def test_the_store_alone_tells_every_advantage(open_new, form, estimator):
    weights = np.linspace(0.5, 2, 11)
    with Posteriors.create(
        open_new("sqlite"), "run", list("abc"), [""] * 3, estimator=estimator
    ) as posteriors:
        found = observed_eleven(posteriors, 1, form, None)
        found += observed_eleven(posteriors, 2, form, weights)
        posteriors.settle()
        rows = posteriors.store.query(STORED)
    assert [row.advantage for row in rows] == found
    assert {row.form for row in rows} == {form}
    check_arithmetic(rows, [1] * 11 + weights.tolist())
    # The third is missing, the last of a step is not trained on
    for row in (rows[2], rows[10], rows[13], rows[21]):
        assert (row.baseline, row.scale, row.weight, row.advantage) == (None, None, None, 0)
    assert sum(row.baseline is None for row in rows) == 4


def check_arithmetic(rows, weights):
    """The stored numbers of a rollout with a baseline make its advantage."""
    for row, weight in zip(rows, weights, strict=True):
        if row.baseline is None:
            continue
        again = row.weight * (row.reward - row.baseline) / row.scale if row.scale else 0
        assert again == pytest.approx(row.advantage, rel=1e-12, abs=1e-12)
        assert row.weight == pytest.approx(weight)


def observed_eleven(posteriors, step, form, weights):
    """The advantages of a step of three groups; the third reward is missing, the last row is not trained on."""
    prompts = list("aaaabbbcccc")
    rewards = [1, 0, None, 0, 1, 1, 1, 0, 1, 0, 1]
    extras = StepExtras(
        trained=[True] * 10 + [False], responses=Responses([""] * 11, keep=None), weights=weights
    )
    scored = posteriors.observe(step, prompts, [""] * 11, rewards, form=form, extras=extras)
    return scored.advantages.tolist()


def test_the_form_in_contributing_gives_the_signs_of_the_advantages(monkeypatch):
    sources = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), flags=re.DOTALL)
    [source] = [source for source in sources if "(Form)" in source]
    monkeypatch.setattr(FORMS, "_classes", dict(FORMS._classes))
    exec(source, {"__name__": "contributing_example"})
    assert scored("sign", ESTIMATORS["dbb"], GROUPS).tolist() == [[1, -1, 0, -1], [1, 1, 1, 1]]
