"""GRESO: prompts whose last groups agreed wholly are skipped, with probabilities that adapt.

Source: GRESO (Zheng et al. 2025, arXiv 2506.02177), and its published code for what the paper leaves open.
docs/methods.md lists the differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies.base import Sampling, SamplingError, varies

MOST_IDLE_PASSES = 200
"""Passes over the data in which every prompt was skipped, before the run is given up."""


class GresoSampling(Sampling):
    """Skips a prompt with probability 1 - max(p^z, floor) after z groups in a row that agreed wholly.

    p is ``p_easy`` if these groups succeeded and ``p_hard`` if they failed; a group that varies, or agrees the other
    way, starts the count anew; skipping does not change it. After every training step from the second pass on, each p
    falls by ``step`` if the share of such groups among all generated for the step was at its target or above, and
    rises by it otherwise, within [min_p, max_p].

    The batch is filled in rounds: the first of ``first_batch`` prompts, later ones of ``safety * missing / (1 - z)``
    with z the zero-variance share of the round before, between ``min_batch`` and ``first_batch``.

    Args:
        batch: groups of a batch.
        first_batch: prompts of a step's first round, the largest there is.
        min_batch: prompts of a later round at least.
        safety: factor on the prompts that a later round is thought to need.
        p_easy, p_hard: start values, in (0, 1].
        target_easy, target_hard: shares of all groups of a step, in (0, 1).
        step, min_p, max_p: see above.
        floor: lowest probability that a prompt is generated for, in (0, 1].
        seed: of the random numbers, which nothing else draws from.
    """

    def __init__(
        self,
        batch: int,
        *,
        first_batch: int,
        min_batch: int,
        safety: float,
        p_easy: float,
        p_hard: float,
        target_easy: float,
        target_hard: float,
        step: float,
        min_p: float,
        max_p: float,
        floor: float,
        seed: int,
    ) -> None:
        super().__init__(batch)
        self._first_batch, self._min_batch, self._safety = first_batch, min(min_batch, first_batch), safety
        self._step, self._min_p, self._max_p, self._floor = step, min_p, max_p, floor
        self.p_easy, self.p_hard = p_easy, p_hard
        self._target_easy, self._target_hard = target_easy, target_hard
        # Groups in a row that agreed wholly: z if they succeeded, -z if they failed; others are not there.
        self._streak: dict[int, int] = {}
        self._passes = self._idle_passes = 0
        self._random = np.random.default_rng(seed)
        self._in_step = _Counts()
        self._in_round = _Counts()
        self._last_round: _Counts | None = None
        self._shares = (0.0, 0.0)

    def generates(self, prompt: int) -> float:
        """The probability that a drawn prompt is generated for."""
        streak = self._streak.get(prompt, 0)
        base = self.p_easy if streak > 0 else self.p_hard
        return max(float(base ** abs(streak)), self._floor)

    def skips(self, prompt: int) -> bool:
        return bool(self._random.random() >= self.generates(prompt))

    def round_size(self, missing: int) -> int:
        last = self._last_round
        if last is None or last.easy + last.hard == last.groups:
            return self._first_batch
        # Not by z, whose rounding the floor would show: 1.25 * 12 / (1 - 0.7) is 49.999...
        needed = self._safety * missing * last.groups / (last.groups - last.easy - last.hard)
        return int(max(min(needed, self._first_batch), self._min_batch))

    def keeps(self, prompt: int, scores_N: NDArray[np.float64]) -> bool:
        self._idle_passes = 0
        if np.isnan(scores_N).all():
            return False  # nothing is known of it: neither trained on nor counted
        self._in_step.groups += 1
        self._in_round.groups += 1
        if varies(scores_N):
            self._streak.pop(prompt, None)
            return True
        easy = float(np.nanmean(scores_N)) > 0.5
        before = self._streak.get(prompt, 0)
        self._streak[prompt] = max(before, 0) + 1 if easy else min(before, 0) - 1
        for counts in (self._in_step, self._in_round):
            counts.easy += easy
            counts.hard += not easy
        return False

    def end_round(self) -> None:
        if self._in_round.groups:
            self._last_round = self._in_round
        self._in_round = _Counts()

    def end_step(self) -> None:
        counts = self._in_step
        self._shares = (counts.easy / counts.groups, counts.hard / counts.groups)
        if self._passes:
            self.p_easy = self._moved(self.p_easy, self._shares[0], self._target_easy)
            self.p_hard = self._moved(self.p_hard, self._shares[1], self._target_hard)
        self._in_step, self._last_round = _Counts(), None

    def _moved(self, p: float, share: float, target: float) -> float:
        moved = p - self._step if share >= target else p + self._step
        return min(max(moved, self._min_p), self._max_p)

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
    """Groups generated, and those that agreed wholly."""

    def __init__(self) -> None:
        self.groups = self.easy = self.hard = 0
