"""The contract of an online reward estimator: what it keeps, when it reads, what it may see."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.estimators.registry import Registry, check
from openrlhf_dbb.estimators.registry import parameter as parameter

Floats = NDArray[np.float64]
State = dict[str, Floats]
"""A float64 array of shape (P,) for each of ``state_fields``, and a vector for each of ``shared_fields``.

For an estimator that reads texts the caller may add "features", which are not stored:
:func:`openrlhf_dbb.estimators.text_prior.text_features`.
"""

Support = Literal["binary", "unit", "real"]
"""Rewards that an estimator accepts: 0 or 1, [0, 1], or any finite number.

"binary" and "unit" are about the verifier's score, "real" about the reward that is optimised.
"""


@dataclass(frozen=True)
class Estimate:
    """Estimated mean and variance of one reward, for each of P prompts.

    Attributes:
        mean: shape (P,), in reward units.
        variance: shape (P,), >= 0, of ONE reward (not of ``mean``).
        without_each: shape (P, G), the mean had a rollout not been seen; NaN where nothing else is known.
    """

    mean: Floats
    variance: Floats
    without_each: Floats | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def bernoulli(cls, alpha: Floats, beta: Floats) -> "Estimate":
        """Return the estimate of a success probability ``alpha / (alpha + beta)``, for rewards 0 and 1."""
        total = alpha + beta
        # Not mean * (1 - mean): that is exactly 0 after some 50 zero-variance groups at discount 0.5.
        mean, failure = alpha / total, beta / total
        return cls(mean, mean * failure)


class RewardSupportError(ValueError):
    """A reward lies outside the values that an estimator accepts; it is the first one, ``rewards_P_G[row, column]``."""

    def __init__(self, row: int, column: int, value: float, allowed: str) -> None:
        super().__init__(row, column, value, allowed)
        self.row, self.column, self.value, self.allowed = row, column, value, allowed

    def __str__(self) -> str:
        return f"rewards[{self.row}, {self.column}] = {self.value:.10g} is not {self.allowed}"


class RewardEstimator(ABC):
    """Estimates each prompt's reward distribution from the groups of rollouts seen so far.

    An estimator is a frozen dataclass. Its fields, made by :func:`openrlhf_dbb.estimators.registry.parameter`, become
    the command line's flags ``--NAME.FIELD``. The object learns nothing: the caller keeps, stores and rolls back a
    ``State``, with numbers for each prompt and for the whole run (a prior that all prompts share, a clock).

    All methods are vectorised over P prompts. ``rewards_P_G`` has shape (P, G), float. NaN marks a missing rollout (a
    verifier time-out), so N may differ between prompts, but every row holds a reward. Methods return new arrays and
    never change their input. ValueError for a parameter outside its range.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1  # of the state's meaning; increase it when stored states are no longer valid
    # "after": estimate sees a state that holds the current group (DBB, Algorithm 1). "before": a baseline that is
    # independent of the rollouts that it scores (SPO, RAE).
    reads: ClassVar[Literal["after", "before"]] = "after"
    min_rollouts: ClassVar[int] = 1  # the smallest group that can yield an advantage
    wide_clip: ClassVar[bool] = False  # methods widen the clip range, as the paper does for DBB
    reads_texts: ClassVar[bool] = (
        False  # predictive reads state["features"], if the caller gives them; no estimate does
    )
    state_fields: ClassVar[tuple[str, ...]] = ()  # names of the numbers to keep for each prompt, stored in this order
    shared_fields: ClassVar[tuple[str, ...]] = ()  # names of the vectors to keep for the whole run
    support: ClassVar[Support] = "real"  # rewards that observe accepts

    def __post_init__(self) -> None:
        check(self)

    @property
    def belief(self) -> "RewardEstimator":
        """The estimator whose state a run keeps, and whose forecast strategies draw by: by default this one."""
        return self

    def initial_state(self, num_prompts: int) -> State:
        """Return the state before any rollout; by default 0 per prompt."""
        return {field: np.zeros(num_prompts) for field in self.state_fields}

    @abstractmethod
    def update(self, state: State, rewards_P_G: Floats) -> State:
        """Return the state after one more visit of every prompt, in one step of the policy."""

    def known(self, state: State, rewards_P_G: Floats) -> State:
        """Return the state after outcomes that were measured before the training; they may be fractions.

        They count as a visit of update 0, and time does not move: the shared field "clock" stays.
        """
        before = state | {"clock": state["clock"] - [1, 0]} if "clock" in state else state
        after = state | self.update(before, rewards_P_G)
        if "clock" in state:
            after["clock"] = state["clock"]
        return after | self.learn(after)

    @abstractmethod
    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Return mean and variance of one reward of every prompt, given a state and the current group."""

    def learn(self, state: State) -> State:
        """Return the shared fields that a step's end changes; ``state`` is of ALL prompts."""
        return {}

    def predictive(self, state: State) -> tuple[Floats, Floats] | None:
        """Return (alpha, beta), each (P,) and > 0, of the Beta of the next success probability; None without one."""
        return None

    def can_predict(self) -> bool:
        """Return whether :meth:`predictive` gives a distribution."""
        return type(self).predictive is not RewardEstimator.predictive

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats | None:
        """Return the share of the estimated mean that comes from the current, on-policy group, (P,) in [0, 1].

        None if the mean is no weighted average of the group's mean and what was known before.
        """
        return np.zeros(len(rewards_P_G)) if self.reads == "before" else None

    def mean_without_each(self, state: State, rewards_P_G: Floats, estimate: Estimate) -> Floats | None:
        """Return the estimate's mean had a rollout of the current group not been seen, for each rollout.

        With c the share of one of N rollouts in the mean, ``group_weight / N``, it is ``(mean - c X) / (1 - c)``,
        (P, G); NaN for a missing rollout, and where c = 1. None if :meth:`group_weight` is None.
        """
        weight = self.group_weight(state, rewards_P_G)
        if weight is None:
            return None
        share = (weight / counts(rewards_P_G)[1])[:, None]
        rest = np.full(np.shape(rewards_P_G), np.nan)
        return np.divide(estimate.mean[:, None] - share * rewards_P_G, 1 - share, out=rest, where=share < 1)

    def can_leave_one_out(self) -> bool:
        """Return whether :meth:`mean_without_each` gives a mean."""
        state, rewards_P_G = self.initial_state(1), np.array([[1.0, 0.0]])
        return self.mean_without_each(state, rewards_P_G, Estimate(np.ones(1), np.ones(1))) is not None

    def observe(self, state: State, rewards_P_G: Floats, *, leave_one_out: bool = False) -> tuple[State, Estimate]:
        """Check a group of rollouts, update, and read in the order that the estimator declares.

        Call it once per policy step, with all groups of the step. ``leave_one_out`` fills in ``without_each``.

        Raises:
            RewardSupportError: a reward is outside ``support`` (or infinite).
            ValueError: shapes do not match, or a prompt has no reward at all.
        """
        for field in (*self.state_fields, "features"):
            if field in state and len(rewards_P_G) != len(state[field]):
                raise ValueError(f"rewards have {len(rewards_P_G)} rows, the state {len(state[field])} prompts")
        new_state = {field: values.copy() for field, values in state.items()}
        rows = np.arange(len(rewards_P_G))
        estimate = self.observe_at(new_state, rows, rewards_P_G, leave_one_out=leave_one_out)
        return new_state, estimate

    def observe_at(
        self, state: State, prompts: NDArray[np.int64], rewards_P_G: Floats, *, leave_one_out: bool = False
    ) -> Estimate:
        """:meth:`observe` for some of the prompts of a larger state, which is updated in place.

        Args:
            state: of all prompts, and of the run; unchanged if an error is raised.
            prompts: (P,) positions in the state, each at most once.
        """
        rewards_P_G = np.asarray(rewards_P_G, dtype=np.float64)
        self.check(rewards_P_G)
        before = self.state_at(state, prompts)
        after = self.update(before, rewards_P_G)
        estimate = self.estimate(after if self.reads == "after" else before, rewards_P_G)
        if leave_one_out:
            without_P_G = self.mean_without_each(after, rewards_P_G, estimate)
            estimate = dataclasses.replace(estimate, without_each=without_P_G)
        for field in self.state_fields:
            state[field][prompts] = after[field]
        state |= {field: after[field] for field in self.shared_fields}
        state |= self.learn(state)
        return estimate

    def state_at(self, state: State, prompts: NDArray[np.int64]) -> State:
        """Return a copy of the state of some prompts, with features and run-wide state."""
        shared = {field: state[field] for field in self.shared_fields}
        own = [field for field in (*self.state_fields, "features") if field in state]
        return {field: state[field][prompts] for field in own} | shared

    def columns(self, state: State, prompts: NDArray[np.int64]) -> Floats:
        """Return the state of some prompts as a store keeps it, (P, F): a column for each of ``state_fields``."""
        columns = [state[field][prompts] for field in self.state_fields]
        return np.array(columns, dtype=np.float64).reshape(len(columns), len(prompts)).T

    def supports(self, rewards: Floats) -> NDArray[np.bool_]:
        """Return which rewards the estimator accepts, in their shape; False for a missing one."""
        if self.support == "binary":
            return np.asarray((rewards == 0) | (rewards == 1))
        if self.support == "unit":
            return np.asarray((rewards >= 0) & (rewards <= 1))
        return np.isfinite(rewards)

    def check(self, rewards_P_G: Floats) -> None:
        """Raise what :meth:`observe` would raise for these rewards."""
        if rewards_P_G.ndim != 2:
            raise ValueError(f"rewards have shape {rewards_P_G.shape}; (prompts, rollouts) is needed")
        wrong = ~self.supports(rewards_P_G)
        if not wrong.any() and rewards_P_G.shape[1]:
            return
        missing = np.isnan(rewards_P_G)
        if missing.all(axis=1).any():
            raise ValueError(f"rewards[{int(missing.all(axis=1).argmax())}] holds no reward; leave the prompt out")
        wrong &= ~missing
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            allowed = {"binary": "0 or 1", "unit": "in [0, 1]", "real": "finite"}[self.support]
            raise RewardSupportError(row, column, float(rewards_P_G[row, column]), allowed)


ESTIMATORS: Registry[RewardEstimator] = Registry(
    "estimator", RewardEstimator, __package__, __package__, predicted_prior="auto"
)
register = ESTIMATORS.register


class BetaPosterior(RewardEstimator):
    """Keeps a Beta posterior of each prompt as ``alpha`` and ``beta``; for rewards 0 and 1."""

    support: ClassVar[Support] = "binary"

    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        return Estimate.bernoulli(state["alpha"], state["beta"])

    def group_weight(self, state: State, rewards_P_G: Floats) -> Floats:
        return counts(rewards_P_G)[1] / (state["alpha"] + state["beta"])


def counts(rewards_P_G: Floats) -> tuple[Floats, Floats]:
    """Return sum of rewards S and number of rollouts N of each group, (P,); NaN is left out."""
    successes = rewards_P_G.sum(axis=1)
    if not np.isnan(successes).any():
        return successes, np.full(len(rewards_P_G), float(rewards_P_G.shape[1]))
    return np.nansum(rewards_P_G, axis=1), np.sum(~np.isnan(rewards_P_G), axis=1, dtype=np.float64)
