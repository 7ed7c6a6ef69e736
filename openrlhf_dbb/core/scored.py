"""What a step's rollouts were scored with, and what is logged of it.

Axes: R rollouts (rows) of a step, P distinct prompts among them, G rollouts of the largest group.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.rollouts import Floats, Rollouts


@dataclass(frozen=True)
class Scored:
    """What became of the R rollouts of a step; all arrays have shape (R,).

    Attributes:
        advantages: 0 for a missing rollout.
        mean, variance: the estimate of one reward that the rollout was scored with.
        zero_variance: 1.0 if all rewards of its group are the same.
        rescued: 1.0 if its group has zero variance and still yields an advantage.
        group_std: N-1 standard deviation of the group's rewards.
        metrics: numbers to log, by name: means of the above over the rollouts that are trained on, the share of missing
            and filtered rollouts, the estimator's run-wide numbers after the step, and the probes' errors.
    """

    advantages: Floats
    mean: Floats
    variance: Floats
    zero_variance: Floats
    rescued: Floats
    group_std: Floats
    _: KW_ONLY
    metrics: dict[str, float]


def means(scored: Scored, rollouts: Rollouts, largest: int) -> dict[str, float]:
    """Means over the rollouts that are trained on, and what became of the others.

    Args:
        largest: G; where every group is of one rollout (G = 1), zero variance says nothing and is left out.
    """

    def mean(values_R: NDArray[Any]) -> float:
        return float(values_R[rollouts.trained].mean()) if rollouts.trained.any() else 0.0

    flat = {
        "estimator/zero_variance": mean(scored.zero_variance),
        "estimator/rescued": mean(scored.rescued),
    }
    return (flat if largest > 1 else {}) | {
        "estimator/mean": mean(scored.mean),
        "estimator/variance": mean(scored.variance),
        "estimator/abs_advantage": mean(abs(scored.advantages)),
        "estimator/missing": mean(np.isnan(rollouts.scores)),
        "rollout/filtered": float((~rollouts.trained).mean()),
        "rollout/skipped": float(sum(rollouts.skipped.values())),
    }


def sample_std(rewards_P_G: Floats) -> Floats:
    """N-1 standard deviation of each group's rewards, (P,); NaN is left out, 0 for a single reward."""
    rollouts = np.sum(~np.isnan(rewards_P_G), axis=1)
    mean = np.nansum(rewards_P_G, axis=1) / rollouts
    return np.sqrt(np.nansum((rewards_P_G - mean[:, None]) ** 2, axis=1) / np.maximum(rollouts - 1, 1))
