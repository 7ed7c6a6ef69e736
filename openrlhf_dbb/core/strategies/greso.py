"""GRESO: prompts whose last groups had zero variance are skipped, with probabilities that adapt.

Source: GRESO (Zheng et al. 2025, arXiv 2506.02177), and its published code for what the paper leaves open.
docs/methods.md lists the differences.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core import SET_ASIDE
from openrlhf_dbb.core.strategies import (
    Decision,
    RolloutStrategy,
    RunFacts,
    Sampler,
    parameter,
    register,
    varies,
)
from openrlhf_dbb.errors import RunError

# GRESO's published settings.
LOWEST_P = 0.05  # of p_easy and p_hard
HIGHEST_P = 0.95  # likewise
STEP = 0.01  # their change after a training step
MOST_IDLE_PASSES = 200  # in which every prompt was skipped, before the run is given up


@register
@dataclass(frozen=True)
class Greso(RolloutStrategy):
    """Prompts whose last groups had zero variance are skipped before generation. docs/methods.md has the rules."""

    target: float = parameter(0.25, "share of zero-variance groups to aim at", within="(0, 1)")
    floor: float = parameter(
        0.01, "lowest probability that a prompt is generated for", within="(0, 1]"
    )

    name: ClassVar[str] = "greso"
    needs_scores: ClassVar[bool] = True
    needs_budget: ClassVar[bool] = True

    @property
    def min_rollouts(self) -> int:
        """Two: the scores of a group must be able to differ."""
        return 2

    def describe(self) -> str:
        """Return the name of the published method."""
        return "GRESO's pre-rollout filtering"

    def sampler(self, facts: RunFacts) -> "GresoSampler":
        """Return a sampler that skips prompts by their last groups."""
        return GresoSampler(self, facts)


class GresoSampler(Sampler):
    """Skips prompts at random, by how many of their groups in a row had zero variance."""

    kept: ClassVar[tuple[str, ...]] = (
        "p_easy",
        "p_hard",
        "_streak",
        "_unverified",
        "_passes",
        "_random",
    )

    def __init__(self, strategy: Greso, facts: RunFacts) -> None:
        super().__init__(facts)
        self._floor = strategy.floor
        self._targets = (strategy.target / 3, strategy.target * 2 / 3)
        self._most = facts.groups * 3 // 2  # published: 192 for 128
        self._fewest = -(-facts.groups // 2)  # published: 64 for 128
        self.p_easy = 0.5  # as published
        self.p_hard = 0.5  # likewise
        # Groups in a row of zero variance: z if they succeeded, -z if they failed. Other prompts are not in it.
        self._streak: dict[int, int] = {}
        self._unverified: dict[int, int] = {}  # groups in a row without any score
        self._passes = 0
        self._idle_passes = 0
        self._random = np.random.default_rng(facts.seed)
        # Groups generated in each round of the step, and the easy and hard ones among them.
        self._rounds: list[Counter[str]] = [Counter()]
        self._shares = (0.0, 0.0)

    def probability(self, prompt_id: int) -> float:
        """Return the probability that a drawn prompt is generated for."""
        if self._unverified.get(prompt_id, 0) >= SET_ASIDE:
            return self._floor
        streak = self._streak.get(prompt_id, 0)
        base = self.p_easy if streak > 0 else self.p_hard
        return max(float(base ** abs(streak)), self._floor)

    def skips(self, prompt_id: int) -> bool:
        """Return True with probability 1 - :meth:`probability`."""
        return self._random.random() >= self.probability(prompt_id)

    def round_size(self, missing: int) -> int:
        """Return 1.25 times what the last round's share of mixed groups asks for, within limits."""
        # A round of skipped prompts tells nothing.
        rounds = [counts for counts in self._rounds if counts]
        self._rounds.append(Counter())
        if not rounds:
            return self._most
        last = rounds[-1]
        mixed = last["groups"] - last["easy"] - last["hard"]
        if not mixed:  # the published code divides by zero here
            return self._most
        # 1.25 as published. Whole numbers are divided: 1.25 * 12 / (1 - 0.7) would be 49.999...
        needed = 1.25 * missing * last["groups"] / mixed
        return int(max(min(needed, self._most), self._fewest))

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        """Return TRAIN for a group whose scores differ, else DISCARD; count the prompt's streak."""
        self._idle_passes = 0
        if np.isnan(scores_N).all():
            self._unverified[prompt_id] = self._unverified.get(prompt_id, 0) + 1
            return Decision.DISCARD  # a group without any score is neither trained on nor counted
        self._unverified.pop(prompt_id, None)
        if varies(scores_N):
            self._rounds[-1]["groups"] += 1
            self._streak.pop(prompt_id, None)
            return Decision.TRAIN
        before = self._streak.get(prompt_id, 0)
        self._rounds[-1]["groups"] += 1
        if np.nanmean(scores_N) > 0.5:
            self._rounds[-1]["easy"] += 1
            self._streak[prompt_id] = max(before, 0) + 1
        else:
            self._rounds[-1]["hard"] += 1
            self._streak[prompt_id] = min(before, 0) - 1
        return Decision.DISCARD

    def end_step(self) -> None:
        """Move p_easy and p_hard towards their targets, from the second pass on."""
        counts = sum(self._rounds, Counter[str]())
        self._shares = (counts["easy"] / counts["groups"], counts["hard"] / counts["groups"])
        if self._passes:  # in the first pass no prompt has a history
            self.p_easy = _moved(self.p_easy, self._shares[0], self._targets[0])
            self.p_hard = _moved(self.p_hard, self._shares[1], self._targets[1])
        self._rounds = [Counter()]

    def end_pass(self) -> None:
        """Count the pass.

        Raises:
            RunError: too many passes in a row have skipped every prompt.
        """
        self._passes += 1
        self._idle_passes += 1
        if self._idle_passes > MOST_IDLE_PASSES:
            raise RunError(
                f"GRESO skipped every prompt in {MOST_IDLE_PASSES} passes over the data; raise greso.floor, "
                "or use more prompts"
            )

    def metrics(self) -> dict[str, float]:
        """Return p_easy and p_hard, and the last step's shares of easy and hard groups."""
        easy, hard = self._shares
        return {
            "greso/p_easy": self.p_easy,
            "greso/p_hard": self.p_hard,
            "greso/easy_share": easy,
            "greso/hard_share": hard,
        }


def _moved(p: float, share: float, target: float) -> float:
    moved = p - STEP if share >= target else p + STEP
    return min(max(moved, LOWEST_P), HIGHEST_P)
