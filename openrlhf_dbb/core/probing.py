"""The flags of probes and the capability that they need. ``core/probes.py`` chooses the prompts and measures.

It stands alone because the command reads flags without importing the store.
"""

from dataclasses import dataclass
from typing import ClassVar

from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.estimators.registry import check, parameter


@dataclass(frozen=True)
class Probing(Part):
    """Some prompts get further rollouts at each visit, which measure the estimate and are not trained on."""

    fraction: float = parameter(0.0, "share of prompts whose estimate is measured", within="[0, 1]")
    samples: int = parameter(
        128, "rollouts that measure it, and are not trained on", within="[2, inf)"
    )

    name: ClassVar[str] = "probe"
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities of a host that it needs."""
        return frozenset({Capability.PROBE})

    def shown(self, plan: Plan) -> str:
        """Return how the trainer's user has chosen it."""
        return plan.shown("probe_fraction", self.fraction)
