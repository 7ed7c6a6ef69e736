"""Replay beside a training step: which old rollouts are trained on again, and with which advantages.

Axes: R rollouts (rows) of the step, P distinct prompts among them, N rollouts of the largest group, K replayed
rollouts of the prompt with most.

Source: RePO (Li et al. 2025, arXiv 2506.09340), and its published code where the paper is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.actors.replay_rows import cached, replay_row
from openrlhf_dbb.core.replay.cache import CachedRollout, ReplayCache
from openrlhf_dbb.core.replay.normalization import mixed_advantages, replay_advantages, weights
from openrlhf_dbb.core.replay.selection import SELECTIONS
from openrlhf_dbb.core.step import Key

Floats = NDArray[np.float64]
Chosen = Mapping[Key, Sequence[CachedRollout]]


class Replays:
    """Earlier rollouts of each prompt; some of them are trained on again when the prompt comes back.

    A step replays from the cache as it was before the step; its own rollouts are added afterwards. Their log-probs are
    those of the policy that generated them, as the trainer computed them, and are never refreshed.

    Args:
        args: OpenRLHF's, with ours: ``args.replay`` and the advantage form.
        prompt_ids: the store's id of every prompt.
    """

    def __init__(self, args: SimpleNamespace, prompt_ids: Mapping[Key, int]) -> None:
        self._replay = args.replay
        self._form = args.algo.advantage.estimator
        self._prompt_ids = prompt_ids
        self.cache = ReplayCache(args.replay.cache)

    def choose(self, prompts: Sequence[Key]) -> dict[Key, list[CachedRollout]]:
        """The rollouts to replay, for each prompt that has enough of them."""
        chosen = {}
        for key in dict.fromkeys(prompts):
            held = self.cache.of(self._prompt_ids[key])
            if len(held) >= self._replay.min_cache:
                rewards = np.array([rollout.reward for rollout in held])
                places = SELECTIONS[self._replay.select](rewards, self._replay.samples)
                chosen[key] = [held[place] for place in places]
        return chosen

    def normalise(
        self, prompts: Sequence[Key], rewards_R: Floats, advantages_R: Floats, chosen: Chosen
    ) -> tuple[Floats, dict[Key, Floats]]:
        """Advantages of the step's own rows and of the replayed ones, weighted as the normaliser says.

        Args:
            rewards_R: NaN where missing.
            advantages_R: the estimator's.
        """
        if not chosen:
            return advantages_R, {}
        keys = list(dict.fromkeys(prompts))
        place = {key: position for position, key in enumerate(keys)}
        group_R = np.array([place[key] for key in prompts])
        old_P = [np.array([rollout.reward for rollout in chosen.get(key, ())]) for key in keys]
        replayed_P_K = _padded(old_P)
        if self._replay.normalization == "mixed":
            rows_P = [np.flatnonzero(group_R == position) for position in range(len(keys))]
            fresh_P_N, old_P_K = mixed_advantages(
                _padded([rewards_R[rows] for rows in rows_P]), replayed_P_K, self._form
            )
            advantages_R = advantages_R.copy()
            for position, rows in enumerate(rows_P):
                advantages_R[rows] = np.nan_to_num(fresh_P_N[position, : len(rows)])
        else:
            old_P_K = replay_advantages(replayed_P_K, self._form)
        counts_P = np.array([len(old) for old in old_P])
        fresh, old_weight_P = weights(np.bincount(group_R), counts_P, self._replay.normalizer, self._replay.coef)
        old = {
            key: old_P_K[position, : counts_P[position]] * old_weight_P[position]
            for position, key in enumerate(keys)
            if key in chosen
        }
        return advantages_R * fresh, old

    def rows(self, chosen: Chosen, advantages: Mapping[Key, Floats], like: Experience) -> list[Experience]:
        """The replayed rollouts as rows for the actor's buffer, with the fields of ``like``."""
        return [
            replay_row(rollout, like, float(advantage))
            for key, rollouts in chosen.items()
            for rollout, advantage in zip(rollouts, advantages[key], strict=True)
        ]

    def remember(self, experiences: Sequence[Experience]) -> None:
        """Put the step's own rollouts into the cache, except those without a reward."""
        for experience in experiences:
            scores = experience.scores if experience.scores is not None else experience.rewards
            for row, rollout in enumerate(cached(experience)):
                if not torch.isnan(scores[row]):
                    key = (experience.prompts[row], str(experience.labels[row]))
                    self.cache.add(self._prompt_ids[key], [rollout])

    def metrics(self, replayed: int, experiences: Sequence[Experience]) -> dict[str, float]:
        """What is logged of a step: among it the means of its own rows, for the actor's means include replayed rows."""
        logged = {
            "replay/replayed": float(replayed),
            "replay/cached": float(self.cache.rollouts),
            "replay/memory_mb": self.cache.nbytes / 2**20,
        }
        if replayed:
            logged |= _own_means(experiences)
        return logged


def _own_means(experiences: Sequence[Experience]) -> dict[str, float]:
    columns = {name: [e.info[name] for e in experiences] for name in experiences[0].info}
    for name in ("response_length", "total_length", "truncated"):
        columns[name] = [getattr(experience, name) for experience in experiences]
    return {name: float(torch.cat(values).float().mean()) for name, values in columns.items()}


def _padded(rows: Sequence[Floats]) -> Floats:
    matrix = np.full((len(rows), max(len(row) for row in rows)), np.nan)
    for position, row in enumerate(rows):
        matrix[position, : len(row)] = row
    return matrix
