"""Math-Verify's verdicts, as in training, and the answers they are about.

The score is that of the reward function (``rewards.math_answer``), but what Math-Verify misreads is converted to
LaTeX first: Unicode signs (the minus everywhere, others in boxes), and 4.5e33 where the label is such a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from openrlhf_dbb.evaluation.verifiers.latex import MINUS, as_latex, latex_signs, normal
from openrlhf_dbb.evaluation.verifiers.statements import stated
from openrlhf_dbb.evaluation.verifiers.verdict import Verdict
from openrlhf_dbb.rewards.answers import (
    TAIL_CHARACTERS,
    answer_expression,
    compare_integers,
    label_expression,
    last_box,
)
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

_pool = VerifierPool.from_environment()

_POWER_OF_TEN = r"\times 10^{"
_FORMULA = re.compile(r"\$([^$\n]+)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?!\w)")

Given = TypeVar("Given")
Got = TypeVar("Got")


def verify_all(pairs: Sequence[tuple[str, str]], *, text: bool) -> list[Verdict]:
    """Verdicts on (response, label) pairs; ``text``: whether unreadable labels are compared as text.

    Raises:
        ValueError: Math-Verify cannot read a label, and ``text`` is false.
    """
    questions = [_question(response, label) for response, label in pairs]
    open_questions = list(dict.fromkeys(question for question in questions if not isinstance(question, bool)))
    verdicts = dict(zip(open_questions, _in_threads(_judge_or_text if text else _judge, open_questions), strict=True))
    return [
        Verdict(_score(question if isinstance(question, bool) else verdicts[question]), answer(response))
        for question, (response, _) in zip(questions, pairs, strict=True)
    ]


def unreadable(labels: Sequence[str]) -> list[str | None]:
    """Per label, why Math-Verify cannot read it, or None."""
    different = list(dict.fromkeys(labels))
    why = dict(zip(different, _in_threads(_why_unreadable, different), strict=True))
    return [why[label] for label in labels]


def answer(response: str) -> str | None:
    """The answer, normalized: the last box, else what a sentence states, else the last formula or number."""
    box = last_box(response)
    if box is not None:
        return normal(box) or None
    tail = response[-TAIL_CHARACTERS:].replace(MINUS, "-")
    for said in reversed(stated(tail)):
        found = _formula_or_number(said.text)
        if found:
            return found[0]
    found = _formula_or_number(tail)
    return found[-1] if found else None


def _formula_or_number(text: str) -> list[str]:
    formulas = [normal(next(filter(None, found.groups()))) for found in _FORMULA.finditer(text)]
    return list(filter(None, formulas)) or [normal(found[0]) for found in _NUMBER.finditer(text)]


def _question(response: str, label: str) -> bool | tuple[str, str]:
    """The verdict if Math-Verify is not needed, else its question: (expression, label)."""
    correct = compare_integers(response, label)
    if correct is not None:
        return correct
    box = last_box(response)
    if box is not None:
        box = latex_signs(box)
        # Only there: 2e-3 may also be 2e minus 3.
        box = as_latex(box) if _POWER_OF_TEN in label else box
        return answer_expression(rf"\boxed{{{box}}}"), label
    return answer_expression(response.replace(MINUS, "-")), label


def _judge(question: tuple[str, str]) -> bool | None:
    expression, label = question
    return _pool.verify(expression, label_expression(label))


def _judge_or_text(question: tuple[str, str]) -> bool | None:
    try:
        return _judge(question)
    except ValueError:  # it cannot read the label, which ``unreadable`` has reported
        expression, label = question
        box = last_box(expression)
        return box is not None and normal(box) == normal(label)


def _why_unreadable(label: str) -> str | None:
    if not label.strip():
        return "the label is empty"
    if compare_integers(label, label):
        return None
    try:
        _pool.verify("", label_expression(label))
    except ValueError as error:
        return str(error)
    return None


def _score(correct: bool | None) -> float | None:
    return None if correct is None else float(correct)


def _in_threads(function: Callable[[Given], Got], items: Iterable[Given]) -> list[Got]:
    with ThreadPoolExecutor(_pool.size) as threads:
        return list(threads.map(function, items))
