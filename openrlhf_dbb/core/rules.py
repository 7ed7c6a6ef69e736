"""What does not go together, whatever the trainer: one small function for each reason to refuse a training.

The command, TRL, verl and :meth:`openrlhf_dbb.core.posteriors.Posteriors.observe` ask the same rules. A breakpoint in a
rule shows why a run was refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from openrlhf_dbb.core import exact_json
from openrlhf_dbb.core.host import Capability, Host
from openrlhf_dbb.core.strategies import Plain, RolloutStrategy, RunFacts
from openrlhf_dbb.estimators import FORMS, RewardEstimator

Refusal = str | None
"""One line that names the settings and says what to do; None: nothing is wrong."""

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


class Asking(Protocol):
    """A part of a training that asks something of the trainer."""

    @property
    def needs(self) -> frozenset[Capability]:
        """What the part asks of a host."""


@dataclass(frozen=True)
class Plan:
    """What is chosen for a training.

    Attributes:
        host: the trainer; None asks nothing of it.
        estimator_name, strategy_name: as the user has named them; "" for the registered name.
        form: of the advantages, by name; None: the trainer's own.
        group: rollouts of a prompt in a step; None: not known yet.
        replay: what trains on rollouts of earlier steps, if anything does.
        thin: c of :func:`openrlhf_dbb.core.advantages.thin`; 0: off.
        names: how the trainer's user writes a setting, with {} for the value.
    """

    estimator: RewardEstimator
    form: str | None = None
    strategy: RolloutStrategy = field(default_factory=Plain)
    group: int | None = None
    host: Host | None = None
    replay: Asking | None = None
    thin: float = 0.0
    estimator_name: str = ""
    strategy_name: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def shown(self, setting: str, value: object) -> str:
        """Return a setting and a value as the trainer's user writes them."""
        return self.names.get(setting, setting + "={!r}").format(value)

    @property
    def shown_estimator(self) -> str:
        """The estimator as the trainer's user writes it."""
        return self.shown("estimator", self.estimator_name or self.estimator.name)

    @property
    def shown_strategy(self) -> str:
        """The strategy as the trainer's user writes it."""
        return self.shown("strategy", self.strategy_name or self.strategy.name)


RULES: Rules[Plan] = Rules()


def refusal(plan: Plan) -> Refusal:
    """Return why a training cannot be as it is chosen, in one line; None if it can."""
    return RULES.refusal(plan)


@RULES.add
def strategy_asks_too_much(plan: Plan) -> Refusal:
    """A strategy that draws prompts or judges groups would do nothing in a trainer that takes neither from it."""
    if plan.host is None:
        return None
    line = plan.host.refusal(plan.shown_strategy, plan.strategy.needs)
    if line is None:
        return None
    others = [plan.shown("strategy", "plain")]
    if Capability.DRAW not in plan.host.lacks:
        others.append(plan.shown("strategy", "posterior"))
    return f"{line}; use {' or '.join(others)}"


@RULES.add
def replay_asks_too_much(plan: Plan) -> Refusal:
    """Replayed rollouts are rows that the trainer did not generate in this step."""
    if plan.host is None or plan.replay is None:
        return None
    line = plan.host.refusal("replay", plan.replay.needs)
    return line and f"{line}; leave it out"


@RULES.add
def thinning_asks_too_much(plan: Plan) -> Refusal:
    """The store keeps the advantages of the form, and the trainer gets others."""
    if plan.host is None or not plan.thin:
        return None
    line = plan.host.refusal(plan.shown("thin", plan.thin), frozenset({Capability.THIN}))
    return line and f"{line}; leave it out"


@RULES.add
def thinned_and_whitened(plan: Plan) -> Refusal:
    """Thinning drops advantages near 0, and whitening leaves none there."""
    if not plan.thin or plan.form is None or not FORMS.get(plan.form).whitened:
        return None
    both = f"{plan.shown('thin', plan.thin)} with {plan.shown('form', plan.form)}"
    return f"{both}: whitening moves every advantage away from 0; leave one out"


@RULES.add
def too_few_rollouts_for_the_estimator(plan: Plan) -> Refusal:
    """A group mean of one rollout is that rollout: every advantage would be 0."""
    needed = plan.estimator.min_rollouts
    if plan.group is None or plan.group >= needed:
        return None
    return (
        f"{plan.shown_estimator} with {plan.shown('group', plan.group)}: it needs {needed} or more rollouts of a "
        f"prompt; give more, or use {plan.shown('estimator', 'auto')}, which has a history"
    )


@RULES.add
def too_few_rollouts_for_the_strategy(plan: Plan) -> Refusal:
    """A strategy that looks for groups with different rewards finds none among groups of one rollout."""
    needed = plan.strategy.min_rollouts
    if plan.group is None or plan.group >= needed:
        return None
    return (
        f"{plan.shown_strategy} with {plan.shown('group', plan.group)}: it looks for groups with different rewards; "
        f"give {needed} or more rollouts of a prompt"
    )


@RULES.add
def state_that_no_checkpoint_keeps(plan: Plan) -> Refusal:
    """A checkpoint keeps a strategy's state as JSON; a resume would begin without what JSON cannot hold."""
    facts = RunFacts(groups=1, rollouts=plan.group or plan.strategy.min_rollouts)
    try:
        exact_json.dumps(plan.strategy.sampler(facts).state(), "its state")
    except ValueError as error:
        return f"{plan.shown_strategy}: {error}"
    return None


@RULES.add
def leave_one_out(plan: Plan) -> Refusal:
    """A form such as rloo scores a rollout by the mean without it, which not every estimator can tell."""
    if (
        plan.form is None
        or not FORMS.get(plan.form).leave_one_out
        or plan.estimator.can_leave_one_out()
    ):
        return None
    return (
        f"{plan.shown('form', plan.form)} with {plan.shown_estimator}: the form scores a rollout by the mean without "
        "it, which this estimator cannot tell (its group_weight is None); "
        f"use {plan.shown('form', 'dr_grpo')}, or {plan.shown('estimator', 'dbb')}"
    )


@RULES.add
def no_forecast(plan: Plan) -> Refusal:
    """A strategy that draws prompts draws them by the forecast of the estimator, or of its memory."""
    belief = plan.estimator.belief
    if not plan.strategy.forecasts or belief.can_predict():
        return None
    return (
        f"{plan.shown_strategy}: it draws prompts by a forecast, and {belief.name} makes none; "
        f"use {plan.shown('estimator', 'point')} with {plan.shown('memory', 'auto')}, "
        f"or {plan.shown('estimator', 'auto')} or {plan.shown('estimator', 'dbb')}"
    )
