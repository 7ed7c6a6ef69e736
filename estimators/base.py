"""The contract of an online reward estimator: what it keeps, when it reads, what it may see.

Axes: P prompts, G rollouts per prompt, F numbers that are kept for each prompt.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.registry import Owner, Refusal, Registry, Rule, check
from openrlhf_dbb.estimators.registry import parameter as parameter

Floats = NDArray[np.float64]
State = dict[str, Floats]
"""A float64 array (P,) for each of ``state_fields``, and a vector for each of ``shared_fields``.

For an estimator that reads texts the caller may add "features", (P, 129), which are not stored:
:func:`openrlhf_dbb.estimators.text_prior.text_features`.
"""

Support = Literal["binary", "unit", "real"]
"""Rewards that an estimator accepts: 0 or 1, [0, 1], or any finite number.

"binary" and "unit" are about the verifier's score, "real" about the reward that is optimised.
"""

_ALLOWED = {"binary": "0 or 1", "unit": "in [0, 1]", "real": "finite"}


@dataclass(frozen=True)
class Estimate:
    """Estimated mean and variance of one reward, for each of P prompts.

    Attributes:
        mean: shape (P,), in reward units.
        variance: shape (P,), >= 0, of ONE reward (not of ``mean``), in squared reward units.
        without_each: shape (P, G), the leave-one-out mean: what ``mean`` would be without that
            rollout. NaN where the rollout is the only evidence, or is missing.
    """

    mean: Floats
    variance: Floats
    without_each: Floats | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def bernoulli(cls, alpha: Floats, beta: Floats) -> "Estimate":
        """Return the estimate of rewards 0 and 1 by a Beta posterior.

        The mean is alpha / (alpha + beta), the variance alpha beta / (alpha + beta)^2.

        Args:
            alpha: (P,) counts of successes, in rollouts, >= 0.
            beta: (P,) counts of failures, in rollouts, >= 0; the sum of both is > 0.

        Source: paper, section 3.2, the equations after Definition 2.
        """
        total = alpha + beta
        mean = alpha / total
        # Not 1 - mean: that is exactly 0 after some 50 zero-variance groups at discount 0.5.
        failure = beta / total
        return cls(mean, mean * failure)


def exact(value: float) -> str:
    """Return a number as text with all its digits, so that no other number reads as it does.

    Example:
        >>> exact(1.0), exact(0.5), exact(0.7 + 0.2 + 0.1)
        ('1', '0.5', '0.9999999999999999')
    """
    return repr(float(value)).removesuffix(".0")


class RewardSupportError(ValueError):
    """A reward is outside the values that an estimator accepts.

    Attributes:
        row, column: the place of the first such reward, ``rewards_P_G[row, column]``.
        value: the reward.
        allowed: the accepted values in words, such as "0 or 1".
    """

    def __init__(self, row: int, column: int, value: float, allowed: str) -> None:
        super().__init__(row, column, value, allowed)
        self.row = row
        self.column = column
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        value = exact(self.value)
        return f"rewards[{self.row}, {self.column}] = {value} is not {self.allowed}"


def too_few_rollouts(estimator: "RewardEstimator", training: "Training") -> Refusal:
    """A group mean of one rollout is that rollout: every advantage would be 0."""
    needed = estimator.min_rollouts
    if training.group is None or training.group >= needed:
        return None
    both = f"{training.shown_estimator} with {training.shown('group', training.group)}"
    return (
        f"{both}: it needs {needed} or more rollouts of a prompt; give more, or use "
        f"{training.shown('estimator', 'auto')}, which has a history"
    )


def any_real_number(estimator: "RewardEstimator", training: "Training") -> Refusal:
    """An estimator of success rates cannot take a reward model's score."""
    takes_any = estimator.support == "real" and estimator.belief.support == "real"
    if not training.real_rewards or takes_any:
        return None
    return (
        f"{training.real_rewards} with {training.shown_estimator}: a model gives any real number, "
        "this estimator or its memory takes scores of 0 to 1 only; use "
        f"{training.shown('estimator', 'gaussian')}, or {training.shown('estimator', 'point')} "
        f"with {training.shown('memory', 'gaussian')}"
    )


class RewardEstimator(Owner, ABC):
    """Estimates each prompt's reward distribution from the groups of rollouts seen so far.

    An estimator is a frozen dataclass. Its fields, which have a type and are made by
    :func:`openrlhf_dbb.estimators.registry.parameter`, become the command line's flags
    ``--NAME.FIELD``; the attributes below are set without a type. The object learns nothing: the
    caller keeps, stores and rolls back a ``State``, with numbers for each prompt and for the whole
    run (a prior that all prompts share, a clock).

    All methods are vectorised over P prompts. ``rewards_P_G`` has shape (P, G), float. NaN marks a
    missing rollout (a verifier time-out), so N may differ between prompts, but every row holds a
    reward. Methods return new arrays and never change their input.

    Attributes:
        name: the word after ``--estimator``.
        version: of the state's meaning; increase it when stored states are no longer valid.
        reads: "after": :meth:`estimate` gets the state that holds the current group (DBB).
            "before": the state without it, so that the mean is independent of the rollouts that it
            scores (SPO, RAE).
        min_rollouts: the smallest group that can yield an advantage.
        wide_clip: whether methods widen the clip range, as the paper does for DBB.
        reads_texts: whether :meth:`predictive` reads ``state["features"]`` if the caller gives
            them. No :meth:`estimate` does.
        state_fields: names of the numbers to keep for each prompt, stored in this order.
        shared_fields: names of the vectors to keep for the whole run.
        support: the rewards that :meth:`observe` accepts.

    Raises:
        ValueError: a parameter is outside its range.

    Source: paper, section 3.1 (advantages from an estimate of the reward distribution) and
    Algorithm 1 (update first, then read).
    """

    name: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = (too_few_rollouts, any_real_number)
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["after", "before"]] = "after"
    min_rollouts: ClassVar[int] = 1
    wide_clip: ClassVar[bool] = False
    reads_texts: ClassVar[bool] = False
    state_fields: ClassVar[tuple[str, ...]] = ()
    shared_fields: ClassVar[tuple[str, ...]] = ()
    support: ClassVar[Support] = "real"

    def __post_init__(self) -> None:
        check(self)

    @property
    def belief(self) -> "RewardEstimator":
        """The estimator whose state a run keeps, and whose forecast strategies draw by.

        By default it is this one.
        """
        return self

    def initial_state(self, num_prompts: int) -> State:
        """Return the state before any rollout: an array (P,) for each state field; by default 0."""
        return {field: np.zeros(num_prompts) for field in self.state_fields}

    @abstractmethod
    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the state after one more visit of every prompt, in one step of the policy.

        The state is that of the P prompts; the result holds all state fields and shared fields.
        """

    def known(self, state: State, rewards_P_G: Floats) -> State:
        """Return the state after outcomes that were measured before the training.

        They may be fractions. They count as a visit of update 0, and time does not move: the shared
        field "clock" stays.
        """
        before = dict(state)
        if "clock" in state:
            before["clock"] = state["clock"] - [1, 0]
        after = state | self.update(before, rewards_P_G)
        if "clock" in state:
            after["clock"] = state["clock"]
        return after | self.learn(after)

    @abstractmethod
    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return mean and variance, (P,) each, of one reward of every prompt.

        ``state`` is the one that :attr:`reads` names; ``rewards_P_G`` are the current group.
        """

    def learn(self, state: State) -> State:
        """Return the shared fields that a step's end changes; ``state`` is of ALL prompts."""
        return {}

    def predictive(self, state: State) -> tuple[Floats, Floats] | None:
        """Return (alpha, beta), (P,) each and > 0, of each prompt's next success probability.

        None if the estimator does not forecast.
        """
        return None

    def can_predict(self) -> bool:
        """Return whether :meth:`predictive` gives a distribution."""
        return type(self).predictive is not RewardEstimator.predictive

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats | None:
        """Return the share of the estimated mean that comes from the current group, (P,) in [0, 1].

        None if the mean is no weighted average of the group's mean and what was known before.
        """
        if self.reads == "before":
            return np.zeros(len(rewards_P_G))
        return None

    def mean_without_each(
        self,
        state: State,
        rewards_P_G: Floats,
        estimate: Estimate,
    ) -> Floats | None:
        """Return the leave-one-out means, (P, G): the estimate's mean without each of its rollouts.

        With c the share of one of N rollouts in the mean, ``group_weight / N``, it is
        ``(mean - c X) / (1 - c)``; NaN for a missing rollout, and where c = 1. None if
        :meth:`group_weight` is None.

        Args:
            state: after :meth:`update`, of the P prompts.
        """
        weight = self.group_weight(state, rewards_P_G)
        if weight is None:
            return None
        _, rollouts = counts(rewards_P_G)
        share_P_1 = (weight / rollouts)[:, None]
        others_P_G = estimate.mean[:, None] - share_P_1 * rewards_P_G
        without_P_G = np.full(np.shape(rewards_P_G), np.nan)
        return np.divide(others_P_G, 1 - share_P_1, out=without_P_G, where=share_P_1 < 1)

    def can_leave_one_out(self) -> bool:
        """Return whether :meth:`mean_without_each` gives a mean."""
        state = self.initial_state(1)
        estimate = Estimate(np.ones(1), np.ones(1))
        return self.mean_without_each(state, np.array([[1.0, 0.0]]), estimate) is not None

    def observe(
        self,
        state: State,
        rewards_P_G: Floats,
        *,
        leave_one_out: bool = False,
    ) -> tuple[State, Estimate]:
        """Check a group of rollouts, update, and read in the order that the estimator declares.

        Call it once per policy step, with all groups of the step.

        Args:
            state: of the P prompts; it stays as it is.
            rewards_P_G: NaN for a missing rollout.
            leave_one_out: fill in ``without_each`` of the estimate.

        Returns:
            The state after the step, and the estimate of every prompt.

        Raises:
            RewardSupportError: a reward is outside ``support`` (or infinite).
            ValueError: shapes do not match, or a prompt has no reward at all.
        """
        rows = len(rewards_P_G)
        for field in self._fields_of_prompts(state):
            prompts = len(state[field])
            if rows != prompts:
                raise ValueError(f"rewards have {rows} rows, the state {prompts} prompts")
        new_state = {field: values.copy() for field, values in state.items()}
        estimate = self.observe_at(
            new_state,
            np.arange(rows),
            rewards_P_G,
            leave_one_out=leave_one_out,
        )
        return new_state, estimate

    def observe_at(
        self,
        state: State,
        prompts: NDArray[np.int64],
        rewards_P_G: Floats,
        *,
        leave_one_out: bool = False,
    ) -> Estimate:
        """:meth:`observe` for some of the prompts of a larger state, which is updated in place.

        Args:
            state: of all prompts, and of the run; unchanged if an error is raised.
            prompts: (P,) positions in the state, each at most once.
            rewards_P_G: NaN for a missing rollout.
            leave_one_out: fill in ``without_each`` of the estimate.

        Raises:
            RewardSupportError: a reward is outside ``support`` (or infinite).
            ValueError: the rewards are no table, or a prompt has no reward at all.
        """
        rewards_P_G = np.asarray(rewards_P_G, dtype=np.float64)
        self.check(rewards_P_G)
        before = self.state_at(state, prompts)
        after = self.update(before, rewards_P_G)
        read = after if self.reads == "after" else before
        estimate = self.estimate(read, rewards_P_G)
        if leave_one_out:
            without_P_G = self.mean_without_each(after, rewards_P_G, estimate)
            estimate = dataclasses.replace(estimate, without_each=without_P_G)
        for field in self.state_fields:
            state[field][prompts] = after[field]
        for field in self.shared_fields:
            state[field] = after[field]
        state.update(self.learn(state))
        return estimate

    def state_at(self, state: State, prompts: NDArray[np.int64]) -> State:
        """Return a copy of the state of some prompts, with features and run-wide state.

        ``prompts`` are positions in the state, (P,).
        """
        part = {field: state[field] for field in self.shared_fields}
        for field in self._fields_of_prompts(state):
            part[field] = state[field][prompts]
        return part

    def _fields_of_prompts(self, state: State) -> list[str]:
        return [field for field in (*self.state_fields, "features") if field in state]

    def columns(self, state: State, prompts: NDArray[np.int64]) -> Floats:
        """Return the state of some prompts as a store keeps it, (P, F).

        It has a column for each of ``state_fields``; ``prompts`` are positions in the state, (P,).
        """
        table_F_P = np.empty((len(self.state_fields), len(prompts)))
        for row, field in enumerate(self.state_fields):
            table_F_P[row] = state[field][prompts]
        return table_F_P.T

    def supports(self, rewards: Floats) -> NDArray[np.bool_]:
        """Return which rewards the estimator accepts, in their shape; False for a missing one."""
        if self.support == "binary":
            return np.asarray((rewards == 0) | (rewards == 1))
        if self.support == "unit":
            return np.asarray((rewards >= 0) & (rewards <= 1))
        return np.isfinite(rewards)

    def check(self, rewards_P_G: Floats) -> None:
        """Raise what :meth:`observe` would raise for these rewards.

        Raises:
            RewardSupportError: a reward is outside ``support`` (or infinite).
            ValueError: the rewards are no table, or a prompt has no reward at all.
        """
        if rewards_P_G.ndim != 2:
            shape = rewards_P_G.shape
            raise ValueError(f"rewards have shape {shape}; (prompts, rollouts) is needed")
        wrong = ~self.supports(rewards_P_G)
        if not wrong.any() and rewards_P_G.shape[1]:
            return
        missing = np.isnan(rewards_P_G)
        empty = np.flatnonzero(missing.all(axis=1))
        if len(empty):
            raise ValueError(f"rewards[{empty[0]}] holds no reward; leave the prompt out")
        places = np.argwhere(wrong & ~missing)
        if len(places):
            row, column = places[0].tolist()
            value = float(rewards_P_G[row, column])
            raise RewardSupportError(row, column, value, _ALLOWED[self.support])


@dataclass(frozen=True)
class Training:
    """The choices of a training that the rules of estimators and forms read.

    Attributes:
        estimator: of the rewards.
        form: of the advantages, by name; None: the trainer's own.
        group: rollouts of a prompt in a step; None: not known yet.
        estimator_name: as the user has named it; "" for the registered name.
        real_rewards: the user's setting by which a reward may be any real number; "": none.
        names: how the trainer's user writes a setting, with {} for the value.
    """

    estimator: RewardEstimator
    form: str | None = None
    group: int | None = None
    estimator_name: str = ""
    real_rewards: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def shown(self, setting: str, value: object) -> str:
        """Return a setting and a value as the trainer's user writes them."""
        return self.names.get(setting, setting + "={!r}").format(value)

    @property
    def shown_estimator(self) -> str:
        """The estimator as the trainer's user writes it."""
        return self.shown("estimator", self.estimator_name or self.estimator.name)


ESTIMATORS: Registry[RewardEstimator] = Registry(
    "estimator",
    RewardEstimator,
    __package__,
    __package__,
    {"predicted_prior": "auto"},
)
"""The estimators by name; others declare theirs in the entry points of this package's name."""

register = ESTIMATORS.register


class BetaPosterior(RewardEstimator):
    """Keeps a Beta posterior of each prompt as ``alpha`` and ``beta``, > 0; for rewards 0 and 1."""

    support = "binary"

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return mean and variance by the Beta posterior, (P,) each, of a reward of 0 or 1."""
        return Estimate.bernoulli(state["alpha"], state["beta"])

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        """Return the share of the group's rollouts in alpha + beta, (P,)."""
        _, rollouts = counts(rewards_P_G)
        return rollouts / (state["alpha"] + state["beta"])


def counts(rewards_P_G: Floats) -> tuple[Floats, Floats]:
    """Return sum of rewards S and number of rollouts N of each group, (P,) each, without NaN."""
    seen_P_G = ~np.isnan(rewards_P_G)
    rollouts = seen_P_G.sum(axis=1, dtype=np.float64)
    return np.nansum(rewards_P_G, axis=1), rollouts
