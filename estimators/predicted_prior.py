"""DBB by updates whose prior mean is predicted for each prompt from features of the prompt.

Axes: P prompts, D features, S prompts with counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from estimators.base import FEATURES, Estimate, Floats, RewardEstimator, State, bernoulli, counts
from estimators.registry import register

LOWEST, HIGHEST = 0.02, 0.98
"""Bounds of a predicted mean."""

_NEWTON_STEPS = 2
_HALVINGS = 20
_MOST_PROMPTS = 8192  # that the regression sees; keeps large data sets cheap


@register
@dataclass(frozen=True)
class PredictedPrior(RewardEstimator):
    """Beta posterior whose prior mean is predicted from the prompt; its counts fade with the policy updates.

    With x_i the features of prompt i, g_k the update of its k-th group (S_k successes of N_k), now the present update
    and E the updates of an epoch::

        m_i = sigmoid(w . [x_i, 1]), clipped to [0.02, 0.98]
        A_i = sum_k S_k discount^((now - g_k)/E)                alpha = prior_weight m_i + A_i
        B_i = sum_k (N_k - S_k) discount^((now - g_k)/E)        beta  = prior_weight (1 - m_i) + B_i

        mean = alpha / (alpha + beta)        variance = mean (1 - mean) > 0, of ONE reward

    so that a prompt's first visit already profits from what all others have shown, and its old counts fade towards
    the prediction. A group is scored with weights w that have not seen it. After each update a logistic regression of
    the present counts A, B (of the 8,192 prompts seen last) moves w by two Newton steps. With z_i the features
    standardised over these prompts it maximises ::

        sum_i A_i log m_i + B_i log(1 - m_i) - ridge/2 (c^2 + D |v|^2),        logit m_i = c + v . z_i

    where D counts the features that vary. This says beforehand that the logits' variance between prompts is about
    1/ridge, however many features there are and whatever their scale. w is v and c in the features' own units. With
    ``features="none"`` all prompts have the same prior mean.

    A late group (a lag above 0) counts as of update ``g = now - lag``, in which it would have been on-policy.

    Args:
        discount: in (0, 1], weight that counts keep over an epoch. 1 never forgets.
        prior_weight: > 0, weight of the prediction, in rollouts.
        ridge: > 0, as above.
        features: "text" (n-grams of the prompt, see :mod:`estimators.text_features`), "hidden" (from the trainer: the
            policy's hidden state at the end of the prompt) or "none".
        updates_per_epoch: > 0, E. 0: filled in by the trainer.
        partial_credit: accept scores in [0, 1], counted as fractional successes, not only 0 or 1.

    State:
        alpha, beta: as of the prompt's latest visit, in rollouts, > 0.
        successes, failures: A and B as of update ``seen_at``, in rollouts, >= 0.
        seen_at: the greatest g of the prompt's groups; 0 before any.
        weights (shared): (D + 1,), w; the last one is the constant.
        updates (shared): number of updates so far.

    Raises:
        ValueError: a parameter is outside its range.

    Example:
        >>> prior = PredictedPrior(features="none", updates_per_epoch=1)
        >>> state, estimate = prior.observe(prior.initial_state(2), [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
        >>> estimate.mean  # (2 m + S) / (2 + N) with m = 1/2
        array([0.8, 0.6])
        >>> alpha, beta = prior.predictive(state)
        >>> (alpha / (alpha + beta)).round(3)  # from now on m = sigmoid(0.795) = 0.689
        array([0.866, 0.679])

    Source: our own. Prompt-conditional priors are also in DUET, arXiv:2605.08441.
    """

    discount: float = field(default=0.85, metadata={"help": "weight that counts keep over an epoch, in (0, 1]"})
    prior_weight: float = field(default=2.0, metadata={"help": "weight of the predicted mean, in rollouts, > 0"})
    ridge: float = field(default=1.0, metadata={"help": "1 / variance of the logits between prompts, > 0"})
    features: str = field(
        default="text", metadata={"help": "what the prior mean is predicted from", "choices": list(FEATURES)}
    )
    updates_per_epoch: float = field(
        default=0.0, metadata={"help": "policy updates of an epoch; 0: one pass over the data"}
    )
    partial_credit: bool = field(default=False, metadata={"help": "accept scores in [0, 1], not only 0 or 1"})

    name: ClassVar[str] = "predicted_prior"
    state_fields: ClassVar[tuple[str, ...]] = ("alpha", "beta", "successes", "failures", "seen_at")
    shared_fields: ClassVar[tuple[str, ...]] = ("weights", "updates")
    never_collapses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ValueError(f"predicted_prior.discount = {self.discount!r} is not in (0, 1]")
        for parameter in ("prior_weight", "ridge"):
            value = getattr(self, parameter)
            if not 0 < value < np.inf:
                raise ValueError(f"predicted_prior.{parameter} = {value!r} is not a finite number above 0")
        if self.features not in FEATURES:
            raise ValueError(f"predicted_prior.features = {self.features!r} is none of {', '.join(FEATURES)}")
        if not 0 <= self.updates_per_epoch < np.inf:
            raise ValueError(
                f"predicted_prior.updates_per_epoch = {self.updates_per_epoch!r} is not a finite number >= 0"
            )

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        return "unit" if self.partial_credit else "binary"

    def initial_state(self, num_prompts: int) -> State:
        return {
            "alpha": np.full(num_prompts, 0.5 * self.prior_weight),
            "beta": np.full(num_prompts, 0.5 * self.prior_weight),
            **{name: np.zeros(num_prompts) for name in ("successes", "failures", "seen_at")},
            "weights": np.zeros(FEATURES[self.features] + 1),
            "updates": np.zeros(1),
        }

    def update(self, state: State, rewards_P_G: Floats) -> State:
        return self.update_late(state, rewards_P_G, np.zeros(len(rewards_P_G)))

    def update_late(self, state: State, rewards_P_G: Floats, lag_P: Floats) -> State:
        new, rollouts = counts(rewards_P_G)
        now = state["updates"] + 1
        generated_at, never = now - lag_P, state["successes"] + state["failures"] == 0
        seen_at = np.where(never, generated_at, np.maximum(state["seen_at"], generated_at))
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
        features_S_D = _features(known)
        center, spread = features_S_D.mean(axis=0), features_S_D.std(axis=0)
        varies = spread > 1e-12 * np.abs(center)
        scale = np.where(varies, spread, 1.0)
        z_S_D = np.where(varies, (features_S_D - center) / scale, 0.0)
        slopes, constant = state["weights"][:-1], state["weights"][-1]
        fitted = _fitted(
            np.column_stack([z_S_D, np.ones(len(seen))]),
            *self._counts(known, state["updates"]),
            np.append(np.where(varies, slopes * scale, 0.0), constant + slopes @ center),
            self.ridge * np.append(np.full(len(slopes), max(varies.sum(), 1.0)), 1.0),
        )
        slopes = fitted[:-1] / scale
        return {"weights": np.append(slopes, fitted[-1] - slopes @ center)}

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        return bernoulli(state["alpha"], state["beta"])

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        successes, failures = self._counts(state, state["updates"] + 1)
        mean = self._predicted(state)
        return self.prior_weight * mean + successes, self.prior_weight * (1 - mean) + failures

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return counts(rewards_P_G)[1] / (state["alpha"] + state["beta"])

    def _predicted(self, state: State) -> Floats:
        """m of each prompt, (P,)."""
        weights = state["weights"]
        return np.clip(_sigmoid(_features(state) @ weights[:-1] + weights[-1]), LOWEST, HIGHEST)

    def _counts(self, state: State, now: Floats) -> tuple[Floats, Floats]:
        """A and B as of an update, each (P,)."""
        kept = self._faded(now - state["seen_at"])
        return kept * state["successes"], kept * state["failures"]

    def _faded(self, updates: Floats) -> Floats:
        """Weight that is left after some updates."""
        if not self.updates_per_epoch:
            raise ValueError("predicted_prior.updates_per_epoch is 0; give the number of policy updates in an epoch")
        return np.asarray(self.discount ** (updates / self.updates_per_epoch))


def _features(state: State) -> Floats:
    """The features, (P, D); D is 0 if there are none."""
    return state.get("features", np.empty((len(state["alpha"]), 0)))


def _fitted(x_S_W: Floats, successes: Floats, failures: Floats, weights: Floats, penalty: Floats) -> Floats:
    """Weights of a ridge logistic regression, some Newton steps from ``weights``; a step that overshoots is halved."""
    rollouts = successes + failures

    def log_posterior(weights: Floats) -> float:
        logit = x_S_W @ weights
        return float(successes @ logit - rollouts @ np.logaddexp(0, logit) - 0.5 * penalty @ weights**2)

    for _ in range(_NEWTON_STEPS):
        mean = _sigmoid(x_S_W @ weights)
        gradient = x_S_W.T @ (successes - rollouts * mean) - penalty * weights
        curvature = (x_S_W.T * (rollouts * mean * (1 - mean))) @ x_S_W + np.diag(penalty)
        step, before = np.linalg.solve(curvature, gradient), log_posterior(weights)
        for halvings in range(_HALVINGS):
            nearer = weights + 0.5**halvings * step
            if log_posterior(nearer) >= before - 1e-9 * abs(before):  # rounding
                weights = nearer
                break
    return weights


def _sigmoid(logit: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * logit)
