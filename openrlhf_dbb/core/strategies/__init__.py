"""Rollout strategies: which prompts are generated for, and which groups are trained on.

    here       the contract: RolloutStrategy, Sampler, Decision; the registry; plain: every prompt, every group
    dynamic    groups of zero variance are replaced (DAPO)
    greso      prompts whose groups had zero variance are skipped (GRESO)
    draws      what posterior, limit, target and allocate have in common
    posterior  prompts are drawn by the variance that their posterior expects
    limit      prompts that are too easy or too hard rest, and come back every few passes
    target     prompts near a pass rate that moves during the run
    two_stage  a few rollouts of many prompts first, the rest only where these differ (SPEED-RL)
    shares     each source of prompts has a fixed share of the draws
    allocate   more rollouts of prompts whose rewards are expected to vary more

Axes: N rollouts of a group, P prompts of the run.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core import exact_json
from openrlhf_dbb.core.drawn import Drawn as Drawn
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.estimators.registry import Refusal, Registry, Rule, check
from openrlhf_dbb.estimators.registry import parameter as parameter


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that a strategy may need."""

    groups: int  # of a rollout batch
    rollouts: int  # of a group, N
    seed: int = 0
    # A group is trained on only if its mean score lies strictly between these two; None for no limit.
    score_range: tuple[float, float] | None = None
    sources: Mapping[int, str] | None = None  # of each prompt, by its id; None: not known


@dataclass(frozen=True)
class Predictive:
    """The estimator's forecast for every prompt: its next success probability is Beta(alpha, beta); (P,) each."""

    prompt_ids: NDArray[np.int64]  # ascending
    alpha: NDArray[np.float64]  # > 0
    beta: NDArray[np.float64]  # > 0
    unverified: NDArray[np.bool_] | None = None  # its last visits yielded no score; None: of none

    @property
    def mean(self) -> NDArray[np.float64]:
        """The expected success probability of each prompt, (P,) in (0, 1)."""
        return self.alpha / (self.alpha + self.beta)


class Decision(Enum):
    """Tells the trainer what to do with a generated group. The estimator observes every group."""

    TRAIN = auto()
    DISCARD = auto()
    REPLACE = auto()  # not trained on, and another prompt takes its place in the same round
    MORE = auto()  # the rest of the group is generated, then it is judged again


class Sampler:
    """Decides during a training how rollout batches are filled. This base class takes every prompt and every group.

    A step draws prompts in rounds, and asks for a group of each prompt that it does not skip. It ends when enough
    groups for a batch are to be trained on. If the strategy ``draws``, a pass is as many draws as there are prompts.
    """

    # Names of the attributes that change; every checkpoint holds them
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.note = ""  # one line for the user, shown when it changes

    def round_size(self, missing: int) -> int:
        """Return the number of prompts of the next round; ``missing``: groups that the batch still needs, >= 1."""
        return missing

    def skips(self, prompt_id: int) -> bool:
        """Return whether nothing is generated for a prompt that has just been drawn."""
        return False

    def first_rollouts(self, prompt_id: int) -> int:
        """Return how many rollouts of a prompt are generated before its group is judged, >= 1."""
        return self.facts.rollouts

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """Return the next prompt, if the strategy ``draws``; a forecast takes the time of a pass over all prompts."""
        raise NotImplementedError

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        """Decide what is done with a group; ``scores_N``: the verifier's before any penalty, NaN where missing."""
        return Decision.TRAIN

    def observe(self, drawn: Drawn, mixed: bool) -> None:
        """Note the outcome of a drawn group, before :meth:`end_step`. Groups of no score are left out."""

    def end_step(self) -> None:
        """The batch is full and will be trained on."""

    def end_pass(self) -> None:
        """Every prompt has been drawn once more."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log after a step, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return a copy of what a checkpoint has to hold, the attributes in ``kept``; called between steps."""
        return copy.deepcopy({name: getattr(self, name) for name in self.kept})

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        for name in self.kept:
            if name in state:  # a checkpoint of an older release may lack one
                setattr(self, name, copy.deepcopy(state[name]))


def too_few_rollouts(strategy: "RolloutStrategy", plan: Plan) -> Refusal:
    """A strategy that looks for groups with different rewards finds none among groups of one rollout."""
    needed = strategy.min_rollouts
    if plan.group is None or plan.group >= needed:
        return None
    both = f"{strategy.shown(plan)} with {plan.shown('group', plan.group)}"
    why = "it looks for groups with different rewards"
    return f"{both}: {why}; give {needed} or more rollouts of a prompt"


def state_that_no_checkpoint_keeps(strategy: "RolloutStrategy", plan: Plan) -> Refusal:
    """A checkpoint keeps a strategy's state as JSON; a resume would begin without what JSON cannot hold."""
    facts = RunFacts(groups=1, rollouts=plan.group or strategy.min_rollouts)
    try:
        exact_json.dumps(strategy.sampler(facts).state(), "its state")
    except ValueError as error:
        return f"{strategy.shown(plan)}: {error}"
    return None


def no_forecast(strategy: "RolloutStrategy", plan: Plan) -> Refusal:
    """A strategy that draws prompts draws them by the forecast of the estimator, or of its memory."""
    belief = plan.estimator.belief
    if not strategy.forecasts or belief.can_predict():
        return None
    return (
        f"{strategy.shown(plan)}: it draws prompts by a forecast, and {belief.name} makes none; "
        f"use {plan.shown('estimator', 'point')} with {plan.shown('memory', 'auto')}, "
        f"or {plan.shown('estimator', 'auto')} or {plan.shown('estimator', 'dbb')}"
    )


@dataclass(frozen=True)
class RolloutStrategy(Part):
    """Decides which prompts are generated for and which groups are trained on.

    A strategy is a frozen dataclass whose fields, made by :func:`openrlhf_dbb.estimators.registry.parameter`, become
    the flags ``--NAME.FIELD``. :class:`openrlhf_dbb.estimators.registry.Owner` says how it derives some of them, and
    how it refuses a training. The :class:`Sampler` holds what changes during the training.
    """

    name: ClassVar[str]  # the registered one
    rules: ClassVar[tuple[Rule, ...]] = (
        too_few_rollouts,
        state_that_no_checkpoint_keeps,
        no_forecast,
    )
    # It judges groups by their scores, which must be known at generation
    needs_scores: ClassVar[bool] = False
    # A pass has no fixed cost, so that a number of rollouts ends the training
    needs_budget: ClassVar[bool] = False
    reads_score_range: ClassVar[bool] = False  # it honours ``RunFacts.score_range``
    unequal_groups: ClassVar[bool] = False  # it gives each drawn prompt its own ``Drawn.rollouts``

    def __post_init__(self) -> None:
        check(self)

    @property
    def draws(self) -> bool:
        """Whether it chooses the prompts."""
        return False

    @property
    def forecasts(self) -> bool:
        """Whether it reads the estimator's forecast."""
        return self.draws

    @property
    def min_rollouts(self) -> int:
        """The smallest group that it can use, in rollouts."""
        return 1

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities of a host that it needs."""
        needs = set()
        if self.draws:
            needs.add(Capability.DRAW)
        # Rejected groups, and skipped prompts, are made up for
        if self.needs_scores or self.needs_budget:
            needs.add(Capability.GENERATE_MORE)
        return frozenset(needs)

    def shown(self, plan: Plan) -> str:
        """Return how the trainer's user has chosen it."""
        return plan.shown("strategy", plan.strategy_name or self.name)

    def instead(self, plan: Plan) -> str:
        """Return which strategies the trainer can serve."""
        others = plan.shown("strategy", "plain")
        if plan.host is None or Capability.DRAW not in plan.host.lacks:
            others += f" or {plan.shown('strategy', 'posterior')}"
        return f"use {others}"

    def describe(self) -> str:
        """Return a few words for the line that the start prints."""
        raise NotImplementedError

    def sampler(self, facts: RunFacts) -> Sampler:
        """Return the mutable part, for one training; by default one that takes every prompt and every group."""
        return Sampler(facts)


STRATEGIES: Registry[RolloutStrategy] = Registry(
    "rollout strategy", RolloutStrategy, __name__, "openrlhf_dbb.strategies"
)
register = STRATEGIES.register
available = STRATEGIES.available
get = STRATEGIES.get


@register
@dataclass(frozen=True)
class Plain(RolloutStrategy):
    """Every prompt is generated for, and every group is trained on."""

    name: ClassVar[str] = "plain"

    def describe(self) -> str:
        """Return that every prompt and every group is used."""
        return "all prompts, all groups"


def with_sources(
    strategy: RolloutStrategy, facts: RunFacts, sources: Mapping[int, str] | None
) -> RunFacts:
    """Return the facts with the source of each prompt, by its id.

    Raises:
        ValueError: the strategy needs them, and they are not known.
    """
    if sources is None and Capability.SOURCES in strategy.needs:
        columns = "--data.group_key, source_column= in TRL and verl, sources= of Posteriors"
        raise ValueError(
            f"strategy {strategy.name!r} needs the source of each prompt; "
            f"name its column: {columns}"
        )
    return replace(facts, sources=sources)


def varies(scores_N: NDArray[np.float64]) -> bool:
    """Return whether the scores of a group differ, apart from missing ones; False for fewer than two."""
    verified = scores_N[~np.isnan(scores_N)]
    return bool(len(verified) and verified.min() < verified.max())
