"""The contract of an online reward estimator: what it keeps, when it reads, what it may see."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
State = dict[str, Floats]
"""One float64 array of shape (P,) for each name in ``state_fields``."""


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of P prompts.

    Attributes:
        mean: shape (P,), estimated mean of one reward, in reward units.
        variance: shape (P,), estimated variance of ONE reward (not of ``mean``), >= 0.
    """

    mean: Floats
    variance: Floats


class RewardSupportError(ValueError):
    """A reward lies outside the values an estimator is defined for.

    Attributes:
        row, column: position of the first offender in ``rewards_P_G``.
        value: the reward found there.
        allowed: the permitted values, in words.
    """

    def __init__(self, row: int, column: int, value: float, allowed: str) -> None:
        super().__init__(row, column, value, allowed)
        self.row, self.column, self.value, self.allowed = row, column, value, allowed

    def __str__(self) -> str:
        return f"rewards[{self.row}, {self.column}] = {self.value:g} is not {self.allowed}"


class RewardEstimator(ABC):
    """Estimates each prompt's reward distribution from the groups of rollouts seen so far.

    An estimator is a frozen dataclass: its fields are its parameters, and they become command-line
    flags (``--NAME.FIELD``) by themselves; a field's ``metadata["help"]`` is the flag's help, and every
    field has a default. What it has learnt is not in the object but in a ``State`` that the caller keeps,
    stores and rolls back.

    All methods are vectorised over P prompts. ``rewards_P_G`` has shape (P, G), float; NaN marks a
    missing rollout (a verifier time-out), so the number of rollouts N may differ between prompts.
    Every row must hold at least one reward. Methods return new arrays and never change their input.

    Class attributes:
        name: the registered name.
        version: of the meaning of ``state_fields``; raise it when stored states are no longer valid.
        state_fields: names of the per-prompt numbers to keep, stored in this order.
        reads: "after" if ``estimate`` sees the state that already holds the current group (DBB,
            Algorithm 1), "before" if it must not (SPO, RAE).
        support: rewards accepted: "binary" (0 or 1), "unit" ([0, 1]) or "real" (any finite number).
            "binary" and "unit" are about the verifier's score; "real" about the reward that is optimised.
        min_rollouts: smallest group that can yield an advantage.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    state_fields: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[Literal["after", "before"]] = "after"
    min_rollouts: ClassVar[int] = 1

    @property
    def support(self) -> Literal["binary", "unit", "real"]:
        """Rewards accepted by :meth:`observe`."""
        return "real"

    @abstractmethod
    def initial_state(self, num_prompts: int) -> State:
        """The state of ``num_prompts`` prompts before any rollout."""

    @abstractmethod
    def update(self, state: State, rewards_P_G: Floats) -> State:
        """The state after one more visit of every prompt."""

    @abstractmethod
    def estimate(self, state: State, rewards_P_G: Floats) -> Estimate:
        """Mean and variance of one reward of every prompt, given a state and the current group."""

    def observe(self, state: State, rewards_P_G: Floats) -> tuple[State, Estimate]:
        """Check a group of rollouts, update, and read in the order the estimator declares.

        Returns:
            The new state and the estimate to score this very group with.

        Raises:
            RewardSupportError: a reward is outside ``support`` (or infinite).
            ValueError: shapes do not match, or a prompt has no reward at all.
        """
        rewards_P_G = np.asarray(rewards_P_G, dtype=np.float64)
        self.check(rewards_P_G)
        if rewards_P_G.shape[0] != len(next(iter(state.values()), rewards_P_G)):
            raise ValueError(f"rewards have {rewards_P_G.shape[0]} rows, the state has other prompts")
        new_state = self.update(state, rewards_P_G)
        return new_state, self.estimate(new_state if self.reads == "after" else state, rewards_P_G)

    def check(self, rewards_P_G: Floats) -> None:
        """Raise what :meth:`observe` would raise for these rewards."""
        if rewards_P_G.ndim != 2:
            raise ValueError(f"rewards have shape {rewards_P_G.shape}; (prompts, rollouts) is needed")
        missing = np.isnan(rewards_P_G)
        if missing.all(axis=1).any():
            raise ValueError(f"rewards[{int(missing.all(axis=1).argmax())}] holds no reward; leave the prompt out")
        if self.support == "binary":
            wrong, allowed = ~missing & (rewards_P_G != 0) & (rewards_P_G != 1), "0 or 1"
        elif self.support == "unit":
            wrong, allowed = ~missing & ~((rewards_P_G >= 0) & (rewards_P_G <= 1)), "in [0, 1]"
        else:
            wrong, allowed = np.isinf(rewards_P_G), "finite"
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise RewardSupportError(row, column, float(rewards_P_G[row, column]), allowed)

    @classmethod
    def parameter_names(cls) -> list[str]:
        """Names of the parameters: the dataclass's fields."""
        return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
