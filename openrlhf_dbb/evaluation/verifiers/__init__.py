"""Verifiers of responses: whether a response is correct, and what it answered.

Kinds:
- math: Math-Verify, as in training; a label that it cannot read is an error
- math_or_text: the same, but a label that Math-Verify cannot read is compared as LaTeX text
- choice: the letter of an option
- exact: Big-Bench Hard's rules, chosen by the form of the label: letter, yes or no, number, parentheses, words

Modules:
mathematics   scores and answers of math and math_or_text
statements    where a response states its answer
options       the letter that a response settles on
exact         the rules by form of label
verdict       score and answer of a response
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openrlhf_dbb.evaluation.verifiers import exact, mathematics, options
from openrlhf_dbb.evaluation.verifiers.verdict import Verdict
from openrlhf_dbb.rewards.latex import as_latex

__all__ = ["KINDS", "Verdict", "check_labels", "normal_label", "verify", "verify_all"]

KINDS = ("math", "math_or_text", "choice", "exact")


def verify(kind: str, response: str, label: str) -> Verdict:
    """Whether a response is correct, and what it answered.

    Args:
        kind: one of ``KINDS``.
        response: the model's text, without the prompt and special tokens.
        label: the correct answer, as ``loading`` gives it.

    Returns:
        score: 1.0 or 0.0 (no answer is 0.0); None if it could not be verified: Math-Verify timed out or failed.
            answer: normalized, so that equal answers are equal texts in majority voting; None if none was found.

    Raises:
        ValueError: unknown kind, or the label cannot be read.
    """
    return verify_all(kind, [response], [label])[0]


def verify_all(kind: str, responses: Sequence[str], labels: Sequence[str]) -> list[Verdict]:
    """``verify`` for each response with its label; Math-Verify is asked the same question only once. Thread-safe.

    Raises:
        ValueError: as ``verify``, or the lengths differ.
    """
    pairs = list(zip(responses, labels, strict=True))
    if kind in _MATH:
        return mathematics.verify_all(pairs, text=kind == "math_or_text")
    rule, _ = _rule(kind)
    return [rule(response, label) for response, label in pairs]


def normal_label(kind: str, label: str) -> str:
    """The label as ``verify`` expects it: in formulas, numbers and functions in Python notation become LaTeX."""
    return as_latex(label.strip()) if kind in _MATH else label.strip()


def check_labels(kind: str, labels: Sequence[str]) -> list[str | None]:
    """Per label, why it cannot be used (with math_or_text: why it is compared as text), or None.

    Raises:
        ValueError: unknown kind.
    """
    if kind in _MATH:
        return mathematics.unreadable(labels)
    _, why_no_label = _rule(kind)
    return [why_no_label(label) for label in labels]


_MATH = ("math", "math_or_text")
_RULES: dict[str, tuple[Callable[[str, str], Verdict], Callable[[str], str | None]]] = {
    "choice": (options.verify, options.why_no_label),
    "exact": (exact.verify, exact.why_no_label),
}


def _rule(kind: str) -> tuple[Callable[[str, str], Verdict], Callable[[str], str | None]]:
    if kind not in _RULES:
        raise ValueError(f"unknown verifier {kind!r}; available: {', '.join(KINDS)}")
    return _RULES[kind]
