"""REINFORCE++-baseline's advantage: centered, then whitened over the batch."""

from __future__ import annotations

from typing import ClassVar

from estimators.base import Estimate, Floats
from estimators.forms.base import Form, centered, register


@register
class ReinforceBaseline(Form):
    """``X - p`` here; the trainer then whitens over all response tokens of the batch.

    With A_t the advantage of a token (X - p, less the KL penalties of the tokens that follow, if there are any), and m
    and s its mean and standard deviation over all response tokens of the batch that belong to verified rollouts, the
    token is trained with ``(A_t - m) / s``. With ``--algo.advantage.no_std_norm``, with ``A_t - m``.

    With ``point`` m is small, as the rewards of a group differ from their mean by 0 on average. With a posterior it
    need not be: whitening then takes away what all groups of the batch have in common.

    Source: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), the variant with a baseline; OpenRLHF 0.11.2,
    ``compute_advantages_and_returns``.
    """

    name: ClassVar[str] = "reinforce_baseline"
    formula: ClassVar[str] = "X - p, whitened over the tokens of the batch"
    whitened: ClassVar[bool] = True

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        return centered(rewards_P_G, estimate)
