"""GRESO: prompts whose last groups had zero variance are skipped, with probabilities that adapt.

Source: GRESO (Zheng et al. 2025, arXiv 2506.02177), and its published code for what the paper leaves open.
docs/methods.md lists the differences.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies.base import (
    Decision,
    RolloutStrategy,
    RunFacts,
    Sampler,
    SamplingError,
    register,
    varies,
)
from openrlhf_dbb.core.strategies.parameters import parameter

MOST_IDLE_PASSES = 200
"""Passes over the data in which every prompt was skipped, before the run is given up."""


@register
@dataclass(frozen=True)
class Greso(RolloutStrategy):
    """Prompts whose last groups had zero variance are skipped before generation.

    A prompt is skipped with probability 1 - max(p^z, floor) after z groups in a row of zero variance. p is ``p_easy``
    if these groups succeeded and ``p_hard`` if they failed; a group that varies resets z, one of zero variance of the
    other kind starts at 1; skipping does not change z. After every training step from the second pass on, each p falls
    by ``step`` if the share of such groups among all generated for the step was at its target or above, and rises by it
    otherwise, within [min_p, max_p].

    The batch is filled in rounds: the first of ``batch`` prompts, later ones of ``safety * missing / (1 - z)`` with z
    the share of groups of zero variance in the round before, between ``min_batch`` and ``batch``. Groups of zero
    variance are not trained on.
    """

    p_easy: float = parameter(0.5, "initial p of prompts whose last groups all succeeded", within="(0, 1]")
    p_hard: float = parameter(0.5, "initial p of prompts whose last groups all failed", within="(0, 1]")
    target_easy: float = parameter(1 / 12, "share of groups with only successes to aim at", within="(0, 1)")
    target_hard: float = parameter(1 / 6, "share of groups with only failures to aim at", within="(0, 1)")
    step: float = parameter(0.01, "change of p_easy and p_hard after each training step", within="(0, 1)")
    min_p: float = parameter(0.05, "lowest p_easy and p_hard", within="(0, 1]")
    max_p: float = parameter(0.95, "highest p_easy and p_hard", within="(0, 1]")
    floor: float = parameter(0.01, "lowest probability that a prompt is generated for", within="(0, 1]")
    batch: int | None = parameter(
        None, "prompts of a step's first round", least=1, default_text="1.5 x --rollout.batch_size"
    )
    min_batch: int | None = parameter(
        None, "fewest prompts of a later round", least=1, default_text="--rollout.batch_size / 2"
    )
    safety: float = parameter(
        1.25,
        "factor on the expected number of prompts that a later round needs",
        least=1,
        why="rounds would ask for fewer prompts than needed",
    )

    name: ClassVar[str] = "greso"
    needs_scores: ClassVar[bool] = True
    min_rollouts: ClassVar[int] = 2
    discards: ClassVar[bool] = True
    needs_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_p > self.max_p:
            raise ValueError(f"--greso.min_p {self.min_p:g} is above --greso.max_p {self.max_p:g}")

    def complete(self, facts: RunFacts) -> Greso:
        return dataclasses.replace(
            self,
            batch=facts.groups * 3 // 2 if self.batch is None else self.batch,
            min_batch=-(-facts.groups // 2) if self.min_batch is None else self.min_batch,
        )

    def describe(self) -> str:
        return "GRESO's pre-rollout filtering"

    def sampler(self, facts: RunFacts) -> GresoSampler:
        return GresoSampler(self, facts)


class GresoSampler(Sampler):
    """Holds each prompt's groups in a row of zero variance, and the probabilities that adapt."""

    def __init__(self, strategy: Greso, facts: RunFacts) -> None:
        super().__init__(facts)
        assert strategy.batch is not None and strategy.min_batch is not None, "a complete strategy is needed"
        self._strategy = strategy
        self._batch, self._min_batch = strategy.batch, min(strategy.min_batch, strategy.batch)
        self.p_easy, self.p_hard = strategy.p_easy, strategy.p_hard
        # Groups in a row of zero variance: z if they succeeded, -z if they failed; others are not in it.
        self._streak: dict[int, int] = {}
        self._passes = self._idle_passes = 0
        self._random = np.random.default_rng(facts.seed)
        self._in_step = _Counts()
        self._in_round = _Counts()
        self._last_round: _Counts | None = None
        self._shares = (0.0, 0.0)

    def probability(self, prompt_id: int) -> float:
        """The probability that a drawn prompt is generated for."""
        streak = self._streak.get(prompt_id, 0)
        base = self.p_easy if streak > 0 else self.p_hard
        return max(float(base ** abs(streak)), self._strategy.floor)

    def rollouts(self, prompt_id: int) -> int:
        return 0 if self._random.random() >= self.probability(prompt_id) else self.facts.rollouts

    def round_size(self, missing: int) -> int:
        last = self._last_round
        if last is None or last.easy + last.hard == last.groups:
            return self._batch
        # Not by z, whose rounding the floor would show: 1.25 * 12 / (1 - 0.7) is 49.999...
        needed = self._strategy.safety * missing * last.groups / (last.groups - last.easy - last.hard)
        return int(max(min(needed, self._batch), self._min_batch))

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        self._idle_passes = 0
        if np.isnan(scores_N).all():
            return Decision.DISCARD  # nothing is known of it: neither trained on nor counted
        self._in_step.groups += 1
        self._in_round.groups += 1
        if varies(scores_N):
            self._streak.pop(prompt_id, None)
            return Decision.TRAIN
        easy = float(np.nanmean(scores_N)) > 0.5
        before = self._streak.get(prompt_id, 0)
        self._streak[prompt_id] = max(before, 0) + 1 if easy else min(before, 0) - 1
        for counts in (self._in_step, self._in_round):
            counts.easy += easy
            counts.hard += not easy
        return Decision.DISCARD

    def end_round(self) -> None:
        if self._in_round.groups:
            self._last_round = self._in_round
        self._in_round = _Counts()

    def end_step(self) -> None:
        counts = self._in_step
        self._shares = (counts.easy / counts.groups, counts.hard / counts.groups)
        if self._passes:
            self.p_easy = self._moved(self.p_easy, self._shares[0], self._strategy.target_easy)
            self.p_hard = self._moved(self.p_hard, self._shares[1], self._strategy.target_hard)
        self._in_step, self._last_round = _Counts(), None

    def _moved(self, p: float, share: float, target: float) -> float:
        moved = p - self._strategy.step if share >= target else p + self._strategy.step
        return min(max(moved, self._strategy.min_p), self._strategy.max_p)

    def end_pass(self) -> None:
        self._passes += 1
        self._idle_passes += 1
        if self._idle_passes > MOST_IDLE_PASSES:
            raise SamplingError(
                f"GRESO skipped every prompt in {MOST_IDLE_PASSES} passes over the data; raise --greso.floor or "
                "--greso.min_p, or use more prompts"
            )

    def metrics(self) -> dict[str, float]:
        return {
            "greso/p_easy": self.p_easy,
            "greso/p_hard": self.p_hard,
            "greso/easy_share": self._shares[0],
            "greso/hard_share": self._shares[1],
        }

    def state(self) -> dict[str, Any]:
        return {
            "p": (self.p_easy, self.p_hard),
            "streak": dict(self._streak),
            "passes": self._passes,
            "random": self._random.bit_generator.state,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.p_easy, self.p_hard = state["p"]
        self._streak = dict(state["streak"])
        self._passes = state["passes"]
        self._random.bit_generator.state = state["random"]


class _Counts:
    """Groups generated, and those of zero variance."""

    def __init__(self) -> None:
        self.groups = self.easy = self.hard = 0
