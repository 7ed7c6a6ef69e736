from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import BetaPosterior, Floats, State, Support, counts, latest
from openrlhf_dbb.estimators.parameters import parameter
from openrlhf_dbb.estimators.registry import register


@register
@dataclass(frozen=True)
class DiscountedBetaBernoulli(BetaPosterior):
    """Track a drifting success probability with a Beta posterior that forgets.

    Each visit of a prompt shrinks its past counts by ``discount``, then adds the new group's successes and failures
    (S of N rollouts)::

        alpha <- discount * alpha + S        mean     = alpha / (alpha + beta)
        beta  <- discount * beta + N - S     variance = alpha * beta / (alpha + beta)^2

    ``variance`` is that of ONE reward, > 0 even if all N rewards are equal.

    With ``forgetting="updates"`` a group counts as of update ``g = now - lag``; with first and v the least and the
    greatest g of a prompt, and E updates per epoch::

        alpha = prior_alpha * discount^(1 + (v - first)/E) + sum_k S_k * discount^((v - g_k)/E)
        beta  = prior_beta  * discount^(1 + (v - first)/E) + sum_k (N_k - S_k) * discount^((v - g_k)/E)

    State:
        alpha, beta: discounted counts of successes and failures, in rollouts, > 0.
        seen_at, first_at: with "updates" only; v and first. -1 and 0 before any group; only then seen_at < first_at.
        updates (shared): with "updates" only; number of updates so far.

    Source: paper, Definition 2 and Algorithm 1 (update first, then read); ``forgetting`` and late groups are our own.
    """

    # Per visit of the same prompt, not per gradient step; 1 never forgets. The paper uses 0.25, 0.5 and 0.75 for Qwen3
    # 0.6B, 1.7B and 8B.
    discount: float = parameter(0.5, "weight of the past per visit", within="(0, 1]")
    prior_alpha: float = parameter(1.0, "pseudo-successes before any rollout", within="(0, inf)")
    prior_beta: float = parameter(1.0, "pseudo-failures before any rollout", within="(0, inf)")
    partial_credit: bool = parameter(False, "accept scores in [0, 1] as fractional successes, not only 0 or 1")
    forgetting: str = parameter("visits", "the discount counts visits or policy updates", choices=("visits", "updates"))
    # With "updates" only; 0 asks the trainer to fill it in (for_epochs).
    updates_per_epoch: float = parameter(0.0, "policy updates in an epoch", within="[0, inf)", flag=False)

    name: ClassVar[str] = "dbb"
    wide_clip: ClassVar[bool] = True

    @property
    def support(self) -> Support:
        return "unit" if self.partial_credit else "binary"

    @property
    def state_fields(self) -> tuple[str, ...]:
        return ("alpha", "beta", "seen_at", "first_at") if self.forgetting == "updates" else ("alpha", "beta")

    @property
    def shared_fields(self) -> tuple[str, ...]:
        return ("updates",) if self.forgetting == "updates" else ()

    def for_epochs(self, updates: float) -> "DiscountedBetaBernoulli":
        is_open = self.forgetting == "updates" and self.updates_per_epoch == 0
        return replace(self, updates_per_epoch=float(updates)) if is_open else self

    def initial_state(self, num_prompts: int) -> State:
        state = {
            "alpha": np.full(num_prompts, float(self.prior_alpha)),
            "beta": np.full(num_prompts, float(self.prior_beta)),
        }
        if self.forgetting == "updates":
            state |= {"seen_at": np.full(num_prompts, -1.0), "first_at": np.zeros(num_prompts), "updates": np.zeros(1)}
        return state

    def update(self, state: State, rewards_P_G: Floats) -> State:
        if self.forgetting == "updates":
            return self.update_late(state, rewards_P_G, np.zeros(len(rewards_P_G)))
        successes, rollouts = counts(rewards_P_G)
        return {
            "alpha": _floored(self.discount * state["alpha"] + successes),
            "beta": _floored(self.discount * state["beta"] + (rollouts - successes)),
        }

    def update_late(self, state: State, rewards_P_G: Floats, lag_P: Floats) -> State:
        if self.forgetting == "visits":
            return self.update(state, rewards_P_G)
        successes, rollouts = counts(rewards_P_G)
        now = state["updates"] + 1
        generated_at, never = now - lag_P, _never(state)
        first_at = np.where(never, generated_at, state["first_at"])
        seen_at = latest(state["seen_at"], generated_at, never)
        kept, weight = self._kept(state, seen_at), self._faded(seen_at - generated_at)
        # A group from before the first one moves the prior, which is discounted once at the first, further back.
        earlier = generated_at < first_at
        prior_before, prior_after = (self.discount * self._faded(seen_at - at) for at in (first_at, generated_at))

        def updated(past: Floats, prior: float, new: Floats) -> Floats:
            past = kept * past
            # Rounding must not make the counts of the earlier groups negative.
            moved = np.maximum(past - prior * prior_before, 0) + prior * prior_after
            return _floored(np.where(earlier, moved, past) + weight * new)

        return {
            "alpha": updated(state["alpha"], self.prior_alpha, successes),
            "beta": updated(state["beta"], self.prior_beta, rollouts - successes),
            "seen_at": seen_at,
            "first_at": np.minimum(first_at, generated_at),
            "updates": now,
        }

    def predictive(self, state: State) -> tuple[Floats, Floats]:
        kept = self.discount if self.forgetting == "visits" else self._kept(state, state["updates"] + 1)
        return _floored(kept * state["alpha"]), _floored(kept * state["beta"])

    def _kept(self, state: State, seen_at: Floats) -> Floats:
        """Return the factor on the past if the latest group is now of update ``seen_at``."""
        return self._faded(np.where(_never(state), self.updates_per_epoch, seen_at - state["seen_at"]))

    def _faded(self, updates: Floats) -> Floats:
        if not self.updates_per_epoch:
            raise ValueError("updates_per_epoch is 0; give the number of policy updates in an epoch")
        return np.asarray(self.discount ** (updates / self.updates_per_epoch))


def _never(state: State) -> NDArray[np.bool_]:
    return np.asarray(state["seen_at"] < state["first_at"])


def _floored(counted: Floats) -> Floats:
    # 1,074 zero-variance groups at discount 0.5 would underflow to 0.
    return np.asarray(np.maximum(counted, np.finfo(float).tiny))
