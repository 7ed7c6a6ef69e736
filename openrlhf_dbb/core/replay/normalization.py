"""Advantages of replayed rollouts, and their weight in the loss.

Axes: P prompts of the step, N fresh rollouts of a prompt, K replayed ones; both ragged, NaN where there are fewer. S of
the prompts have any.

Source: RePO, section on the objective; its advantages are GRPO's. Its code adds 1e-4 to the standard deviation. Here
nothing is added: equal rewards are detected by comparing them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

import estimators
from estimators import FORMS

Floats = NDArray[np.float64]

NORMALIZERS = ("code", "formula")


def replay_advantages(rewards_P_K: Floats, form: str) -> Floats:
    """Advantages of rollouts by the mean and standard deviation of their own prompt's rewards ("split").

    Args:
        rewards_P_K: shape (P, K), NaN where a prompt has fewer rollouts; a prompt may have none.
        form: "group_norm" for (X - mean) / standard deviation (N-1), "dr_grpo" for X - mean, "rloo" for X - mean of the
            others; a whitened form is refused at the command line.

    Returns:
        Shape (P, K). Exactly 0 where all rewards of a prompt are the same, or it has only one; NaN stays NaN.
    """
    point, advantage = estimators.build("point"), FORMS.build(form)
    missing = np.isnan(rewards_P_K)
    seen = ~missing.all(axis=1)
    advantages_P_K = np.where(missing, np.nan, 0.0)
    if seen.any():
        rewards_S_K = rewards_P_K[seen]
        _, estimate = point.observe({}, rewards_S_K, leave_one_out=advantage.leave_one_out)
        differ = estimate.variance[:, None] > 0
        advantages_P_K[seen] += np.where(differ, advantage.advantages(rewards_S_K, estimate), 0.0)
    return advantages_P_K


def mixed_advantages(fresh_P_N: Floats, replayed_P_K: Floats, form: str) -> tuple[Floats, Floats]:
    """Advantages by one mean and standard deviation over fresh and replayed rewards of a prompt ("mixed").

    Args:
        fresh_P_N: shape (P, N), NaN for a missing rollout, which is left out.
        replayed_P_K, form: as in :func:`replay_advantages`.

    Returns:
        Those of the fresh rollouts, shape (P, N), 0 for a missing one, which stays a row of the batch; and those of the
        replayed ones, shape (P, K), where NaN stays NaN.
    """
    both = replay_advantages(np.concatenate([fresh_P_N, replayed_P_K], axis=1), form)
    fresh, replayed = np.split(both, [fresh_P_N.shape[1]], axis=1)
    return np.nan_to_num(fresh), replayed


def weights(
    fresh_P: NDArray[np.int64], replayed_P: NDArray[np.int64], normalizer: str, coef: float
) -> tuple[float, Floats]:
    """Factors on advantages that give replayed rollouts their weight in the loss.

    The clipped loss is homogeneous in the advantage (for c > 0, min(w c A, clip(w) c A) = c min(w A, clip(w) A), also
    with a dual clip), so a factor on the advantages of a row is a factor on its loss. The loss must be a mean over all
    n = sum(fresh_P) + sum(replayed_P) rows: "seq-mean-token-mean" or "seq-mean-token-sum-norm". It becomes

    - "code": that mean, with replayed rows times ``coef``, as in RePO's code.
    - "formula": mean over fresh rows + coef * mean over the P prompts of the mean over a prompt's replayed rows
      (0 where it has none): the paper's sum of two terms.

    With several optimizer steps per rollout batch each has its own mean; "formula" then holds over all of them.

    Args:
        fresh_P: fresh rows of each prompt in the batch, including those with advantage 0; >= 0, at least one in total.
        replayed_P: replayed rows of each prompt, >= 0.
        normalizer: one of NORMALIZERS.
        coef: weight of the replayed term, > 0.

    Returns:
        The factor on fresh rows, and that on each prompt's replayed rows, shape (P,), 0 where it has none and the
        normalizer is "formula".

    Raises:
        ValueError: an unknown normalizer, a coefficient that is not above 0, or no fresh row.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer {normalizer!r} is unknown; use one of {', '.join(NORMALIZERS)}")
    if not (coef > 0 and math.isfinite(coef)):
        raise ValueError(f"the coefficient of replayed rollouts must be above 0, got {coef}")
    fresh, replayed = int(np.sum(fresh_P)), int(np.sum(replayed_P))
    if fresh == 0:
        raise ValueError("there is no fresh rollout; replayed ones are trained on only beside fresh ones")
    if normalizer == "code":
        return 1.0, np.full(len(replayed_P), coef, dtype=np.float64)
    rows = fresh + replayed
    shares_P = len(replayed_P) * np.maximum(replayed_P, 1)
    return rows / fresh, np.where(replayed_P > 0, coef * rows / shares_P, 0.0)
