"""Math-Verify's verdicts on the same answers as in training, and the answers for majority votes.

The answer is read as the reward function ``math_answer`` reads it, except that the question is not known here: a
formula that a response copies from its question counts if it equals a label that is a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from openrlhf_dbb.evaluation.verifiers.verdict import Verdict
from openrlhf_dbb.rewards.answers import boxed, label_expression, last_box, same_integer
from openrlhf_dbb.rewards.final_answer import final_answer, is_value
from openrlhf_dbb.rewards.latex import normal
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

_pool = VerifierPool.from_environment()

Item = TypeVar("Item")
Result = TypeVar("Result")


def verify_all(pairs: Sequence[tuple[str, str]], *, text: bool) -> list[Verdict]:
    """Return verdicts on (response, label) pairs; with ``text``, unreadable labels are compared as text.

    Raises:
        ValueError: Math-Verify cannot read a label, and ``text`` is false.
    """
    answers = [final_answer(response, label) for response, label in pairs]
    questions = [(answer or "", label) for answer, (_, label) in zip(answers, pairs, strict=True)]
    different = list(dict.fromkeys(questions))
    scores = dict(zip(different, _in_threads(_score_or_text if text else _score, different), strict=True))
    return [
        Verdict(scores[question], _vote(answer, response))
        for question, answer, (response, _) in zip(questions, answers, pairs, strict=True)
    ]


def unreadable(labels: Sequence[str]) -> list[str | None]:
    """Return for each label why Math-Verify cannot read it, or None."""
    different = list(dict.fromkeys(labels))
    why = dict(zip(different, _in_threads(_why_unreadable, different), strict=True))
    return [why[label] for label in labels]


def answer(response: str) -> str | None:
    """Return the answer of a response in one notation, for majority votes where labels are not known."""
    return _vote(final_answer(response, label=""), response)


def _vote(answer: str | None, response: str) -> str | None:
    """The answer in one notation; a box that states no value still votes for what stands in it."""
    return normal(answer or last_box(response) or "") or None


def _score(question: tuple[str, str]) -> float | None:
    answer, label = question
    if not answer and is_value(label):
        return 0.0
    correct = same_integer(answer, label)
    if correct is None:
        correct = _pool.verify(boxed(answer) if answer else "", label_expression(label))
    return None if correct is None else float(correct)


def _score_or_text(question: tuple[str, str]) -> float | None:
    try:
        return _score(question)
    except ValueError:  # Math-Verify cannot read the label, which ``unreadable`` has reported
        answer, label = question
        return float(normal(answer) == normal(label))


def _why_unreadable(label: str) -> str | None:
    if not label.strip():
        return "the label is empty"
    if is_value(label):
        return None
    try:
        _pool.verify("", label_expression(label))
    except ValueError as error:
        return str(error)
    return None


def _in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    with ThreadPoolExecutor(_pool.size) as threads:
        return list(threads.map(function, items))
