"""Warnings about a run that learns nothing or gets worse, from what its steps and evaluations show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RARE = 0.02
MOSTLY = 0.5
_LAST_ROLLOUTS = 256  # fewer say little about a rare success


@dataclass(frozen=True)
class StepOutcome:
    """How the generated rollouts of one step came out.

    Attributes:
        rollouts: those with a reward.
        right: the sum of their scores if all scores are between 0 and 1; NaN otherwise.
        cut: rollouts whose response reached the limit of its length.
    """

    rollouts: int
    right: float
    cut: int


def warnings(
    outcomes: Sequence[StepOutcome],
    accuracy: Mapping[int, float],
    *,
    held_out_samples: int,
    max_new_tokens: int | None,
    learns_from_failures: bool,
) -> dict[str, str]:
    """Return what is wrong with a run and what to do about it, one line each, by the kind of trouble.

    Args:
        outcomes: of the steps so far, the last one at the end.
        accuracy: held-out accuracy by step, in [0, 1].
        held_out_samples: responses that each accuracy is the mean of.
        max_new_tokens: limit of a response's length.
        learns_from_failures: whether a group that all fails is given advantages, as ``dbb`` does.
    """
    found: dict[str, str] = {}
    recent = _recent(outcomes)
    rollouts = sum(outcome.rollouts for outcome in recent)
    right = sum(outcome.right for outcome in recent)
    cut = sum(outcome.cut for outcome in recent)
    if rollouts >= _LAST_ROLLOUTS and right < RARE * rollouts:
        cure = "use easier prompts, a better start, or more rollouts a prompt"
        if learns_from_failures:
            cure += "; where successes are this rare, --estimator point or auto has kept more of them"
        found["rare"] = f"only {_percent(right / rollouts)} of the last {rollouts} rollouts were right: {cure}"
    if len(accuracy) > 1:
        first, last = min(accuracy), max(accuracy)
        if _fell(accuracy[first], accuracy[last], held_out_samples):
            best = max(accuracy, key=lambda step: accuracy[step])
            found["falling"] = (
                f"held-out accuracy fell from {_percent(accuracy[first])} at step {first} to "
                f"{_percent(accuracy[last])} at step {last} (best: {_percent(accuracy[best])} at step {best}): lower "
                "--actor.adam.lr, or try --estimator point or auto"
            )
    if rollouts and cut > MOSTLY * rollouts:
        found["cut"] = (
            f"{cut / rollouts:.0%} of the last {rollouts} responses were cut at the limit of {max_new_tokens} tokens: "
            "raise --rollout.max_new_tokens, or ask for shorter answers in the prompt"
        )
    return found


def _recent(outcomes: Sequence[StepOutcome]) -> Sequence[StepOutcome]:
    """The last steps that together have enough rollouts."""
    rollouts = 0
    for back, outcome in enumerate(reversed(outcomes), start=1):
        rollouts += outcome.rollouts
        if rollouts >= _LAST_ROLLOUTS:
            return outcomes[-back:]
    return outcomes


def _fell(before: float, after: float, samples: int) -> bool:
    """Whether an accuracy is lower by more than two standard errors of the difference, each as of a binomial."""
    variance = (before * (1 - before) + after * (1 - after)) / max(samples, 1)
    return before - after > 2 * math.sqrt(variance)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
