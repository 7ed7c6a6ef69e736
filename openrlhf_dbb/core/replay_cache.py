"""RePO without torch: the newest rollouts of every prompt, which are replayed, and with which advantages.

Axes: T tokens of a rollout, prompt and response; A of them generated; M cached and K replayed rollouts of each of P
prompts.

Source: RePO (Li et al. 2025, arXiv 2506.09340), with the settings of its published code.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import estimators
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.estimators.base import Floats

_ROW = [("prompt", np.int64), ("reward", np.float64), ("tokens", np.int64)]
_TOKEN = [("id", np.int32), ("action", np.bool_), ("log_prob", np.float32)]


class CachedRollout(NamedTuple):
    """A rollout as it is replayed."""

    tokens: NDArray[np.int32]  # (T,), prompt and response
    actions: NDArray[np.bool_]  # (T - 1,), True where the policy generated ``tokens[1:]``
    log_probs: NDArray[np.float32]  # (A,), of the generated tokens, by their own policy
    reward: float  # the optimized one


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
        """Write all rollouts to one file. The checkpoint's manifest, written later, has its digest."""
        kept = [(prompt, rollout) for prompt, rollouts in self._kept.items() for rollout in rollouts]
        rows = np.array([(prompt, rollout.reward, len(rollout.tokens)) for prompt, rollout in kept], dtype=_ROW)
        tokens = np.zeros(rows["tokens"].sum(), dtype=_TOKEN)
        for (_, rollout), own in zip(kept, np.split(tokens, rows["tokens"].cumsum()), strict=False):
            own["id"], own["action"][1:] = rollout.tokens, rollout.actions
            own["log_prob"][1:][rollout.actions] = rollout.log_probs
        with path.open("wb") as file:
            np.savez(file, rows=rows, tokens=tokens)

    @classmethod
    def load(cls, path: Path, size: int) -> "ReplayCache":
        """Return the saved cache, bit for bit. Raise RunError if :meth:`save` has not written the file."""
        cache = cls(size)
        try:
            with np.load(path) as file:  # refuses pickles, which can run code
                rows, tokens = file["rows"], file["tokens"]
            for row, own in zip(rows, np.split(tokens, rows["tokens"].cumsum()), strict=False):
                actions = own["action"][1:].copy()
                rollout = own["id"].copy(), actions, own["log_prob"][1:][actions], float(row["reward"])
                cache.add(int(row["prompt"]), CachedRollout(*rollout))
        except (OSError, ValueError, LookupError, BadZipFile) as error:
            raise RunError(
                f"{path} cannot be read: {error}; a pickle of an earlier release is not loaded, since it can run code: "
                "start a new run, with --warm_start RUN for its posteriors"
            ) from error
        return cache


def highest(rewards_M: Floats, count: int) -> NDArray[np.int64]:
    """Return the positions of the ``count`` highest rewards, ascending; of equal rewards the oldest."""
    return np.sort(np.argsort(-rewards_M, kind="stable")[:count])


def replay_advantages(rewards_P_K: Floats, form: str) -> Floats:
    """Return the advantages of replayed rollouts by GRPO's mean and deviation of their own prompt's rewards, (P, K).

    Exactly 0 where all rewards of a prompt are the same. RePO's code adds 1e-4 to the deviation; here nothing is added.
    """
    point, advantage = estimators.build("point"), FORMS.build(form)
    _, estimate = point.observe({}, rewards_P_K, leave_one_out=advantage.leave_one_out)
    differ = estimate.variance[:, None] > 0
    return np.where(differ, advantage.advantages(rewards_P_K, estimate), 0.0)
