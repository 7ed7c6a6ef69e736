"""How far the policy has moved since each prompt's last visit, for estimators that forget by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from openrlhf_dbb.core.replay_cache import CachedRollout, ReplayCache
from openrlhf_dbb.core.step import Floats, Key


class PolicyDrift:
    """Measures how far the policy has moved, by the newest rollout of each prompt, which ``cache`` keeps.

    The drift is the mean of ``|log-prob now - log-prob then|`` over the rollout's generated tokens, in nats a token:
    "now" is before this step's update, "then" was before the update of the prompt's last visit. A step costs one
    forward pass over a rollout of each of its prompts. A generated token takes 9 bytes of the trainer's memory.

    Source: SPO (Xu and Ding 2025, arXiv 2509.13232) and its public code, which takes both log-probs after the update.
    """

    def __init__(self, prompt_ids: Mapping[Key, int]) -> None:
        self._prompt_ids = prompt_ids
        self.cache = ReplayCache(1)

    def measure(
        self,
        prompts: Sequence[Key],
        verified: Sequence[bool],
        log_probs_of: Callable[[Sequence[CachedRollout]], Sequence[NDArray[np.float32]]],
    ) -> Floats:
        """Return the drift (R,) of the prompt of each of a step's R rollouts; 0 on a first visit.

        Args:
            prompts, verified: (R,) of each rollout; a prompt without a verified rollout has no visit.
            log_probs_of: returns the present policy's log-probs of the generated tokens of rollouts.
        """
        visited = dict.fromkeys(key for key, seen in zip(prompts, verified, strict=True) if seen)
        past = {key: kept[0] for key in visited if (kept := self.cache.rollouts_of(self._prompt_ids[key]))}
        moved = dict.fromkeys(prompts, 0.0)
        for (key, rollout), now in zip(past.items(), log_probs_of(list(past.values())) if past else (), strict=True):
            moved[key] = float(np.abs(now.astype(np.float64) - rollout.log_probs).sum()) / max(len(now), 1)
            # A filtered group has no log-probs, and is a visit all the same: the next drift counts from here.
            self.cache.add(self._prompt_ids[key], rollout._replace(log_probs=now))
        return np.array([moved[key] for key in prompts])


def padded(rollouts: Sequence[CachedRollout]) -> dict[str, torch.Tensor]:
    """Return rollouts as one batch (B, T) for the policy's forward pass."""
    tokens = [torch.tensor(rollout.tokens, dtype=torch.long) for rollout in rollouts]
    return {
        "sequences": pad_sequence(tokens, batch_first=True),
        "action_mask": pad_sequence([torch.tensor(rollout.actions) for rollout in rollouts], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
    }
