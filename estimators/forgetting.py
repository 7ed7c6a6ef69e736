"""Forgetting by policy updates, where groups may be late.

A group that an earlier policy generated has a lag > 0: the training steps between that policy and the present one. It
belongs to update ``g = now - lag``, in which it would have been on-policy. A prompt's counts are kept as of the
greatest g of its groups, so that the order in which its groups are observed makes no difference.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.base import Floats


def latest(seen_at_P: Floats, generated_at_P: Floats, never_P: NDArray[np.bool_]) -> Floats:
    """Return the greatest g of each prompt with one more group; ``never_P``: the prompt had no group before."""
    return np.where(never_P, generated_at_P, np.maximum(seen_at_P, generated_at_P))


def faded(discount: float, updates: Floats, updates_per_epoch: float) -> Floats:
    """Return the weight that is left of a group after some updates: discount ** (updates / updates_per_epoch)."""
    if not updates_per_epoch:
        raise ValueError("updates_per_epoch is 0; give the number of policy updates in an epoch")
    return np.asarray(discount ** (updates / updates_per_epoch))
