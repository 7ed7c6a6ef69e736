"""The choices of a training, and the contract of its parts, which may need something of the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from openrlhf_dbb.core.host import Capability, Host
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.estimators.base import Training
from openrlhf_dbb.estimators.registry import Owner, Refusal, Rule


def asks_too_much(part: "Part", plan: "Plan") -> Refusal:
    """A part would do nothing in a trainer that does not give it what it needs."""
    if plan.host is None:
        return None
    line = plan.host.refusal(part.shown(plan), part.needs)
    return line and f"{line}; {part.instead(plan)}"


def rewards_too_late(part: "Part", plan: "Plan") -> Refusal:
    """A reward model scores a batch that is generated already."""
    if not part.needs_scores or not plan.late_rewards:
        return None
    both = f"{plan.late_rewards} with {part.shown(plan)}"
    return f"{both}: it needs rewards at generation; {plan.early_rewards}"


class Part(Owner):
    """A part of a training that may ask something of the trainer, by default nothing.

    Attributes:
        needs_scores: rewards must be known at generation.
    """

    rules: ClassVar[tuple[Rule, ...]] = (asks_too_much, rewards_too_late)
    needs_scores: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities of a host that it needs."""
        return frozenset()

    def shown(self, plan: "Plan") -> str:
        """Return how the trainer's user has chosen it."""
        return self.name

    def instead(self, plan: "Plan") -> str:
        """Return what to do where a trainer cannot serve it."""
        return "leave it out"


@dataclass(frozen=True)
class Plan(Training):
    """The choices of a training. The base class has those that estimators and forms read.

    Attributes:
        strategy: of the rollouts; None: every prompt and every group.
        host: the trainer; None asks nothing of it.
        others: further parts, such as a replay.
        strategy_name: as the user has named it; "" for the registered name.
        late_rewards: the user's setting by which rewards come after a step is generated; "": none.
        early_rewards: what gives them at generation.
        rows_bring: what the loss takes of each row beside tokens and the policy's log-probs, in words, with the
            user's setting that asks for it.
    """

    strategy: Part | None = None
    host: Host | None = None
    others: Sequence[Part] = ()
    strategy_name: str = ""
    late_rewards: str = ""
    early_rewards: str = ""
    rows_bring: Mapping[str, str] = field(default_factory=dict)

    @property
    def owners(self) -> list[Owner]:
        """All that has rules."""
        owners: list[Owner] = [self.estimator, *self.others]
        if self.strategy is not None:
            owners.append(self.strategy)
        if self.form is not None:
            owners.append(FORMS.build(self.form))
        return owners
