"""Collects a training's progress and warnings for the driver's progress line."""

import math
import operator
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from openrlhf_dbb.saved.best_model import Best

LOG_PROBS = "log-probs"
TRAINING = "training"
GENERATING = "generating"
EVALUATING = "evaluating"
COUNTED_BY_ENGINES = (GENERATING, EVALUATING)
# The metric: mean of the absolute differences, nats a token
DIFFERENCE = "vllm/log_prob_difference"

_MANY_MISSING = 0.05  # of the rollouts
_LAST_ROLLOUTS = 256  # fewer say little about a rare success
_RARE = 0.02
_DIFFERENCE = 0.1  # nats a token; rounding in bf16 makes 0.01 to 0.05

NO_END_TOKEN = (
    "no response ends before its longest length, as the model has no end token; give eos_token in "
    "its tokenizer_config.json and eos_token_id in its config.json"
)


class StepOutcome(NamedTuple):
    """Counts the rollouts of one step and sums their scores."""

    rollouts: int  # with a reward
    right: float  # sum of their scores; NaN unless all are between 0 and 1
    cut: int  # whose response reached the limit of its length
    missing: int = 0  # without a reward; not among the rollouts


@dataclass
class Progress:
    """The numbers of the driver's progress line and summary. Steps are global steps."""

    step: int = 0  # trained and stored
    total: int = 0  # that the run will have
    phase: str = "starting"
    size: int = 0  # rollouts of the phase; 0 if they are not counted
    since: float = field(default_factory=time.monotonic)  # the phase began
    # Of the steps of this start; the first is their beginning
    ends: list[float] = field(default_factory=list)
    reward: float | None = None  # mean of the last step
    zero_variance: float | None = None  # share of the last step's groups; None at N = 1
    accuracy: dict[int, float] = field(default_factory=dict)  # held-out, by step
    # The end of the first answer to each held-out prompt, and its score: before the first step, and
    # at the last evaluation.
    before: list[tuple[str, float]] = field(default_factory=list)
    after: list[tuple[str, float]] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)  # of the steps of this start
    # Of the log-probs of vLLM and the policy in the first step of this start
    difference: float = 0.0
    best: Best | None = None  # best, best_folder and warnings: once the run has finished
    best_folder: Path | None = None
    warnings: list[str] = field(default_factory=list)
    has_end_token: bool = True  # of the model

    def enter(self, phase: str, size: int = 0) -> None:
        """Begin a phase of ``size`` rollouts; the present phase again keeps its start."""
        self.size = size
        if phase != self.phase:
            self.phase = phase
            self.since = time.monotonic()

    def troubles(
        self, *, held_out_samples: int, max_new_tokens: int | None, punishes_failures: bool
    ) -> dict[str, str]:
        """Return what is wrong with the run and what to do about it, one line each, by the kind of trouble."""
        last = self._last_rollouts()
        generated = last.rollouts + last.missing
        lines = {}
        if self.difference > _DIFFERENCE:
            lines["weights"] = (
                f"the log-probs of vLLM and of the policy differ by {self.difference:.2g} nats a token, as if vLLM did "
                "not have the policy's weights; resume once more, and report it if it happens again"
            )
        is_cut = last.cut > generated / 2
        # Responses that are cut are wrong for that reason.
        if last.rollouts >= _LAST_ROLLOUTS and last.right < _RARE * last.rollouts and not is_cut:
            lines["rare"] = _rare(last, punishes_failures)
        falling = self._falling(held_out_samples)
        if falling is not None:
            lines["falling"] = falling
        if last.missing > _MANY_MISSING * generated:
            lines["missing"] = (
                f"{_percent(last.missing / generated)} of the last {generated} rollouts could not be "
                "verified, and nothing is learned from them: look at the verifier"
            )
        if is_cut:
            lines["cut"] = (
                f"{last.cut / generated:.0%} of the last {generated} responses were cut at the limit of "
                f"{max_new_tokens} tokens: raise --rollout.max_new_tokens, or ask for shorter answers in the prompt"
            )
            if not self.has_end_token:
                lines["cut"] = NO_END_TOKEN
        return lines

    def _last_rollouts(self) -> StepOutcome:
        """Return the sums over the last steps that together have enough rollouts, or over all steps."""
        total = StepOutcome(0, 0.0, 0)
        for outcome in reversed(list(self.outcomes)):
            if total.rollouts >= _LAST_ROLLOUTS:
                break
            total = StepOutcome(*map(operator.add, total, outcome))
        return total

    def _falling(self, held_out_samples: int) -> str | None:
        """Return a line if held-out accuracy fell by more than two standard errors."""
        accuracy = dict(self.accuracy)
        if not accuracy:
            return None
        first = min(accuracy)
        last = max(accuracy)
        best = max(accuracy, key=accuracy.__getitem__)
        before = accuracy[first]
        after = accuracy[last]
        variance = (before * (1 - before) + after * (1 - after)) / max(held_out_samples, 1)
        # The difference of two binomials; other rewards than 0 and 1 say nothing.
        fell = variance >= 0 and before - after > 2 * math.sqrt(variance)
        if not fell:
            return None
        return (
            f"held-out accuracy fell from {_percent(before)} at step {first} to {_percent(after)} at step "
            f"{last} (best: {_percent(accuracy[best])} at step {best}): lower --actor.adam.lr"
        )


def _rare(last: StepOutcome, punishes_failures: bool) -> str:
    cure = "use easier prompts, a better start, or more rollouts a prompt"
    if punishes_failures:
        cure += "; where successes are this rare, --method centered or --estimator point keeps more of them"
    right = _percent(last.right / last.rollouts)
    return f"only {right} of the last {last.rollouts} rollouts were right: {cure}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
