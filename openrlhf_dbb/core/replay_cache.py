"""RePO without torch: the newest rollouts of every prompt, which are replayed, and with which advantages.

Axes: T tokens of a rollout, prompt and response; A of them generated; M cached and K replayed rollouts of each of P
prompts.

Source: RePO (Li et al. 2025, arXiv 2506.09340), with the settings of its published code: the rollouts with the highest
rewards, normalised among themselves.
"""

from __future__ import annotations

import os
import zipfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import estimators
from estimators import FORMS

Floats = NDArray[np.float64]
_COLUMNS = ("prompts", "rewards", "lengths", "responses", "tokens", "actions", "log_probs")


class CachedRollout(NamedTuple):
    """A rollout as it is replayed.

    Attributes:
        tokens: shape (T,), prompt and response.
        actions: shape (T - 1,), True where the policy generated ``tokens[1:]``.
        log_probs: shape (A,), of the generated tokens, computed by the trainer under the policy that generated them.
        reward: the optimized reward.
    """

    tokens: NDArray[np.int32]
    actions: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    reward: float


class ReplayCache:
    """The newest ``size`` rollouts of every prompt, in memory; a generated token takes 9 bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: dict[int, deque[CachedRollout]] = {}

    @property
    def rollouts(self) -> int:
        """Number of rollouts of all prompts."""
        return sum(len(kept) for kept in self._kept.values())

    def rollouts_of(self, prompt: int) -> Sequence[CachedRollout]:
        """Return the rollouts of a prompt, oldest first."""
        return tuple(self._kept.get(prompt, ()))

    def add(self, prompt: int, rollout: CachedRollout) -> None:
        """Add the newest rollout of a prompt, which may push out the oldest."""
        self._kept.setdefault(prompt, deque(maxlen=self.size)).append(rollout)

    def save(self, path: Path) -> None:
        """Write all rollouts to one file; a crash leaves the old file or the new one."""
        kept = [(prompt, rollout) for prompt, rollouts in self._kept.items() for rollout in rollouts]
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            np.savez(
                file,
                prompts=np.array([prompt for prompt, _ in kept], dtype=np.int64),
                rewards=np.array([rollout.reward for _, rollout in kept], dtype=np.float64),
                lengths=np.array([len(rollout.tokens) for _, rollout in kept], dtype=np.int64),
                responses=np.array([len(rollout.log_probs) for _, rollout in kept], dtype=np.int64),
                tokens=_joined([rollout.tokens for _, rollout in kept], np.int32),
                actions=_joined([rollout.actions for _, rollout in kept], np.bool_),
                log_probs=_joined([rollout.log_probs for _, rollout in kept], np.float32),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path, size: int) -> ReplayCache:
        """Return the saved cache, bit for bit.

        Raises:
            ValueError: the file is missing or damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as file:  # reading a member to its end compares its checksum
                stored = {name: file[name] for name in _COLUMNS}
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"replay cache {path} is missing or damaged ({error}); resume from a checkpoint that has an intact one"
            ) from error
        rollouts = zip(
            _cut(stored["tokens"], stored["lengths"]),
            _cut(stored["actions"], stored["lengths"] - 1),
            _cut(stored["log_probs"], stored["responses"]),
            stored["rewards"].tolist(),
            strict=True,
        )
        cache = cls(size)
        for prompt, rollout in zip(stored["prompts"].tolist(), rollouts, strict=True):
            cache.add(prompt, CachedRollout(*rollout))
        return cache


def highest(rewards_M: Floats, count: int) -> NDArray[np.int64]:
    """Return the positions of the ``count`` highest rewards, ascending; of equal rewards the oldest.

    With rewards 0 and 1 and ``count`` successes in the cache, only successes are replayed. Their advantage is 0.
    """
    return np.sort(np.argsort(-rewards_M, kind="stable")[:count])


def replay_advantages(rewards_P_K: Floats, form: str) -> Floats:
    """Return the advantages of replayed rollouts by GRPO's mean and deviation of their own prompt's rewards, (P, K).

    Exactly 0 where all rewards of a prompt are the same. RePO's code adds 1e-4 to the deviation; here nothing is added.

    Args:
        form: name of an advantage form that is not whitened.
    """
    point, advantage = estimators.build("point"), FORMS.build(form)
    _, estimate = point.observe({}, rewards_P_K, leave_one_out=advantage.leave_one_out)
    differ = estimate.variance[:, None] > 0
    return np.where(differ, advantage.advantages(rewards_P_K, estimate), 0.0)


def _joined(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])


def _cut(joined: NDArray[Any], sizes: NDArray[np.int64]) -> list[NDArray[Any]]:
    # Copies, since a view would keep all of the joined array in memory.
    ends = np.cumsum(sizes).tolist()
    return [joined[start:end].copy() for start, end in zip([0, *ends], ends, strict=False)]
