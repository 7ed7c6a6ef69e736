"""The rollout ledger: what became of every rollout of a step, prompt by prompt. Knows neither torch nor OpenRLHF.

Axes: R rollouts (rows) of the step, P distinct prompts among them, U prompts of the ledger: these, and those that were
only replayed or skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import storage
from openrlhf_dbb.core.probes import Key


@dataclass(frozen=True)
class Rollouts:
    """What was generated for one step.

    Attributes:
        prompts: (prompt, label) of each of the R rows.
        rewards: (R,), what is optimised (after length penalties); NaN where missing.
        scores: (R,), the verifier's score before penalties; NaN where missing.
        tokens: (R,) int, length of the response.
        trained: (R,) bool, False for a rollout that is observed, but not trained on.
        replayed: by prompt, rollouts of earlier steps that are trained on again, and their tokens.
        skipped: by prompt, how often it was drawn and passed over.
    """

    prompts: Sequence[Key]
    rewards: NDArray[np.float64]
    scores: NDArray[np.float64]
    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    replayed: Mapping[Key, tuple[int, int]] = field(default_factory=dict)
    skipped: Mapping[Key, int] = field(default_factory=dict)


def usage(
    rollouts: Rollouts,
    ids: Mapping[Key, int],
    group_R: NDArray[np.int64],
    ids_P: NDArray[np.int64],
    zero_variance_P: NDArray[np.bool_],
    advantages_R: NDArray[np.float64],
) -> storage.UsageRows:
    """The step's rows of the ledger.

    Args:
        ids: the store's id of every prompt of the run.
        group_R: each row's group.
        ids_P: each group's prompt.
        zero_variance_P: whether all rewards of the group agree.
        advantages_R: those of rows that are not trained on do not matter.
    """
    beside = sorted({ids[key] for key in (*rollouts.replayed, *rollouts.skipped)} - set(ids_P.tolist()))
    ids_U = np.concatenate([ids_P, np.array(beside, dtype=np.int64)])
    places = {number: place for place, number in enumerate(ids_U.tolist())}

    def summed(values_R: NDArray[np.int64] | NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        return np.bincount(group_R, values_R, minlength=len(ids_U)).astype(np.int64)

    def counted(numbers: Mapping[Key, int]) -> NDArray[np.int64]:
        counts = np.zeros(len(ids_U), dtype=np.int64)
        for key, number in numbers.items():
            counts[places[ids[key]]] += number
        return counts

    trained = rollouts.trained
    teaches_P = np.bincount(group_R, trained & (advantages_R != 0)) > 0
    informative_R = trained & teaches_P[group_R]
    zero_variance_R = zero_variance_P[group_R]
    return storage.UsageRows(
        prompt_ids=ids_U,
        generated=summed(),
        generated_tokens=summed(rollouts.tokens),
        trained=summed(trained),
        trained_tokens=summed(rollouts.tokens * trained),
        zero_variance=summed(zero_variance_R),
        informative=summed(informative_R),
        rescued=summed(informative_R & zero_variance_R),
        replayed=counted({key: rows for key, (rows, _) in rollouts.replayed.items()}),
        replayed_tokens=counted({key: tokens for key, (_, tokens) in rollouts.replayed.items()}),
        skipped=counted(rollouts.skipped),
    )
