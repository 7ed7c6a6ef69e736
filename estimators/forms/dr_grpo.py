"""Dr. GRPO's advantage: centered."""

from __future__ import annotations

from typing import ClassVar

from estimators.base import Estimate, Floats
from estimators.forms.base import Form, centered, register


@register
class DrGrpo(Form):
    """``X - p``.

    Source: paper, section 5; Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), section 3.
    """

    name: ClassVar[str] = "dr_grpo"
    formula: ClassVar[str] = "X - p"

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        return centered(rewards_P_G, estimate)
