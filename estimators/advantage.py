"""Advantages from an estimate: standardized (GRPO) or centered (Dr. GRPO)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from estimators.base import Estimate, Floats

Form = Literal["group_norm", "dr_grpo"]
"""How a reward X becomes an advantage: a key of :data:`FORMS`."""


def centered(rewards_P_G: Floats, estimate: Estimate) -> Floats:
    """``X - mean``, shape (P, G); 0 for a missing rollout (NaN). Source: paper, section 5 (Dr.GRPO)."""
    return np.nan_to_num(np.asarray(rewards_P_G, dtype=np.float64) - estimate.mean[:, None])


def standardized(rewards_P_G: Floats, estimate: Estimate) -> Floats:
    """``(X - mean) / sqrt(variance)``, shape (P, G); 0 for a missing rollout (NaN).

    Also 0 where the variance is 0. Source: paper, section 2.2.
    """
    deviation = np.sqrt(estimate.variance)[:, None]
    return np.divide(
        centered(rewards_P_G, estimate), deviation, out=np.zeros(np.shape(rewards_P_G)), where=deviation > 0
    )


FORMS = {"group_norm": standardized, "dr_grpo": centered}
"""By the name of ``--algo.advantage.estimator``: (rewards_P_G, estimate) -> advantages, shape (P, G)."""
