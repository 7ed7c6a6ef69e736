"""Verifiers of responses: whether a response is correct, and its answer.

This file: Math-Verify, as in training, and the choice of a verifier.

statements   the places where a response states its answer; the verdict on a response
choices      the letter that a response settles on
exact        Big-Bench Hard's rules, by form of label
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from openrlhf_dbb.evaluation.verifiers import choices, exact
from openrlhf_dbb.evaluation.verifiers.statements import Verdict
from openrlhf_dbb.rewards import reasoning_gym
from openrlhf_dbb.rewards.answers import as_latex, final_answer, last_box, normal
from openrlhf_dbb.rewards.math_answer import score


def normal_label(kind: str, label: str) -> str:
    """Return the label as the verifier expects it: in formulas, Python's notation becomes LaTeX."""
    return as_latex(label.strip()) if kind.startswith("math") else label.strip()


def _math(response: str, label: str, *, or_text: bool = False) -> Verdict:
    # The question is not known here, so a formula that is copied from it counts if the label is the same formula.
    answer = final_answer(response, label)
    try:
        right = score(answer, label)
    except ValueError:  # Math-Verify cannot read the label
        if not or_text:
            raise
        right = float(normal(answer or "") == normal(label))
    # A box that states no value still votes for its text.
    return Verdict(right, normal(answer or last_box(response) or "") or None)


VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "math": _math,
    "math_or_text": functools.partial(_math, or_text=True),
    "choice": choices.verify,
    "exact": exact.verify,
    "reasoning_gym": lambda response, label: Verdict(reasoning_gym.score(response, label), None),
}
"""By name, thread-safe functions of a response without special tokens and a label as ``normal_label`` gives it.
"math" raises ValueError if Math-Verify cannot read the label."""
