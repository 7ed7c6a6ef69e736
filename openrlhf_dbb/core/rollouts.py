"""The rollouts of one step as arrays, and the groups they form.

Axes: R rollouts (rows) of the step, P distinct prompts among them, G rollouts of the largest group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import storage

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

Key = tuple[str, str]
"""A prompt's text and its label."""


def dataset_digest(prompts: Sequence[str], labels: Sequence[str]) -> str:
    """Content hash of all prompts and labels in order, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt, label in zip(prompts, labels, strict=True):
        digest.update(storage.prompt_hash(prompt, label))
    return digest.hexdigest()


@dataclass(frozen=True)
class Rollouts:
    """What was generated for one step.

    Attributes:
        prompts: (prompt, label) of each of the R rows.
        rewards: (R,), what is optimized (after length penalties); NaN where missing.
        scores: (R,), the verifier's score before penalties; NaN where missing.
        tokens: (R,) int, length of the response.
        trained: (R,) bool, False for a rollout that is observed but not trained on.
        replayed: by prompt, rollouts of earlier steps that are trained on again, and their tokens.
        skipped: by prompt, how often it was drawn and nothing was generated for it.
    """

    prompts: Sequence[Key]
    rewards: Floats
    scores: Floats
    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    replayed: Mapping[Key, tuple[int, int]] = field(default_factory=dict)
    skipped: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prompts: Sequence[str],
        labels: Sequence[str],
        rewards: ArrayLike,
        *,
        scores: ArrayLike | None = None,
        tokens: ArrayLike | None = None,
        trained: ArrayLike | None = None,
        replayed: Mapping[Key, tuple[int, int]] | None = None,
        skipped: Mapping[Key, int] | None = None,
    ) -> Rollouts:
        """From what a trainer has; arguments as in :meth:`openrlhf_dbb.Posteriors.observe`.

        Raises:
            ValueError: no rollout, or columns of different lengths.
        """
        size = len(prompts)
        if not size:
            raise ValueError("the step has no rollouts; pass at least one")
        rewards_R = _column("rewards", rewards, size, np.float64)
        scores_R = rewards_R.copy() if scores is None else _column("scores", scores, size, np.float64)
        _column("labels", labels, size, object)
        return cls(
            prompts=list(zip(prompts, labels, strict=True)),
            rewards=np.where(np.isnan(scores_R), np.nan, rewards_R),
            scores=scores_R,
            tokens=_column("tokens", np.zeros(size) if tokens is None else tokens, size, np.int64),
            trained=_column("trained", np.ones(size) if trained is None else trained, size, np.bool_),
            replayed=replayed or {},
            skipped=skipped or {},
        )


def _column(name: str, values: ArrayLike, size: int, dtype: type) -> NDArray[Any]:
    column: NDArray[Any] = np.asarray(values, dtype=dtype)  # None becomes NaN
    if column.shape != (size,):
        raise ValueError(f"{name} has shape {column.shape}; one value for each of the {size} prompts is needed")
    return column


@dataclass(frozen=True)
class Groups:
    """Which rows belong together: those of the same prompt, wherever they stand.

    Attributes:
        prompts_P: the P prompts, as positions in a larger array, ascending.
        group_R, slot_R: each row's group, and its place in the group.
    """

    prompts_P: Positions
    group_R: Positions
    slot_R: Positions

    @classmethod
    def of(cls, prompts_R: Positions) -> Groups:
        """Groups of rows by the position of their prompt."""
        prompts_P, group_R, sizes_P = np.unique(prompts_R, return_inverse=True, return_counts=True)
        order = np.argsort(group_R, kind="stable")
        slot_R = np.empty(len(group_R), dtype=np.int64)
        slot_R[order] = np.arange(len(group_R)) - np.repeat(np.cumsum(sizes_P) - sizes_P, sizes_P)
        return cls(prompts_P, group_R, slot_R)

    def matrix(self, values_R: Floats) -> Floats:
        """Values by group, (P, G); NaN where a group has fewer rows than the largest."""
        matrix = np.full((len(self.prompts_P), int(self.slot_R.max()) + 1), np.nan)
        matrix[self.group_R, self.slot_R] = values_R
        return matrix

    def rows(self, values_P_G: Floats) -> Floats:
        """The inverse of :meth:`matrix`, (R,)."""
        return values_P_G[self.group_R, self.slot_R]
