"""GRPO's advantage: standardized."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from estimators.base import Estimate, Floats
from estimators.forms.base import Form, centered, register


@register
class GroupNorm(Form):
    """``(X - p) / sqrt(v)``; see :func:`standardized`.

    Source: paper, section 2.2; GRPO (Shao et al. 2024, arXiv 2402.03300), section 4.1. OpenRLHF adds 1e-9 to the
    deviation; here nothing is added.
    """

    name: ClassVar[str] = "group_norm"
    formula: ClassVar[str] = "(X - p) / sqrt(variance)"

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        return standardized(rewards_P_G, estimate)


def standardized(rewards_P_G: Floats, estimate: Estimate) -> Floats:
    """``(X - baseline) / sqrt(variance)``, shape (P, G); 0 where :func:`centered` is, and where the variance is 0.

    Source: paper, section 2.2.
    """
    deviation = np.sqrt(estimate.variance)[:, None]
    return np.divide(
        centered(rewards_P_G, estimate), deviation, out=np.zeros(np.shape(rewards_P_G)), where=deviation > 0
    )
