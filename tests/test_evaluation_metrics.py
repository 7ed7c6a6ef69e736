"""Measures of sampled answers and paired tests: by hand, against an enumeration of all draws, against scipy."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation.results import Results

NAN = np.nan


def texts(*rows):
    return np.array(rows, dtype=object)


def test_a_missing_sample_is_left_out_not_counted_as_wrong():
    scores = np.array([[1, NAN, 0, 1], [NAN, NAN, NAN, NAN], [0, 0, 0, NAN]])
    np.testing.assert_array_equal(metrics.accuracy(scores), [2 / 3, NAN, 0])
    np.testing.assert_array_equal(metrics.best(scores), [1, NAN, 0])
    assert metrics.best(np.array([0.25, 0.75, NAN])) == 0.75


@settings(deadline=None)  # the first call imports scipy
@given(some.lists(some.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=7), some.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(scores, data):
    k = data.draw(some.integers(1, len(scores)))
    verified = [score for score in scores if score == score]
    draws = [max(draw) for draw in combinations(verified, k)]
    expected = np.mean(draws) if draws else NAN  # fewer than k verified samples
    assert metrics.pass_at_k(len(verified), sum(verified), k) == pytest.approx(expected, nan_ok=True)


def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels():
    assert metrics.pass_at_k(2000, 1, 1000) == pytest.approx(0.5, rel=1e-12)  # one right: k / n


@pytest.mark.parametrize(
    ("scores", "answers", "expected"),
    [
        ([1, 1, 0, 0, 0], ["7", "7", "8", "9", None], 1),
        ([1, 0, 0, 0, 0], ["7", "8", "8", "9", None], 0),
        # 7 and 8 tie with two votes each: right half of the time, whichever comes first
        ([1, 1, 0, 0, 0], ["7", "7", "8", "8", "9"], 0.5),
        # the missing sample has no vote, so that 8 wins
        ([1, NAN, 0, 0], ["7", "7", "8", "8"], 0),
        # a verifier that reads more than the answer: 7 is right in 2 of 3 responses
        ([1, 1, 0, 0], ["7", "7", "7", "8"], 2 / 3),
        # responses without an answer are no vote for anything
        ([0, 0, 0, 1], [None, None, None, "7"], 1),
    ],
)
def test_majority(scores, answers, expected):
    assert metrics.majority(np.array([scores], dtype=float), texts(answers)) == pytest.approx([expected])


def test_majority_of_groups_without_votes():
    scores = np.array([[0.0, 0.0], [NAN, NAN], [1.0, 0.0]])
    answers = texts([None, None], ["7", "7"], ["7", None])
    np.testing.assert_array_equal(metrics.majority(scores, answers), [0, NAN, 1])
    # a verifier that gives no answer to any prompt has no majority
    assert np.isnan(metrics.majority(scores, np.full((3, 2), None))).all()


def results(scores, answers):
    scores = np.array(scores, dtype=float)
    rest = {"tokens_R_P_N": np.full(scores.shape, 10), "truncated_R_P_N": np.zeros(scores.shape, dtype=bool)}
    names = [str(place) for place in range(scores.shape[1])]
    return Results("sums", names, scores, np.array(answers, dtype=object), names, **rest)


def test_fractions_have_no_pass_at_k_and_responses_without_answers_no_majority():
    found = metrics.measures(results([[[0.5, 1, 1]]], [[[None] * 3]]))
    assert found.keys() == {"mean@3", "best@3", "missing", "truncated_rate", "response_length_mean"}
    powers = metrics.measures(results([[[0, 1, 1]]], [[["7", None, None]]]))
    assert [name for name in powers if name.startswith("pass")] == ["pass@1", "pass@2", "pass@3"]


def test_test_and_interval_are_scipys():
    difference_P = np.random.default_rng(0).normal(0.02, 0.1, 60)
    scipys = stats.ttest_1samp(difference_P, 0)
    one_sided = metrics.stratified_t([difference_P])
    two_sided = metrics.stratified_t([difference_P], two_sided=True)
    assert two_sided.p == pytest.approx(scipys.pvalue, rel=1e-9)
    assert one_sided.p == pytest.approx(stats.ttest_1samp(difference_P, 0, alternative="greater").pvalue, rel=1e-9)
    assert (one_sided.low, one_sided.high) == pytest.approx(scipys.confidence_interval())


def test_differences_without_variance_and_one_prompt_test_nothing():
    base = np.array([0.1, 0.3, 0.7])
    same = metrics.stratified_t([base + 0.25 - base])  # 0.1 + 0.25 - 0.1 is not 0.25 in binary
    assert same[:3] == (0.25, 0.25, 0.25) and np.isnan(same.p)
    single = metrics.stratified_t([np.array([0.5])])
    assert single.difference == 0.5
    assert np.isnan(single[1:]).all()


def test_average_by_hand():
    # Means 0.2 and 0.6; variances of the means 0.04 / 2 = 0.02 and 0.12 / 3 = 0.04.
    # Error sqrt(0.06) / 2; degrees 0.06^2 / (0.02^2 / 1 + 0.04^2 / 2) = 0.0036 / 0.0012 = 3.
    first, second = np.array([0.2 - np.sqrt(0.02), 0.2 + np.sqrt(0.02)]), 0.6 + np.sqrt(0.12) * np.array([-1, 0, 1])
    test = metrics.stratified_t([first, second])
    half = 3.182446 * np.sqrt(0.06) / 2  # t of 3 degrees of freedom at 0.975
    assert test == pytest.approx((0.4, 0.4 - half, 0.4 + half, stats.t.sf(0.8 / np.sqrt(0.06), 3)), rel=1e-5)


def test_holm_by_hand():
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 = 0.06 is not below the one before; 0.5 x 1
    assert metrics.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert metrics.holm([0.6, 0.7]) == pytest.approx([1, 1])
    np.testing.assert_allclose(metrics.holm([np.nan, 0.01, 0.02]), [np.nan, 0.02, 0.02])
    assert len(metrics.holm([])) == 0
