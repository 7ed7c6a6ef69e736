"""Which rollouts of a step are kept with their texts: some prompts followed over the epochs, others drawn anew.

Axes: R rollouts (rows) of the step, P distinct prompts among them, K kept rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

import storage
from openrlhf_dbb.core import KEEP
from openrlhf_dbb.core.rollouts import Floats, Groups, Key, Rollouts


@dataclass(frozen=True)
class Responses:
    """What the model wrote in one step.

    Attributes:
        texts: (R,) responses; only those that are kept are asked for, so a sequence may decode them then.
        truncated: (R,) whether a response was cut at the length limit; None: not known.
        log_probs: (R,) sum of the response tokens' log-probabilities when they were sampled, NaN where not known; None:
            not known of any.
        keep: how many are stored, chosen by a hash of prompt and step; None: all; 0: none.
    """

    texts: Sequence[str] = ()
    truncated: ArrayLike | None = None
    log_probs: ArrayLike | None = None
    keep: int | None = KEEP


NONE = Responses(keep=0)
"""Nothing is kept."""


def rows(
    responses: Responses, step: int, rollouts: Rollouts, groups: Groups, ids_P: NDArray[np.int64]
) -> tuple[NDArray[np.int64], storage.RolloutRows]:
    """Which rollouts of a step are kept, (K,), and what is stored of them but their advantages, which are 0 here.

    Args:
        ids_P: the store's id of each group's prompt.

    Raises:
        ValueError: columns of another length than the rollouts, or ``keep`` below 0.
    """
    size = len(rollouts.prompts)
    truncated_R = _column("truncated", responses.truncated, size)
    log_probs_R = _column("log_probs", responses.log_probs, size)
    if responses is not NONE and len(responses.texts) != size:
        raise ValueError(f"there are {len(responses.texts)} response texts for {size} rollouts; pass one for each")
    at = chosen(rollouts.prompts, step, responses.keep)
    return at, storage.RolloutRows(
        prompt_ids=ids_P[groups.group_R[at]],
        sample=groups.slot_R[at],
        reward=rollouts.rewards[at],
        score=rollouts.scores[at],
        advantage=np.zeros(len(at)),
        length=rollouts.tokens[at],
        truncated=truncated_R[at],
        log_prob=log_probs_R[at],
        text=[responses.texts[row] for row in at],
    )


def chosen(prompts: Sequence[Key], step: int, keep: int | None) -> NDArray[np.int64]:
    """Rows of the rollouts that are kept, (K,) ascending.

    Half of them belong to prompts that come first by a hash of the prompt, the same in every epoch; the others to
    prompts that come first by a hash of prompt and step, so that in time every prompt is seen. Groups are kept whole;
    the last one of either half is cut. Nothing is random: a resume and another store choose the same.

    Args:
        prompts: (R,) prompt and label of each rollout.
        keep: at most so many, >= 0; None: all.

    Raises:
        ValueError: ``keep`` is below 0.

    Example:
        >>> chosen([("a", ""), ("b", ""), ("a", ""), ("b", "")], 1, 3).tolist()
        [0, 1, 3]
    """
    if keep is None:
        return np.arange(len(prompts))
    if keep < 0:
        raise ValueError(f"{keep} rollouts cannot be kept; give 0 or more, or None for all")
    if not keep:
        return np.empty(0, dtype=np.int64)
    rows_of: dict[Key, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    hashes = {prompt: storage.prompt_hash(*prompt) for prompt in rows_of}
    followed = sorted(rows_of, key=lambda prompt: hashes[prompt])
    drawn = sorted(rows_of, key=lambda prompt: hashlib.blake2b(hashes[prompt], key=str(step).encode()).digest())
    kept = _fill({}, followed, rows_of, (keep + 1) // 2)
    kept = _fill(kept, drawn, rows_of, keep)
    return np.array(sorted(row for rows in kept.values() for row in rows), dtype=np.int64)


def _fill(
    kept: dict[Key, list[int]], order: Sequence[Key], rows_of: dict[Key, list[int]], most: int
) -> dict[Key, list[int]]:
    """Add rows, prompt by prompt, until there are ``most``."""
    left = most - sum(map(len, kept.values()))
    for prompt in order:
        if left <= 0:
            break
        more = rows_of[prompt][len(kept.get(prompt, ())) :][:left]
        kept[prompt] = kept.get(prompt, []) + more
        left -= len(more)
    return kept


def _column(name: str, values: ArrayLike | None, size: int) -> Floats:
    if values is None:
        return np.full(size, np.nan)
    column: Floats = np.asarray(values, dtype=np.float64)
    if column.shape != (size,):
        raise ValueError(f"{name} has shape {column.shape}; one value for each of the {size} rollouts is needed")
    return column
