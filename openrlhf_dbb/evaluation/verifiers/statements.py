"""Where a response states its answer: boxes, and sentences such as "the answer is ..."."""

from __future__ import annotations

import re
from typing import NamedTuple

SAID_CHARACTERS = 400

_NOUN = r"\b(?:answers?|(?:correct|right|best|my)\s+(?:option|choice))"
_VERB = r"(?:\s+(?:is|are|was|would\s+be|should\s+be|must\s+be|will\s+be|has\s+to\s+be)\b\s*:?|\s*[:=])"
_STATEMENT = re.compile(_NOUN + _VERB, re.IGNORECASE)
_PRAISED = re.compile(
    r"(?:\b(?:option|choice|answer)\s+(?:\(?([A-Z])\)?)|\(([A-Z])\))\s+is\s+(?:the\s+)?(?:correct|right|best)\b",
    re.IGNORECASE,
)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FONT = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|math(?:rm|bf|it|tt)|boldsymbol|emph|mbox)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\*\*|__|\\[()\[\]]|[$`*]")


class Said(NamedTuple):
    """One place where an answer is stated.

    Attributes:
        text: a box's content, or what follows "the answer is" on its line.
        boxed: whether it is a box's content.
    """

    text: str
    boxed: bool


def plain(text: str) -> str:
    r"""Text without fonts, dollars and Markdown emphasis.

    Example:
        >>> plain(r"**Answer:** $\boxed{\textbf{\text{B}}}$")
        'Answer: \\boxed{B}'
    """
    fonts = 1
    while fonts:  # \textbf{\text{B}}
        text, fonts = _FONT.subn(r"\1", text)
    return _MARKUP.sub("", text)


def stated(text: str) -> list[Said]:
    """All places of plain ``text`` that state an answer, in order; unclosed boxes do not count."""
    found = [(start, Said(text[start:end], True)) for start, end in _boxes(text)]
    for statement in _STATEMENT.finditer(text):
        line = text[statement.end() : statement.end() + SAID_CHARACTERS].lstrip().split("\n", 1)[0].strip()
        if line and not line.startswith(("\\boxed", "\\fbox")):
            found.append((statement.end(), Said(line, False)))
    found += [(praised.end(), Said(praised[1] or praised[2], False)) for praised in _PRAISED.finditer(text)]
    return [said for _, said in sorted(found, key=lambda place: place[0])]


def last_line(text: str) -> str:
    """The last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _boxes(text: str) -> list[tuple[int, int]]:
    """Start and end of the contents of boxes."""
    found, open_braces = [], []  # of the latter: (whether it is a box, where its content starts)
    for brace in _BRACES.finditer(text):
        if brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append((brace[0] != "{", brace.end()))
        elif brace[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                found.append((start, brace.start()))
    return found
