"""Verifiers of responses: whether a response is correct, and its answer. They read answers as the rewards do.

exact    Big-Bench Hard's rules, by form of label
"""

from collections.abc import Callable
from typing import NamedTuple

from openrlhf_dbb.evaluation.verifiers import exact
from openrlhf_dbb.rewards import choices, reasoning_gym
from openrlhf_dbb.rewards.answers import last_box
from openrlhf_dbb.rewards.math_answer import judge
from openrlhf_dbb.rewards.values import canonical, spelled


class Verdict(NamedTuple):
    """A verifier's verdict on a response."""

    score: float | None  # 1.0 correct; 0.0 wrong, or no answer; None not verified (missing, not wrong)
    answer: str | None  # normalized, so that majority votes can compare texts; None if there is none


def _math(response: str, label: str) -> Verdict:
    # The question is not known here, so a formula that is copied from it counts.
    score, value = judge(response, label)
    # A box that states no value still votes for its text.
    return Verdict(score, canonical(value) if value else spelled(last_box(response) or "") or None)


def _math_or_text(response: str, label: str) -> Verdict:
    try:
        verdict = _math(response, label)
    except ValueError:  # the label cannot be read
        verdict = Verdict(None, spelled(last_box(response) or "") or None)
    if verdict.score is None:
        return verdict._replace(score=float(spelled(last_box(response) or "") == spelled(label)))
    return verdict


def _choice(response: str, label: str) -> Verdict:
    answer = choices.letter(response)
    return Verdict(float(answer == label), answer)


VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "math": _math,
    "math_or_text": _math_or_text,
    "choice": _choice,
    "exact": lambda response, label: Verdict(*exact.verify(response, label)),
    "reasoning_gym": lambda response, label: Verdict(reasoning_gym.score(response, label), None),
}
"""By name, thread-safe functions of a response without special tokens and a label.
"math" raises ValueError if the label cannot be read."""
