"""A belief about every prompt: its own counts, and a mean that is predicted from its text; both fade by time.

Axes: K discounts, P prompts, D features, S prompts with counts, G rollouts.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.estimators.base import BetaPosterior, Floats, State, counts, latest, passes
from openrlhf_dbb.estimators.registry import register
from openrlhf_dbb.estimators.text_features import WIDTH

DISCOUNTS_K = np.array([0.005, 0.05, 0.3, 0.6, 0.85])  # weights that counts may keep over a pass
PRIOR_WEIGHT = 2.0  # of the predicted mean, in rollouts
RIDGE = 1.0  # 1 / variance that the logits between prompts are expected to have, however many features there are
LOWEST, HIGHEST = 0.02, 0.98  # bounds of a predicted mean
_EVIDENCE_HALF_LIFE = 0.7  # passes
_HALVINGS = 20
_MOST_PROMPTS = 8192  # that the regressions see; keeps large data sets cheap

_SUCCESSES, _FAILURES = ([f"{kind}_{k}" for k in range(len(DISCOUNTS_K))] for kind in ("successes", "failures"))


@register
@dataclass(frozen=True)
class PredictedPrior(BetaPosterior):
    """Beta posterior whose prior mean is predicted from the prompt's text; there is nothing to tune.

    With x_i the features of prompt i, and u_k the passes since its k-th group (S_k successes of N_k)::

        m_i = sigmoid(w . [x_i, 1]), clipped to [0.02, 0.98]
        A_i = sum_k S_k discount^u_k                alpha = 2 m_i + A_i
        B_i = sum_k (N_k - S_k) discount^u_k        beta  = 2 (1 - m_i) + B_i

        mean = alpha / (alpha + beta)        variance = mean (1 - mean) > 0, of ONE reward

    Each of five discounts has counts and weights w of its own. Before a group is seen, first visits included, each
    gives S the beta-binomial probability of its alpha and beta. The discount with the greatest sum of log-probabilities
    is used; a group's weight in the sums halves in 0.7 passes. Passes are counted as by ``auto``.

    A group is scored with a discount and weights that have not seen it. After each update a logistic regression of the
    present counts A, B (of the 8,192 prompts seen last) moves w by one Newton step. With z_i the features standardised
    over these prompts, and D the number of features that vary, it maximises ::

        sum_i A_i log m_i + B_i log(1 - m_i) - RIDGE/2 (c^2 + D |v|^2),        logit m_i = c + v . z_i

    A late group counts as of the update in which it would have been on-policy (:meth:`RewardEstimator.update_late`).

    State:
        alpha, beta: as of the prompt's latest visit, in rollouts, > 0.
        seen_at: the greatest update of the prompt's groups; 0 before any.
        successes_0 to _4, failures_0 to _4: A and B by each discount as of ``seen_at``, in rollouts, >= 0.
        weights (shared): (5 (D + 1),), w of each discount; the last one of each is the constant.
        evidence (shared): (5,), the faded sums of log-probabilities, without the binomial coefficients.
        discount (shared): the one that is used next.
        prompts (shared): number of distinct prompts seen.
        clock (shared): numbers of updates and of groups so far.

    Source: our own. Prompt-conditional priors are also in DUET, arXiv:2605.08441.
    """

    name: ClassVar[str] = "predicted_prior"
    version: ClassVar[int] = 2  # 1 had one discount, which was given
    reads_texts: ClassVar[bool] = True
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta", "seen_at", *_SUCCESSES, *_FAILURES)
    shared_fields: ClassVar[tuple[str, ...]] = ("weights", "evidence", "discount", "prompts", "clock")

    def initial_state(self, num_prompts: int) -> State:
        return {
            **{name: np.full(num_prompts, 0.5 * PRIOR_WEIGHT) for name in ("alpha", "beta")},
            **{name: np.zeros(num_prompts) for name in ("seen_at", *_SUCCESSES, *_FAILURES)},
            "weights": np.zeros(len(DISCOUNTS_K) * (WIDTH + 1)),
            "evidence": np.zeros(len(DISCOUNTS_K)),
            "discount": DISCOUNTS_K[:1].copy(),
            "prompts": np.zeros(1),
            "clock": np.zeros(2),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        return self.update_late(state, rewards_P_G, np.zeros(len(rewards_P_G)))

    def update_late(self, state: State, rewards_P_G: Floats, lag_P: Floats) -> State:
        successes, rollouts = counts(rewards_P_G)
        failures, most = rollouts - successes, rewards_P_G.shape[1]
        generated_at = state["clock"][0] + 1 - lag_P
        seen_at = latest(state["seen_at"], generated_at, state[_SUCCESSES[0]] + state[_FAILURES[0]] == 0)
        alpha_K_P, beta_K_P = _forecasts(state, seen_at)
        scores_K_P = _log_rising(alpha_K_P, successes, most) + _log_rising(beta_K_P, failures, most)
        scores_K_P -= _log_rising(alpha_K_P + beta_K_P, rollouts, most)  # the binomial coefficient is common to all
        passed = len(successes) / max(state["prompts"][0], 1)
        evidence = 0.5 ** (passed / _EVIDENCE_HALF_LIFE) * state["evidence"] + scores_K_P.sum(axis=1)
        chosen = state["evidence"].argmax()  # before the group was seen
        old_successes_K_P, old_failures_K_P = _counts(state, seen_at)
        weight_K_P = _kept(state, seen_at - generated_at)
        return state | {
            "alpha": alpha_K_P[chosen] + weight_K_P[chosen] * successes,
            "beta": beta_K_P[chosen] + weight_K_P[chosen] * failures,
            "seen_at": seen_at,
            **dict(zip(_SUCCESSES, old_successes_K_P + weight_K_P * successes, strict=True)),
            **dict(zip(_FAILURES, old_failures_K_P + weight_K_P * failures, strict=True)),
            "evidence": evidence,
            "discount": DISCOUNTS_K[[evidence.argmax()]],
            "clock": state["clock"] + [1, len(successes)],
        }

    def learn(self, state: State) -> State:
        seen = np.flatnonzero(state[_SUCCESSES[0]] + state[_FAILURES[0]])
        if not len(seen):
            return {}
        prompts = np.full(1, float(len(seen)))
        seen = seen[np.argsort(-state["seen_at"][seen], kind="stable")[:_MOST_PROMPTS]]
        known = self.state_at(state, seen) | {"prompts": prompts}
        features_S_D = known["features"]
        center, spread = features_S_D.mean(axis=0), features_S_D.std(axis=0)
        varies = spread > 1e-12 * np.abs(center)  # rounding gives a constant column a spread, too
        scale = np.where(varies, spread, 1.0)
        x_S_W = np.column_stack([np.where(varies, (features_S_D - center) / scale, 0.0), np.ones(len(seen))])
        penalty = RIDGE * np.append(np.full(len(scale), max(varies.sum(), 1.0)), 1.0)
        weights_K_W = state["weights"].reshape(len(DISCOUNTS_K), -1)
        slopes = weights_K_W[:, :-1]
        start_K_W = np.column_stack([np.where(varies, slopes * scale, 0.0), weights_K_W[:, -1] + slopes @ center])
        counted = zip(start_K_W, *_counts(known, state["clock"][0]), strict=True)
        fitted_K_W = np.stack([_fitted(x_S_W, *of_discount, penalty) for of_discount in counted])
        slopes = fitted_K_W[:, :-1] / scale
        weights = np.column_stack([slopes, fitted_K_W[:, -1] - slopes @ center])
        return {"weights": weights.ravel(), "prompts": prompts}

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        alpha_K_P, beta_K_P = _forecasts(state, state["clock"][0] + 1)
        chosen = state["evidence"].argmax()
        return alpha_K_P[chosen], beta_K_P[chosen]


def _kept(state: State, updates: Floats) -> Floats:
    """Return what each discount leaves of counts after some updates, (K, P)."""
    # The updates since a visit that never was may be negative.
    return np.asarray(DISCOUNTS_K[:, None] ** np.maximum(passes(state, updates), 0))


def _counts(state: State, at: Floats) -> tuple[Floats, Floats]:
    """Return A and B as of an update, each (K, P)."""
    kept_K_P = _kept(state, at - state["seen_at"])
    successes_K_P, failures_K_P = (np.stack([state[name] for name in names]) for names in (_SUCCESSES, _FAILURES))
    return kept_K_P * successes_K_P, kept_K_P * failures_K_P


def _forecasts(state: State, at: Floats) -> tuple[Floats, Floats]:
    """Return alpha and beta at an update before its groups are seen, each (K, P)."""
    weights_K_W = state["weights"].reshape(len(DISCOUNTS_K), -1)
    logit_K_P = weights_K_W[:, :-1] @ state["features"].T + weights_K_W[:, -1:]
    mean_K_P = np.clip(_sigmoid(logit_K_P), LOWEST, HIGHEST)
    successes_K_P, failures_K_P = _counts(state, at)
    return PRIOR_WEIGHT * mean_K_P + successes_K_P, PRIOR_WEIGHT * (1 - mean_K_P) + failures_K_P


def _log_rising(start_K_P: Floats, factors: Floats, most: int) -> Floats:
    """Return log(start (start + 1) ...), a product of ``factors`` <= ``most`` factors, (K, P)."""
    each_G = np.arange(most)
    return np.asarray(np.where(each_G < factors[:, None], np.log(start_K_P[..., None] + each_G), 0.0).sum(axis=-1))


def _fitted(x_S_W: Floats, weights: Floats, successes: Floats, failures: Floats, penalty: Floats) -> Floats:
    """Return the weights of a ridge logistic regression, one Newton step from ``weights``."""
    rollouts = successes + failures

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
