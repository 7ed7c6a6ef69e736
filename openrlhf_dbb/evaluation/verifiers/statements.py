"""Places where a response states its answer: boxes, and sentences such as "the answer is ..."."""

from __future__ import annotations

import re
from typing import NamedTuple

from openrlhf_dbb.rewards.answers import FONT, TAIL_CHARACTERS, boxes

SAID_CHARACTERS = 400
_NESTED = 8  # fonts inside of each other; a pass takes time in proportion to the text

_NOUN = r"\b(?:answers?|(?:correct|right|best|my)\s+(?:option|choice))"
_VERB = r"(?:\s+(?:is|are|was|would\s+be|should\s+be|must\s+be|will\s+be|has\s+to\s+be)\b\s*:?|\s*[:=])"
_STATEMENT = re.compile(_NOUN + _VERB, re.IGNORECASE)
_PRAISED = re.compile(
    r"(?:\b(?:option|choice|answer)\s+(?:\(?([A-Z])\)?)|\(([A-Z])\))\s+is\s+(?:the\s+)?(?:correct|right|best)\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\*\*|__|\\[()\[\]]|[$`*]")


class Verdict(NamedTuple):
    """A verifier's verdict on a response."""

    score: float | None  # 1.0 correct; 0.0 wrong, or no answer; None not verified (missing, not wrong)
    answer: str | None  # normalized, so that majority votes can compare texts; None if there is none


class Said(NamedTuple):
    """A statement of an answer: the content of a box, or the text after "the answer is" on its line."""

    text: str
    boxed: bool


def plain(text: str) -> str:
    r"""Return the text without fonts, dollars and Markdown emphasis.

    Example:
        >>> plain(r"**Answer:** $\boxed{\textbf{\text{B}}}$")
        'Answer: \\boxed{B}'
    """
    for _ in range(_NESTED):  # \textbf{\text{B}}
        text = FONT.sub(r"\1", text)
    return _MARKUP.sub("", text)


def stated(text: str) -> list[Said]:
    """Return the statements of an answer in plain ``text``, in order, without boxes that are unclosed or very long."""
    short = ((start, end) for start, end in boxes(text) if end - start <= TAIL_CHARACTERS)
    found = [(start, Said(text[start:end], True)) for start, end in short]
    for statement in _STATEMENT.finditer(text):
        line = text[statement.end() : statement.end() + SAID_CHARACTERS].lstrip().split("\n", 1)[0].strip()
        if line and not line.startswith("\\boxed"):
            found.append((statement.end(), Said(line, False)))
    found += [(praised.end(), Said(praised[1] or praised[2], False)) for praised in _PRAISED.finditer(text)]
    return [said for _, said in sorted(found, key=lambda place: place[0])]


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
