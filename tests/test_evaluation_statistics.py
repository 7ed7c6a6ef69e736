"""Paired statistics: by hand, against scipy, and in seeded simulations of models whose difference is known."""

import numpy as np
import pytest
from scipy import stats

from openrlhf_dbb.evaluation import metrics
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


def test_signed_rank_by_hand():
    # Differences 0.125, 0.25, -0.375 have ranks 1, 2, 3: W+ = 3 of 0 ... 6; 5 of the 8 signs give 3 or more.
    assert st.wilcoxon_signed_rank(np.array([0.125, 0.25, -0.375])) == 5 / 8
    assert st.wilcoxon_signed_rank(np.zeros(3)) == 1


def test_signed_rank_ties_are_those_of_the_fractions():
    # 0.3 - 0.1 and 0.4 - 0.2 differ in binary, but are the same rank.
    a, b = np.array([0.3, 0.4, 0.9, 0.5, 0.1]), np.array([0.1, 0.2, 0.3, 0.9, 0.15])
    exact = np.array([4.0, 4.0, 12.0, -8.0, -1.0])  # in units of 0.05
    expected = stats.wilcoxon(exact, alternative="greater").pvalue
    assert st.wilcoxon_signed_rank(a - b) == pytest.approx(expected)


def test_sign_test_by_hand():
    # Four prompts better, one worse, one the same: P(4 or 5 of 5 heads) = 6 / 32.
    assert st.sign_test(np.array([1, 0.5, 1, 0.1, -1, 0])) == pytest.approx(6 / 32)
    assert st.sign_test(np.zeros(3)) == 1


def test_holm_by_hand():
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 = 0.06 is not below the one before; 0.5 x 1
    assert st.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert st.holm([0.04, 0.03]) == pytest.approx([0.06, 0.06])  # 0.03 x 2, and 0.04 cannot be below it
    assert st.holm([0.6, 0.7]) == pytest.approx([1, 1])
    np.testing.assert_allclose(st.holm([np.nan, 0.01, 0.02]), [np.nan, 0.02, 0.02])
    assert len(st.holm([])) == 0


def test_run_effects_by_hand():
    # Prompts' means are 1/4, 1/2 and 3/4, the runs' effects +-1/12, and the noise around both is +-1/6 or 1/12.
    accuracy_R_P = np.array([[0.5, 0.5, 0.75], [0.0, 0.5, 0.75]])
    # within: ((1/6)^2 + (1/12)^2 + (1/12)^2) x 2 / (1 x 2 x 3) = 1/72; between: 2 (1/12)^2 = 1/72: nothing is kept.
    assert st.run_effects(accuracy_R_P).tolist() == [0, 0]
    # Without noise all is kept, and widened by sqrt(R / (R - 1)) = sqrt 2.
    shifted = np.array([[0.5, 0.625], [0.25, 0.375]])
    np.testing.assert_allclose(st.run_effects(shifted), [np.sqrt(2) / 8, -np.sqrt(2) / 8])
    assert st.run_effects(np.array([[0.5, 0.25]])).tolist() == [0]


def test_run_effects_do_without_missing_groups():
    shifted = np.array([[0.5, 0.625, np.nan], [0.25, 0.375, 0.5]])
    effects = st.run_effects(shifted)
    assert effects[0] > 0
    assert effects.sum() == pytest.approx(0)


def test_bootstrap_by_hand():
    """Two prompts: a draw takes the first twice, both, or the second twice; sqrt(2 / 1) is the widening."""
    first, second = np.array([[0.2, 0.6]]), np.array([[0.5, 0.5]])
    draws_M_B = st.bootstrap_means([first, second], np.random.default_rng(0))
    found, times = np.unique(draws_M_B[0].round(9), return_counts=True)
    assert found == pytest.approx([0.4 - 0.2 * np.sqrt(2), 0.4, 0.4 + 0.2 * np.sqrt(2)])
    assert times / st.DRAWS == pytest.approx([0.25, 0.5, 0.25], abs=4 * deviations(0.5, st.DRAWS))
    assert draws_M_B[1] == pytest.approx(0.5)


def test_bootstrap_is_paired_and_repeats():
    accuracy = accuracies(np.random.default_rng(0), np.full(50, 0.5), runs=1)
    draws_M_B = st.bootstrap_means([accuracy, accuracy], np.random.default_rng(1))
    assert draws_M_B[0].std() > 0
    np.testing.assert_array_equal(draws_M_B[0], draws_M_B[1])
    np.testing.assert_array_equal(draws_M_B, st.bootstrap_means([accuracy, accuracy], np.random.default_rng(1)))


def test_interval():
    assert st.interval(np.linspace(0, 1, 1001)) == pytest.approx((0.025, 0.975))


@pytest.mark.parametrize(("prompts", "spread"), [(30, 0.0), (30, 0.1), (300, 0.1)])
def test_type_one_error(prompts, spread):
    """Equal models in the mean: each test rejects at 0.05 as often as it says, the exact ones at most so often."""
    rng, trials = np.random.default_rng(prompts), 1000
    rejected = np.zeros(3)
    for _ in range(trials):
        a, b = (st.prompt_means(values) for values in two_models(rng, prompts, spread=spread))
        p = (st.paired_t(a - b).p, st.wilcoxon_signed_rank(a - b), st.sign_test(a - b))
        rejected += np.array(p) < st.ALPHA
    t, signed_rank, sign = rejected / trials
    bound = 3 * deviations(st.ALPHA, trials)
    assert abs(t - st.ALPHA) < bound
    assert abs(signed_rank - st.ALPHA) < bound
    assert sign < st.ALPHA + bound


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


@pytest.mark.parametrize(
    ("prompts", "spread", "effect", "least", "most"),
    [
        (200, 0.15, 0.0, 0.93, 0.97),
        (30, 0.15, 0.0, 0.93, 0.97),
        # Equal models, all noise is sampling's: a little is taken for effects of runs. With runs as they are: 0.996.
        (200, 0.0, 0.0, 0.95, 0.985),
        # Runs that differ as much as the rest: four of them do not tell by how much. Without runs: 0.6.
        (200, 0.1, 0.03, 0.88, 0.95),
    ],
)
def test_coverage_of_the_bootstrap_interval(prompts, spread, effect, least, most):
    """The 95 % interval of the difference holds the true one, 0, about as often as it says."""
    rng, trials = np.random.default_rng(prompts), 1000
    covered = 0
    for _ in range(trials):
        pair = two_models(rng, prompts, spread=spread, effect=effect)
        first_B, second_B = st.bootstrap_means(pair, rng, draws=500)
        low, high = st.interval(first_B - second_B)
        covered += low <= 0 <= high
    assert least < covered / trials < most  # a standard deviation of this share is 0.007, or 0.009 in the last case


def test_interval_of_an_average_is_as_wide_as_its_error():
    rng = np.random.default_rng(6)
    pairs = [two_models(rng, prompts, spread=0.1) for prompts in (100, 400, 900)]
    draws = [np.subtract(*st.bootstrap_means(pair, rng, draws=4000)) for pair in pairs]
    test = st.stratified_t([metrics.accuracy(a.T) - metrics.accuracy(b.T) for a, b in pairs])
    low, high = st.interval(np.mean(draws, axis=0))
    assert (high - low) / (2 * 1.96 * test.error) == pytest.approx(1, abs=0.15)
