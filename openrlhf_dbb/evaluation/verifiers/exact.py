"""Big-Bench Hard's answers, compared exactly by the rule for the form of the label.

The answer is the content of the last box or statement, or else the last line. Suzgun et al. 2023 compare the text after
"the answer is" verbatim. Here case, punctuation and surrounding LaTeX do not matter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from openrlhf_dbb.evaluation.verifiers import choices
from openrlhf_dbb.evaluation.verifiers.statements import Said, Verdict, last_line, plain, stated
from openrlhf_dbb.rewards.answers import MINUS, number

LETTERS = "ABCDEFGHIJKLMNOPQR"  # reasoning_about_colored_objects has 18 options
PAIRS = (("yes", "no"), ("true", "false"), ("valid", "invalid"))

_OPTION = re.compile(rf"\(([{LETTERS}])\)")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_LATEX_SPACE = re.compile(r"\\(?:q?quad|space)(?![a-z])|\\[ ,;:!\\]|~")
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")

_PARENTHESES = re.compile(r"[\[\](){}<>\s]+")
_TEXT = re.compile(r"\s*\\(?:text|texttt|mathtt|mathrm)\s*\{(.*)\}\s*")
_ANSWER_ON_A_LINE = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?\s*(.*)", re.IGNORECASE)
_ESCAPED = {r"\langle": "<", r"\rangle": ">", r"\lt": "<", r"\gt": ">", r"\left": "", r"\right": ""}


def verify(response: str, label: str) -> Verdict:
    """Return whether the response's answer is the label; the label is not empty."""
    option = _OPTION.fullmatch(label)
    if option:
        return choices.verify(response, option[1], LETTERS)
    answer = _read(response, label)
    return Verdict(float(answer is not None and answer == _read(label, label)), answer)


def _read(text: str, label: str) -> str | None:
    """Return the last answer of the label's form in a text, which may be the label itself."""
    if _PARENTHESES.fullmatch(label):
        return _parentheses(text)
    read: Callable[[Said], str | None] = _words if number(label) is None else _number
    for pair in PAIRS:
        if label.lower() in pair:
            read = functools.partial(_word, pair=pair)
    text = plain(text.replace(MINUS, "-"))
    places = list(reversed(stated(text))) or [Said(last_line(text), boxed=True)]
    return next((answer for said in places if (answer := read(said)) is not None), None)


def _word(said: Said, pair: tuple[str, str]) -> str | None:
    words = re.findall(r"[a-z]+", said.text.lower())
    found = [word for word in (words[:1] + words[-1:]) if word in pair]
    return found[0] if found and "not" not in words else None


def _number(said: Said) -> str | None:
    """Return the last number of a box, as in 3 + 5 = 8; of a sentence the first, or the last after an equals sign."""
    text = said.text if said.boxed else _SENTENCE_END.split(said.text, maxsplit=1)[0]
    numbers = [found[0] for found in _NUMBER.finditer(text.replace("{,}", ","))]
    if not numbers:
        return None
    return number(numbers[-1] if said.boxed or "=" in text else numbers[0])


def _words(said: Said) -> str | None:
    return " ".join(_WORD.findall(_LATEX_SPACE.sub(" ", said.text.lower()))) or None


def _parentheses(text: str) -> str | None:
    for line in reversed(text.splitlines()):
        said = _ANSWER_ON_A_LINE.search(line)
        # Up to the last brace of the line: the box may contain unbalanced braces, its answer.
        start, end = line.rfind("\\boxed{"), line.rfind("}")
        if 0 <= start < end:
            return _bare(line[start + len("\\boxed{") : end])
        if said:
            return _bare(said[1])
    return _bare(last_line(text))


def _bare(text: str) -> str | None:
    """Return the parentheses in ``text`` if it contains nothing else."""
    wrapped = _TEXT.fullmatch(text)
    if wrapped:
        text = wrapped[1]
    for written, meant in _ESCAPED.items():
        text = text.replace(written, meant)
    text = re.sub(r"[\s$`*\"'\\~.,]", "", text)
    return text if text and _PARENTHESES.fullmatch(text) else None
