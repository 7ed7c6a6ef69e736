"""Paired statistics: by hand, against scipy, and in seeded simulations of models whose difference is known."""

import numpy as np
import pytest
from scipy import stats

from openrlhf_dbb.evaluation import statistics as st

RUNS, SAMPLES = 4, 8


def deviations(share, trials):
    """Standard deviation of a share that is observed in so many trials."""
    return np.sqrt(share * (1 - share) / trials)


def accuracies(rng, p_P, runs=RUNS, effect=0.0):
    """Accuracies of ``SAMPLES`` samples, (R, P); ``effect`` is the standard deviation between runs."""
    p_R_P = np.clip(p_P + rng.normal(0, effect, (runs, 1)), 0, 1)
    return rng.binomial(SAMPLES, p_R_P) / SAMPLES


def two_models(rng, prompts, effect=0.0, gain=0.0, spread=0.1):
    """Two models of success probabilities that differ by ``gain`` + Normal(0, spread), away from 0 and 1."""
    p_P = rng.uniform(0.35, 0.65, prompts)
    better_P = np.clip(p_P + rng.normal(gain, spread, prompts), 0, 1)
    return accuracies(rng, better_P, effect=effect), accuracies(rng, p_P, effect=effect)


def differences(models):
    """Per-prompt accuracy of the first model minus that of the second, (P,)."""
    first_P, second_P = map(st.prompt_means, models)
    return first_P - second_P


def test_paired_t_by_hand():
    # Differences 0.1, 0.2, 0.3: mean 0.2, s = 0.1, t = 0.2 / (0.1 / sqrt 3) = 2 sqrt 3.
    # With 2 degrees of freedom P(T > t) = (1 - t / sqrt(t^2 + 2)) / 2 = (1 - sqrt(12 / 14)) / 2.
    test = st.paired_t(np.array([0.5, 0.7, 0.4]) - np.array([0.4, 0.5, 0.1]))
    assert test.difference == pytest.approx(0.2)
    assert test.error == pytest.approx(0.1 / np.sqrt(3))
    assert test.t == pytest.approx(2 * np.sqrt(3))
    assert test.degrees == 2
    assert test.p == pytest.approx((1 - np.sqrt(12 / 14)) / 2)


def test_the_t_interval_is_scipys():
    difference_P = np.array([0.25, -0.5, 0.0, 0.75, 0.5])
    interval = st.t_interval(st.paired_t(difference_P, two_sided=True))
    assert interval == pytest.approx(stats.ttest_1samp(difference_P, 0).confidence_interval())
    assert st.t_interval(st.paired_t(np.full(3, 0.5))) == (0.5, 0.5)
    assert np.isnan(st.t_interval(st.paired_t(np.array([0.5])))).all()


def test_paired_t_is_scipys():
    a, b = (st.prompt_means(values) for values in two_models(np.random.default_rng(0), 60))
    one_sided, two_sided = st.paired_t(a - b), st.paired_t(a - b, two_sided=True)
    assert one_sided.p == pytest.approx(stats.ttest_rel(a, b, alternative="greater").pvalue, rel=1e-9)
    assert two_sided.p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)
    assert two_sided[:4] == one_sided[:4]
    assert one_sided.p + st.paired_t(b - a).p == pytest.approx(1)


@pytest.mark.parametrize(
    ("differences", "p", "two_sided"),
    [
        ([0.0, 0.0, 0.0], 1, 1),  # the same model twice
        ([0.25, 0.25, 0.25], 1 / 8, 1 / 4),  # 1 of 2^3 choices of signs gives as much, 2 give as much or as little
        ([-0.25, -0.25, -0.25], 1, 1 / 4),
    ],
)
def test_without_variance_p_is_that_of_the_sign_flips(differences, p, two_sided):
    base = np.array([0.1, 0.3, 0.7])  # 0.1 + 0.25 - 0.1 is not 0.25 in binary
    test = st.paired_t(base + differences - base)
    assert (test.p, test.error) == (p, 0)
    assert st.paired_t(base + differences - base, two_sided=True).p == two_sided
    assert np.isnan(test.t)
    assert np.isnan(st.minimum_detectable(test))


def test_one_prompt_tests_nothing():
    test = st.paired_t(np.array([0.5]))
    assert test.difference == 0.5
    assert np.isnan(test.p)
    assert np.isnan(st.minimum_detectable(test))


def test_average_by_hand():
    # Means 0.2 and 0.6; variances of the means 0.04 / 2 = 0.02 and 0.12 / 3 = 0.04.
    # Error sqrt(0.06) / 2; degrees 0.06^2 / (0.02^2 / 1 + 0.04^2 / 2) = 0.0036 / 0.0012 = 3.
    first, second = np.array([0.2 - np.sqrt(0.02), 0.2 + np.sqrt(0.02)]), 0.6 + np.sqrt(0.12) * np.array([-1, 0, 1])
    test = st.stratified_t([first, second])
    assert test.difference == pytest.approx(0.4)
    assert test.error == pytest.approx(np.sqrt(0.06) / 2)
    assert test.degrees == pytest.approx(3)
    assert test.p == pytest.approx(stats.t.sf(0.8 / np.sqrt(0.06), 3))


def test_holm_by_hand():
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 = 0.06 is not below the one before; 0.5 x 1
    assert st.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert st.holm([0.04, 0.03]) == pytest.approx([0.06, 0.06])  # 0.03 x 2, and 0.04 cannot be below it
    assert st.holm([0.6, 0.7]) == pytest.approx([1, 1])
    np.testing.assert_allclose(st.holm([np.nan, 0.01, 0.02]), [np.nan, 0.02, 0.02])
    assert len(st.holm([])) == 0


@pytest.mark.parametrize(("prompts", "spread"), [(30, 0.0), (30, 0.1), (300, 0.1)])
def test_type_one_error(prompts, spread):
    """Equal models in the mean: the t-test rejects at 0.05 as often as it says."""
    rng, trials = np.random.default_rng(prompts), 1000
    rejected = 0
    for _ in range(trials):
        a, b = (st.prompt_means(values) for values in two_models(rng, prompts, spread=spread))
        rejected += st.paired_t(a - b).p < st.ALPHA
    assert abs(rejected / trials - st.ALPHA) < 3 * deviations(st.ALPHA, trials)


def test_type_one_error_of_the_average():
    """Benchmarks of very different size and variance."""
    rng, trials = np.random.default_rng(3), 1000
    rejected = 0
    for _ in range(trials):
        differences = []
        for prompts, spread in ((30, 0.2), (200, 0.1), (60, 0.0)):
            a, b = (st.prompt_means(values) for values in two_models(rng, prompts, spread=spread))
            differences.append(a - b)
        rejected += st.stratified_t(differences).p < st.ALPHA
    assert abs(rejected / trials - st.ALPHA) < 3 * deviations(st.ALPHA, trials)


def test_family_wise_error_of_holm():
    """Nine tests of true hypotheses: at 0.05, any is rejected with probability 1 - (1 - 0.05 / 9)^9."""
    rng, trials = np.random.default_rng(4), 4000
    rejected = sum(st.holm(rng.random(9)).min() < st.ALPHA for _ in range(trials))
    expected = 1 - (1 - st.ALPHA / 9) ** 9
    assert abs(rejected / trials - expected) < 3 * deviations(expected, trials)


def test_power_at_the_detectable_difference():
    """A difference as large as is called detectable, on average over experiments, is found in 8 of 10 of them."""
    rng, trials, prompts = np.random.default_rng(5), 1000, 40
    detectable = np.mean(
        [st.minimum_detectable(st.paired_t(differences(two_models(rng, prompts)))) for _ in range(200)]
    )
    found = sum(st.paired_t(differences(two_models(rng, prompts, gain=detectable))).p < st.ALPHA for _ in range(trials))
    assert abs(found / trials - st.POWER) < 3 * deviations(st.POWER, trials)


def test_detectable_by_hand():
    # 9 prompts, s = 0.3: error 0.1; t of 8 degrees of freedom: 1.8595 at 0.95, 2.3060 at 0.975 and 0.8889 at 0.8.
    test = st.PairedTest(difference=0.0, error=0.1, degrees=8, t=0.0, p=0.5)
    assert st.minimum_detectable(test) == pytest.approx(0.27484, abs=1e-5)
    assert st.minimum_detectable(test, two_sided=True) == pytest.approx(0.31949, abs=1e-5)
