"""Collects a training's progress and warnings for the driver's progress line."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from openrlhf_dbb.saved.best_model import Best

LOG_PROBS, TRAINING, GENERATING, EVALUATING = "log-probs", "training", "generating", "evaluating"
COUNTED_BY_ENGINES = (GENERATING, EVALUATING)
DIFFERENCE = "vllm/log_prob_difference"  # the metric: mean of the absolute differences, nats a token

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
    ends: list[float] = field(default_factory=list)  # of the steps of this start; the first is their beginning
    reward: float | None = None  # mean of the last step
    zero_variance: float | None = None  # share of the last step's groups; None at N = 1
    accuracy: dict[int, float] = field(default_factory=dict)  # held-out, by step
    # The first answer to each held-out prompt, its end and its score, before the first step and at the last evaluation.
    before: list[tuple[str, float]] = field(default_factory=list)
    after: list[tuple[str, float]] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)  # of the steps of this start
    difference: float = 0.0  # of the log-probs of vLLM and the policy in the first step of this start
    best: Best | None = None  # best, best_folder and warnings: once the run has finished
    best_folder: Path | None = None
    warnings: list[str] = field(default_factory=list)
    has_end_token: bool = True  # of the model

    def enter(self, phase: str, size: int = 0) -> None:
        self.size = size
        if phase != self.phase:
            self.phase, self.since = phase, time.monotonic()

    def troubles(self, *, held_out_samples: int, max_new_tokens: int | None, punishes_failures: bool) -> dict[str, str]:
        """Return what is wrong with the run and what to do about it, one line each, by the kind of trouble."""
        rollouts, right, cut, missing = 0, 0.0, 0, 0
        for outcome in reversed(list(self.outcomes)):
            if rollouts < _LAST_ROLLOUTS:  # the last steps that together have enough
                rollouts, right = rollouts + outcome.rollouts, right + outcome.right
                cut, missing = cut + outcome.cut, missing + outcome.missing
        lines = {}
        if self.difference > _DIFFERENCE:
            lines["weights"] = (
                f"the log-probs of vLLM and of the policy differ by {self.difference:.2g} nats a token, as if vLLM did "
                "not have the policy's weights; resume once more, and report it if it happens again"
            )
        if rollouts >= _LAST_ROLLOUTS and right < _RARE * rollouts:
            cure = "use easier prompts, a better start, or more rollouts a prompt"
            if punishes_failures:
                cure += "; where successes are this rare, --method centered or --estimator point keeps more of them"
            lines["rare"] = f"only {_percent(right / rollouts)} of the last {rollouts} rollouts were right: {cure}"
        if accuracy := dict(self.accuracy):
            first, last, best = min(accuracy), max(accuracy), max(accuracy, key=accuracy.__getitem__)
            before, after = accuracy[first], accuracy[last]
            variance = (before * (1 - before) + after * (1 - after)) / max(held_out_samples, 1)
            # Two standard errors of the difference of two binomials; other rewards than 0 and 1 say nothing.
            if variance >= 0 and before - after > 2 * math.sqrt(variance):
                lines["falling"] = (
                    f"held-out accuracy fell from {_percent(before)} at step {first} to {_percent(after)} at step "
                    f"{last} (best: {_percent(accuracy[best])} at step {best}): lower --actor.adam.lr"
                )
        if missing > _MANY_MISSING * (rollouts + missing):
            lines["missing"] = (
                f"{_percent(missing / (rollouts + missing))} of the last {rollouts + missing} rollouts could not be "
                "verified, and nothing is learned from them: look at the verifier"
            )
        generated = rollouts + missing
        if cut > generated / 2:
            lines["cut"] = (
                f"{cut / generated:.0%} of the last {generated} responses were cut at the limit of "
                f"{max_new_tokens} tokens: raise --rollout.max_new_tokens, or ask for shorter answers in the prompt"
            )
        if "cut" in lines:
            lines.pop("rare", None)  # they are wrong because they are cut
            if not self.has_end_token:
                lines["cut"] = NO_END_TOKEN
        return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
