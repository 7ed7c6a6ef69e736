"""The plain strategy: every prompt is generated for, every group is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openrlhf_dbb.core.strategies.base import RolloutStrategy, RunFacts, Sampler, register


@register
@dataclass(frozen=True)
class Plain(RolloutStrategy):
    """All groups are trained on."""

    name: ClassVar[str] = "plain"

    def describe(self) -> str:
        return "all prompts, all groups"

    def sampler(self, facts: RunFacts) -> Sampler:
        return Sampler(facts)
