"""What became of every rollout of a step, prompt by prompt.

Axes: R rollouts (rows) of the step, P distinct prompts among them, U prompts counted: these, and those that were only
replayed or skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

import storage
from openrlhf_dbb.core.step import Key, Rollouts


def usage(
    rollouts: Rollouts,
    prompt_ids: Mapping[Key, int],
    group_R: NDArray[np.int64],
    ids_P: NDArray[np.int64],
    zero_variance_R: NDArray[np.bool_],
    advantages_R: NDArray[np.float64],
) -> storage.UsageRows:
    """The step's rollout counts, to be stored.

    Args:
        prompt_ids: the store's id of every prompt of the run.
        group_R: each row's group.
        ids_P: each group's prompt id.
        zero_variance_R: whether all rewards of the rollout's group are equal.
        advantages_R: those of rows that are not trained on are not read.
    """
    only_replayed_or_skipped = {prompt_ids[key] for key in (*rollouts.replayed, *rollouts.skipped)} - set(
        ids_P.tolist()
    )
    ids_U = np.concatenate([ids_P, np.array(sorted(only_replayed_or_skipped), dtype=np.int64)])
    place = {prompt_id: at for at, prompt_id in enumerate(ids_U.tolist())}

    def summed(values_R: NDArray[np.int64] | NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        return np.bincount(group_R, values_R, minlength=len(ids_U)).astype(np.int64)

    def by_prompt(counts: Mapping[Key, int]) -> NDArray[np.int64]:
        counts_U = np.zeros(len(ids_U), dtype=np.int64)
        for key, count in counts.items():
            counts_U[place[prompt_ids[key]]] += count
        return counts_U

    trained_R = rollouts.trained
    informative_P = np.bincount(group_R, trained_R & (advantages_R != 0)) > 0
    informative_R = trained_R & informative_P[group_R]
    return storage.UsageRows(
        prompt_ids=ids_U,
        generated=summed(),
        generated_tokens=summed(rollouts.tokens),
        trained=summed(trained_R),
        trained_tokens=summed(rollouts.tokens * trained_R),
        zero_variance=summed(zero_variance_R),
        informative=summed(informative_R),
        rescued=summed(informative_R & zero_variance_R),
        replayed=by_prompt({key: rows for key, (rows, _) in rollouts.replayed.items()}),
        replayed_tokens=by_prompt({key: tokens for key, (_, tokens) in rollouts.replayed.items()}),
        skipped=by_prompt(rollouts.skipped),
    )
