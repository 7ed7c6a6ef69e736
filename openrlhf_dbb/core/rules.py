"""Why a training is refused, whatever the trainer.

Each part of a training has rules of its own (:class:`openrlhf_dbb.estimators.registry.Owner`). The
command, TRL, verl and :meth:`openrlhf_dbb.core.posteriors.Posteriors.observe` ask the same ones. A
breakpoint in a rule shows why a run was refused.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from openrlhf_dbb.core.plan import Plan
from openrlhf_dbb.estimators.registry import Refusal

__all__ = ["Plan", "Refusal", "Rules", "refusal"]

_Subject = TypeVar("_Subject")


class Rules(Generic[_Subject]):
    """Functions that return a :data:`Refusal` for a subject. A rule may rely on those before it."""

    def __init__(self) -> None:
        self.functions: list[Callable[[_Subject], Refusal]] = []

    def add(self, rule: Callable[[_Subject], Refusal]) -> Callable[[_Subject], Refusal]:
        """Add a rule behind the others; a decorator."""
        self.functions.append(rule)
        return rule

    def refusal(self, subject: _Subject) -> Refusal:
        """Return the line of the first rule that refuses."""
        for rule in self.functions:
            line = rule(subject)
            if line is not None:
                return line
        return None


def refusal(plan: Plan) -> Refusal:
    """Return why a training cannot be as it is chosen, in one line; None if it can."""
    for owner in plan.owners:
        line = owner.refusal(plan)
        if line is not None:
            return line
    return None
