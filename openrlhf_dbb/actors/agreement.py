"""Do vLLM and the policy's ranks hold the same model? Their log-probs of the same rollouts tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.errors import RunError

FACTOR = 10.0
FLOOR = 0.02


class Agreement:
    """Compares in the first step of a start; what that was when the run began tells what rounding alone does.

    Attributes:
        usual: mean absolute difference of the log-probs in the run's first step, in nats a token; None before it.
        done: whether this start has been compared.
    """

    def __init__(self) -> None:
        self.usual: float | None = None
        self.done = False

    def check(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Compare, once a start.

        Args:
            experiences: rollouts with the actor's log-probs, and vLLM's; without these nothing is compared.

        Returns:
            What is to be logged.

        Raises:
            RunError: they differ by more than ``FLOOR`` and ``FACTOR`` times as much as when the run began.
        """
        if self.done or any(experience.rollout_log_probs is None for experience in experiences):
            return {}
        self.done = True
        found = mean_difference(experiences)
        limit = max(FLOOR, FACTOR * (self.usual or 0.0))
        if self.usual is not None and not found <= limit:
            raise RunError(
                f"vLLM and the policy disagree after the resume: their log-probs differ by {found:.3g} nats a token, "
                f"in the run's first step by {self.usual:.3g}; one of them has the wrong weights. Nothing was trained; "
                "resume once more, and report it if it happens again"
            )
        if self.usual is None:
            self.usual = found
        return {"vllm/log_prob_difference": found}


def mean_difference(experiences: Sequence[Experience]) -> float:
    """Mean over all generated tokens of |log-prob of vLLM - log-prob of the actor|; NaN if one of them is."""
    total, tokens = torch.zeros(()), torch.zeros(())
    for experience in experiences:
        actions = experience.action_mask.bool()
        difference = (experience.rollout_log_probs.float() - experience.action_log_probs.float()).abs()
        total, tokens = total + difference[actions].sum(), tokens + actions.sum()
    return float(total / tokens)
