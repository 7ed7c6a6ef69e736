"""Prior means that are predicted from the prompts' texts, and the score by which forecasts are judged.

Axes: K regressions, P prompts, D features, W = D + 1 weights, S prompts with counts, C forecasts.
"""

import numpy as np

from openrlhf_dbb.estimators.base import Floats

RIDGE = 0.1  # 1 / variance that the logits between prompts are expected to have, however many features there are
LOWEST, HIGHEST = 0.005, 0.995  # bounds of a predicted mean
_HALVINGS = 20


def predicted(weights_K_W: Floats, features_P_D: Floats) -> Floats:
    """Return the mean that each regression predicts, (K, P), in [0.005, 0.995]; the last weight is the constant."""
    return np.clip(_sigmoid(weights_K_W[:, :-1] @ features_P_D.T + weights_K_W[:, -1:]), LOWEST, HIGHEST)


def learned(weights_K_W: Floats, features_S_D: Floats, successes_K_S: Floats, rollouts_K_S: Floats) -> Floats:
    """Return the weights, (K, W), after one Newton step of a ridge logistic regression of the counts.

    With z_i the features minus their means, divided by their deviations over these prompts or by the root mean square
    of all deviations where that is larger, and D the number of features that vary, it maximises ::

        sum_i A_i log m_i + B_i log(1 - m_i) - RIDGE/2 (c^2 + D |v|^2),        logit m_i = c + v . z_i
    """
    center, spread = features_S_D.mean(axis=0), features_S_D.std(axis=0)
    varies = spread > 1e-12 * np.abs(center)  # rounding gives a constant column a spread, too
    # A column that hardly varies here tells nothing of a prompt that differs in it: it stays small.
    typical = np.sqrt(np.mean(spread[varies] ** 2)) if varies.any() else 1.0
    scale = np.maximum(spread, typical)
    x_S_W = np.column_stack([np.where(varies, (features_S_D - center) / scale, 0.0), np.ones(len(features_S_D))])
    penalty = RIDGE * np.append(np.full(len(scale), max(varies.sum(), 1.0)), 1.0)
    slopes = weights_K_W[:, :-1]
    start_K_W = np.column_stack([np.where(varies, slopes * scale, 0.0), weights_K_W[:, -1] + slopes @ center])
    counted = zip(start_K_W, successes_K_S, rollouts_K_S, strict=True)
    fitted_K_W = np.stack([_fitted(x_S_W, *of_one, penalty) for of_one in counted])
    slopes = fitted_K_W[:, :-1] / scale
    return np.column_stack([slopes, fitted_K_W[:, -1] - slopes @ center])


def log_score(alpha_C_P: Floats, beta_C_P: Floats, successes: Floats, rollouts: Floats) -> Floats:
    """Return the beta-binomial log-probability by each forecast, (C, P), without the coefficient common to all."""
    of_successes, of_failures = _log_rising(alpha_C_P, successes), _log_rising(beta_C_P, rollouts - successes)
    return of_successes + of_failures - _log_rising(alpha_C_P + beta_C_P, rollouts)


def _log_rising(start_C_P: Floats, factors: Floats) -> Floats:
    """Return log(start (start + 1) ...), a product of ``factors`` factors."""
    total_C_P = np.zeros(start_C_P.shape)
    for factor in range(int(np.ceil(factors.max(initial=0)))):
        total_C_P += np.where(factor < factors, np.log(start_C_P + factor), 0.0)
    return total_C_P


def _fitted(x_S_W: Floats, weights: Floats, successes: Floats, rollouts: Floats, penalty: Floats) -> Floats:
    def log_posterior(weights: Floats) -> float:
        logit = x_S_W @ weights
        return float(successes @ logit - rollouts @ np.logaddexp(0, logit) - 0.5 * penalty @ weights**2)

    mean, before = _sigmoid(x_S_W @ weights), log_posterior(weights)
    gradient = x_S_W.T @ (successes - rollouts * mean) - penalty * weights
    curvature = (x_S_W.T * (rollouts * mean * (1 - mean))) @ x_S_W + np.diag(penalty)
    step = np.linalg.solve(curvature, gradient)
    for halvings in range(_HALVINGS):  # a full step may overshoot
        nearer = weights + 0.5**halvings * step
        if log_posterior(nearer) >= before - 1e-9 * abs(before):  # rounding
            return np.asarray(nearer)
    return weights


def _sigmoid(logit: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * logit)
