"""Math-Verify's verdicts on the same answers as in training, and the answers for majority votes.

The reward function ``math_answer`` reads answers in the same way, but also knows the question. Here a formula that a
response copies from its question counts if the label is the same formula.
"""

from __future__ import annotations

from openrlhf_dbb.evaluation.verifiers.statements import Verdict
from openrlhf_dbb.rewards.answers import final_answer, last_box, normal
from openrlhf_dbb.rewards.math_answer import score


def verify(response: str, label: str) -> Verdict:
    """Return the verdict of Math-Verify.

    Raises:
        ValueError: Math-Verify cannot read the label.
    """
    found = final_answer(response, label)
    return Verdict(score(found, label), _vote(found, response))


def verify_or_compare(response: str, label: str) -> Verdict:
    """Return the verdict of Math-Verify; if it cannot read the label, compare answer and label as text."""
    try:
        return verify(response, label)
    except ValueError:
        found = final_answer(response, label)
        return Verdict(float(normal(found or "") == normal(label)), _vote(found, response))


def answer(response: str) -> str | None:
    """Return the answer of a response in one notation, for majority votes where labels are not known."""
    return _vote(final_answer(response, label=""), response)


def _vote(answer: str | None, response: str) -> str | None:
    # A box that states no value still votes for its text.
    return normal(answer or last_box(response) or "") or None
