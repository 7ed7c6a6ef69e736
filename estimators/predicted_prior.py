"""DBB by updates whose prior mean is predicted for each prompt from features of its text.

Axes: P prompts, D features, S prompts with counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.estimators.base import FadingPosterior, Floats, State, counts, latest
from openrlhf_dbb.estimators.parameters import parameter
from openrlhf_dbb.estimators.registry import register
from openrlhf_dbb.estimators.text_features import WIDTH

RIDGE = 1.0
"""1 / variance that the logits between prompts are expected to have, however many features there are."""

LOWEST, HIGHEST = 0.02, 0.98
"""Bounds of a predicted mean."""

_NEWTON_STEPS = 2
_HALVINGS = 20
_MOST_PROMPTS = 8192  # that the regression sees; keeps large data sets cheap


@register
@dataclass(frozen=True)
class PredictedPrior(FadingPosterior):
    """Beta posterior whose prior mean is predicted from the prompt's text; its counts fade with the policy updates.

    With x_i the features of prompt i, g_k the update of its k-th group (S_k successes of N_k), now the present update
    and E the updates of an epoch::

        m_i = sigmoid(w . [x_i, 1]), clipped to [0.02, 0.98]
        A_i = sum_k S_k discount^((now - g_k)/E)                alpha = prior_weight m_i + A_i
        B_i = sum_k (N_k - S_k) discount^((now - g_k)/E)        beta  = prior_weight (1 - m_i) + B_i

        mean = alpha / (alpha + beta)        variance = mean (1 - mean) > 0, of ONE reward

    A group is scored with weights w that have not seen it. After each update a logistic regression of the present
    counts A, B (of the 8,192 prompts seen last) moves w by two Newton steps. With z_i the features standardised over
    these prompts, and D the number of features that vary, it maximises ::

        sum_i A_i log m_i + B_i log(1 - m_i) - RIDGE/2 (c^2 + D |v|^2),        logit m_i = c + v . z_i

    A late group counts as of the update in which it would have been on-policy (:meth:`RewardEstimator.update_late`).

    State:
        alpha, beta: as of the prompt's latest visit, in rollouts, > 0.
        successes, failures: A and B as of update ``seen_at``, in rollouts, >= 0.
        seen_at: the greatest g of the prompt's groups; 0 before any.
        weights (shared): (D + 1,), w; the last one is the constant.
        updates (shared): number of updates so far.

    Source: our own. Prompt-conditional priors are also in DUET, arXiv:2605.08441.
    """

    discount: float = parameter(0.85, "weight that counts keep over an epoch", within="(0, 1]")
    prior_weight: float = parameter(2.0, "weight of the predicted mean, in rollouts", within="(0, inf)")
    # E; 0 asks the trainer to fill it in.
    updates_per_epoch: float = parameter(0.0, "policy updates in an epoch", within="[0, inf)", flag=False)

    name: ClassVar[str] = "predicted_prior"
    reads_texts: ClassVar[bool] = True
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta", "successes", "failures", "seen_at")
    shared_fields: ClassVar[tuple[str, ...]] = ("weights", "updates")

    def initial_state(self, num_prompts: int) -> State:
        return {
            "alpha": np.full(num_prompts, 0.5 * self.prior_weight),
            "beta": np.full(num_prompts, 0.5 * self.prior_weight),
            **{name: np.zeros(num_prompts) for name in ("successes", "failures", "seen_at")},
            "weights": np.zeros(WIDTH + 1),
            "updates": np.zeros(1),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        return self.update_late(state, rewards_P_G, np.zeros(len(rewards_P_G)))

    def update_late(self, state: State, rewards_P_G: Floats, lag_P: Floats) -> State:
        new, rollouts = counts(rewards_P_G)
        now = state["updates"] + 1
        generated_at, never = now - lag_P, state["successes"] + state["failures"] == 0
        seen_at = latest(state["seen_at"], generated_at, never)
        kept, weight = self._faded(np.where(never, 0, seen_at - state["seen_at"])), self._faded(seen_at - generated_at)
        successes = kept * state["successes"] + weight * new
        failures = kept * state["failures"] + weight * (rollouts - new)
        mean = self._predicted(state)
        return {
            "alpha": self.prior_weight * mean + successes,
            "beta": self.prior_weight * (1 - mean) + failures,
            "successes": successes,
            "failures": failures,
            "seen_at": seen_at,
            "weights": state["weights"],
            "updates": now,
        }

    def learn(self, state: State) -> State:
        seen = np.flatnonzero(state["successes"] + state["failures"])
        if not len(seen):
            return {}
        seen = seen[np.argsort(-state["seen_at"][seen], kind="stable")[:_MOST_PROMPTS]]
        known = self.state_at(state, seen)
        features_S_D = known["features"]
        center, spread = features_S_D.mean(axis=0), features_S_D.std(axis=0)
        varies = spread > 1e-12 * np.abs(center)  # rounding gives a constant column a spread, too
        scale = np.where(varies, spread, 1.0)
        z_S_D = np.where(varies, (features_S_D - center) / scale, 0.0)
        slopes, constant = state["weights"][:-1], state["weights"][-1]
        fitted = _fitted(
            np.column_stack([z_S_D, np.ones(len(seen))]),
            *self._counts(known, state["updates"]),
            np.append(np.where(varies, slopes * scale, 0.0), constant + slopes @ center),
            RIDGE * np.append(np.full(len(slopes), max(varies.sum(), 1.0)), 1.0),
        )
        slopes = fitted[:-1] / scale
        return {"weights": np.append(slopes, fitted[-1] - slopes @ center)}

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        successes, failures = self._counts(state, state["updates"] + 1)
        mean = self._predicted(state)
        return self.prior_weight * mean + successes, self.prior_weight * (1 - mean) + failures

    def _predicted(self, state: State) -> Floats:
        """Return m of each prompt, (P,)."""
        weights = state["weights"]
        return np.clip(_sigmoid(state["features"] @ weights[:-1] + weights[-1]), LOWEST, HIGHEST)

    def _counts(self, state: State, now: Floats) -> tuple[Floats, Floats]:
        """Return A and B as of an update, each (P,)."""
        kept = self._faded(now - state["seen_at"])
        return kept * state["successes"], kept * state["failures"]


def _fitted(x_S_W: Floats, successes: Floats, failures: Floats, weights: Floats, penalty: Floats) -> Floats:
    """Return the weights of a ridge logistic regression, two Newton steps from ``weights``."""
    rollouts = successes + failures

    def log_posterior(weights: Floats) -> float:
        logit = x_S_W @ weights
        return float(successes @ logit - rollouts @ np.logaddexp(0, logit) - 0.5 * penalty @ weights**2)

    for _ in range(_NEWTON_STEPS):
        mean = _sigmoid(x_S_W @ weights)
        gradient = x_S_W.T @ (successes - rollouts * mean) - penalty * weights
        curvature = (x_S_W.T * (rollouts * mean * (1 - mean))) @ x_S_W + np.diag(penalty)
        step, before = np.linalg.solve(curvature, gradient), log_posterior(weights)
        for halvings in range(_HALVINGS):  # a full step may overshoot
            nearer = weights + 0.5**halvings * step
            if log_posterior(nearer) >= before - 1e-9 * abs(before):  # rounding
                weights = nearer
                break
    return weights


def _sigmoid(logit: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * logit)
