"""The rollouts of a step that are stored with their texts.

They are chosen by a hash, so that a resume and another database choose the same.

Axes: R rollouts (rows) of the step; P distinct prompts among them; K rollouts that are stored.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.arrays import Column, Floats, Key, Positions, column, whole
from openrlhf_dbb.core.groups import Groups
from openrlhf_dbb.core.step import Rollouts, Scored


def rows_to_keep(prompts: Sequence[Key], step: int, keep: int | None) -> Positions:
    """Choose the rollouts that are stored with their texts, (K,) rows, ascending.

    Half of the rows belong to the prompts with the lowest hash, which are the same in every epoch.
    The other half belongs to the prompts with the lowest hash of prompt and step, so that every
    prompt is stored at some time. Groups are stored whole, except for the last one of either half.
    ``keep`` is the number of rows; None keeps all.
    """
    if keep is None or whole("keep", keep) >= len(prompts):
        return np.arange(len(prompts))
    rows_of: dict[Key, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    hashes = {prompt: storage.prompt_hash(*prompt) for prompt in rows_of}
    salt = str(step).encode()
    followed = sorted(rows_of, key=lambda prompt: hashes[prompt])
    drawn = sorted(rows_of, key=lambda prompt: hashlib.blake2b(hashes[prompt], key=salt).digest())
    chosen = [row for prompt in followed for row in rows_of[prompt]][: (keep + 1) // 2]
    taken = set(chosen)
    others = [row for prompt in drawn for row in rows_of[prompt] if row not in taken]
    chosen += others[: keep - len(chosen)]
    return np.array(sorted(chosen), dtype=np.int64)


def kept_rows(
    step: int, rollouts: Rollouts, groups: Groups, ids_P: Positions, scored: Scored
) -> storage.RolloutRows | None:
    """Return the rollouts of a step that are stored with their texts; None if there are none.

    ``ids_P`` has the store's id of each group's prompt.
    """
    responses = rollouts.responses
    if responses is None:
        return None
    rows_K = rows_to_keep(rollouts.prompts, step, responses.keep)
    if not len(rows_K):
        return None
    truncated_R = _or_missing("truncated", responses.truncated, len(rollouts.prompts))
    log_probs_R = _or_missing("log_probs", responses.log_probs, len(rollouts.prompts))
    text_of = responses.texts if callable(responses.texts) else responses.texts.__getitem__
    read_K = None
    if rollouts.read is not None:
        read_K = [rollouts.read[row] for row in rows_K.tolist()]
    versions_K = None
    if rollouts.policy_versions is not None:
        versions_K = rollouts.policy_versions[rows_K]
    return storage.RolloutRows(
        prompt_ids=ids_P[groups.group_R[rows_K]],
        sample=groups.slot_R[rows_K],
        reward=rollouts.rewards[rows_K],
        score=rollouts.scores[rows_K],
        advantage=np.nan_to_num(scored.advantages[rows_K]),  # the column is never NULL
        baseline=scored.baseline[rows_K],
        scale=scored.scale[rows_K],
        weight=scored.weight[rows_K],
        length=rollouts.tokens[rows_K],
        truncated=truncated_R[rows_K],
        log_prob=log_probs_R[rows_K],
        policy_version=versions_K,
        text=[text_of(row) for row in rows_K.tolist()],
        read=read_K,
    )


def _or_missing(name: str, values: Column, size: int) -> Floats:
    """Return a checked column (size,); NaN everywhere without one."""
    return np.full(size, np.nan) if values is None else column(name, values, size)
