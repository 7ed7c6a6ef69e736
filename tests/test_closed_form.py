"""Errors of estimates: closed forms against the paper's formulas and the estimators themselves, and probes.

Axes: Q prompts (sequences of success probabilities), T visits, R replicas, G rollouts per group.
"""

import numpy as np
import pytest

from openrlhf_dbb.estimators import build
from openrlhf_dbb.estimators.closed_form import fitted_prior, moments
from openrlhf_dbb.estimators.probe_error import mean_variance, squared_errors

P_Q_T = np.random.default_rng(0).uniform(0.05, 0.95, (20, 4))


def printed_mse(name, lam, p, t, n):
    """The paper's equations for visit t (1-based): section 3.3 and the appendices on EMA and Laplace smoothing."""
    now, k = p[t - 1], np.arange(1, t + 1)
    noise = p[:t] * (1 - p[:t])
    if name == "point":
        return now * (1 - now) / n
    if name == "laplace":
        return (lam**2 + (n - 4 * lam**2) * now * (1 - now)) / (n + 2 * lam) ** 2
    if name == "ema":
        w = np.where(k == 1, lam ** (t - 1), (1 - lam) * lam ** (t - k))
        return (w @ (p[:t] - now)) ** 2 + w**2 @ noise / n
    h = lam**t * 2 + n * (lam ** (t - k)).sum()  # DBB with prior (1, 1), whose mean is 1/2
    bias = lam**t * 2 / h * (0.5 - now) + (n * lam ** (t - k) / h) @ (p[:t] - now)
    return bias**2 + (lam ** (2 * (t - k)) * n) @ noise / h**2


@pytest.mark.parametrize("rollouts", [1, 8])
@pytest.mark.parametrize("lam", [0.05, 0.4, 0.95])
@pytest.mark.parametrize(
    ("name", "parameter"), [("point", None), ("dbb", "discount"), ("ema", "discount"), ("laplace", "smoothing")]
)
def test_the_papers_formulas(name, parameter, lam, rollouts):
    estimator = build(name, **({parameter: lam} if parameter else {}))
    expected = [[printed_mse(name, lam, p_T, t, rollouts) for t in range(1, 5)] for p_T in P_Q_T]
    np.testing.assert_allclose(moments(estimator, P_Q_T, rollouts).mse, expected, rtol=1e-12)


def test_the_papers_formula_of_empirical_bayes():
    alpha_T, beta_T = fitted_prior(P_Q_T, 8).T
    nu_T, m_T = alpha_T + beta_T, alpha_T / (alpha_T + beta_T)
    expected = (nu_T**2 * (m_T - P_Q_T) ** 2 + 8 * P_Q_T * (1 - P_Q_T)) / (8 + nu_T) ** 2
    np.testing.assert_allclose(moments(build("empirical_bayes"), P_Q_T, 8).mse, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("dbb", {"discount": 0.6, "prior_alpha": 0.5, "prior_beta": 2.0}), ("ema", {"discount": 0.4})],
)
def test_monte_carlo_agrees_within_4_standard_errors(name, parameters):
    estimator, rng, replicas, rollouts = build(name, **parameters), np.random.default_rng(1), 4000, 4
    prompts, visits = P_Q_T.shape
    state, means_T = estimator.initial_state(prompts * replicas), []
    for t in range(visits):
        p = np.repeat(P_Q_T[:, t], replicas)
        state, estimate = estimator.observe(state, (rng.random((len(p), rollouts)) < p[:, None]).astype(float))
        means_T.append(estimate.mean)
    error_Q_T_R = np.stack(means_T).reshape(visits, prompts, replicas).swapaxes(0, 1) - P_Q_T[:, :, None]
    exact = moments(estimator, P_Q_T, rollouts)
    for samples, expected in ((error_Q_T_R, exact.bias), (error_Q_T_R**2, exact.mse)):
        standard_error = samples.std(axis=2, ddof=1) / np.sqrt(replicas)
        assert np.all(np.abs(samples.mean(axis=2) - expected) < 4 * standard_error)


def test_empirical_bayes_expects_the_prior_that_many_prompts_give():
    p_Q_T = np.random.default_rng(2).beta([2.0, 1.0, 0.5], [1.0, 1.0, 1.0], (200_000, 3))
    eb, rng, priors_T = build("empirical_bayes"), np.random.default_rng(3), []
    state = eb.initial_state(len(p_Q_T))
    for p_Q in p_Q_T.T:
        state, _ = eb.observe(state, (rng.random((len(p_Q), 4)) < p_Q[:, None]).astype(float))
        priors_T.append(state["prior"])
    np.testing.assert_allclose(fitted_prior(p_Q_T, 4), priors_T, rtol=0.02)


def test_visits_that_never_came_are_nan_and_change_nothing():
    whole = moments(build("dbb"), [[0.2, 0.4, 0.9]], 8)
    ended = moments(build("dbb"), [[0.2, 0.4, np.nan], [np.nan] * 3], 8)
    assert np.array_equal(ended.mse[0, :2], whole.mse[0, :2])
    assert np.isnan(ended.mse[0, 2]) and np.isnan(ended.bias[1]).all() and np.isnan(ended.variance[1]).all()


def test_the_noise_of_a_probe_is_taken_out_of_squared_errors():
    samples, successes, squares = np.array([4, 4, 5]), np.array([2.0, 3.0, 5.0]), np.array([1.5, 3.0, 5.0])
    # Scores 1 1 0.5 ... of mean 1/2: (1.5 - 4/4) / (4 * 3); 3/4: (3 - 9/4) / 12; all 1: no noise.
    noise = [0.5 / 12, 0.75 / 12, 0]
    assert mean_variance(samples, successes, squares) == pytest.approx(noise)
    errors = squared_errors(np.array([0.5, 0.4, 0.9]), samples, successes, squares)
    assert errors == pytest.approx([-noise[0], 0.35**2 - noise[1], 0.1**2])
    one = np.ones(1)
    assert np.isnan(squared_errors(0.5 * one, one, one, one)).all()
