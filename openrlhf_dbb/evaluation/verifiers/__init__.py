"""Verifiers of responses: whether a response is correct, and its answer.

statements   the places where a response states its answer; the verdict on a response
mathematics  Math-Verify's verdicts
options      the letter that a response settles on
exact        Big-Bench Hard's rules, by form of label
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openrlhf_dbb.evaluation.verifiers import exact, mathematics, options
from openrlhf_dbb.evaluation.verifiers.statements import Verdict
from openrlhf_dbb.rewards.answers import as_latex
from openrlhf_dbb.rewards.math_answer import unreadable_labels

__all__ = ["KINDS", "Verdict", "check_labels", "normal_label", "verify"]


_VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "math": mathematics.verify,
    "math_or_text": mathematics.verify_or_compare,
    "choice": options.verify,
    "exact": exact.verify,
}
KINDS = tuple(_VERIFIERS)


def verify(kind: str, response: str, label: str) -> Verdict:
    """Return the verdict on a response. Thread-safe.

    Args:
        kind: one of ``KINDS``.
        response: the model's text, without the prompt and special tokens.
        label: the correct answer, as ``normal_label`` gives it.

    Raises:
        ValueError: Math-Verify cannot read the label.
    """
    return _VERIFIERS[kind](response, label)


def normal_label(kind: str, label: str) -> str:
    """Return the label as ``verify`` expects it: in formulas, Python's notation becomes LaTeX."""
    return as_latex(label.strip()) if kind.startswith("math") else label.strip()


def check_labels(kind: str, labels: Sequence[str]) -> list[str | None]:
    """Return for each label why it cannot be used (with math_or_text: why it is compared as text), or None."""
    math = kind.startswith("math")
    reasons = unreadable_labels(label for label in labels if label.strip()) if math else {}
    return [reasons.get(label) if label.strip() else "the label is empty" for label in labels]
