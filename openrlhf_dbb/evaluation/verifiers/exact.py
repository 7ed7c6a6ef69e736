"""Big-Bench Hard's answers, compared exactly by the rule for the form of the label.

Letters, numbers and words are read as in training. Suzgun et al. 2023 compare the text after "the answer is" verbatim.
Here case, punctuation and surrounding LaTeX do not matter.
"""

import re

from openrlhf_dbb.rewards import choices, math_answer
from openrlhf_dbb.rewards.values import Number, canonical, read

LETTERS = "ABCDEFGHIJKLMNOPQR"  # reasoning_about_colored_objects has 18 options

_OPTION = re.compile(rf"\(([{LETTERS}])\)")
_PARENTHESES = re.compile(r"[\[\](){}<>\s]+")
_TEXT = re.compile(r"\s*\\(?:text|texttt|mathtt|mathrm)\s*\{(.*)\}\s*")
_ANSWER_ON_A_LINE = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?\s*(.*)", re.IGNORECASE)
_ESCAPED = {r"\langle": "<", r"\rangle": ">", r"\lt": "<", r"\gt": ">", r"\left": "", r"\right": ""}


def verify(response: str, label: str) -> tuple[float | None, str | None]:
    """Return whether the response's answer is the label, which is not empty, and the answer."""
    option, right = _OPTION.fullmatch(label), read(label)
    if isinstance(right, Number):
        score, value = math_answer.judge(response, label)
        return score, canonical(value) if value else None
    if option:
        answer, label = choices.letter(response, LETTERS), option[1]
    elif _PARENTHESES.fullmatch(label):
        answer, label = _parentheses(response), _bare(label) or ""
    else:
        answer, label = choices.words(response, label), choices.words(label, label) or ""
    return float(answer == label), answer


def _parentheses(text: str) -> str | None:
    for line in reversed(text.splitlines()):
        said = _ANSWER_ON_A_LINE.search(line)
        # Up to the last brace of the line: the box may contain unbalanced braces, its answer.
        start, end = line.rfind("\\boxed{"), line.rfind("}")
        if 0 <= start < end:
            return _bare(line[start + len("\\boxed{") : end])
        if said:
            return _bare(said[1])
    return _bare(choices.last_line(text))


def _bare(text: str) -> str | None:
    """Return the parentheses in ``text`` if it contains nothing else."""
    wrapped = _TEXT.fullmatch(text)
    if wrapped:
        text = wrapped[1]
    for written, meant in _ESCAPED.items():
        text = text.replace(written, meant)
    text = re.sub(r"[\s$`*\"'\\~.,]", "", text)
    return text if text and _PARENTHESES.fullmatch(text) else None
