"""How responses are scored, by the name that a benchmark gives its verifier."""

import re
from collections.abc import Callable
from typing import NamedTuple

from openrlhf_dbb.rewards import answers, reasoning_gym
from openrlhf_dbb.rewards.math_answer import judge
from openrlhf_dbb.rewards.values import Number, canonical, read, spelled

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_PARENTHESES = re.compile(r"[\[\](){}<>\s]+")
# Up to the last brace of the line: the box may contain unbalanced braces, its answer.
_SAID_ON_A_LINE = re.compile(r".*\\boxed\{(.*)\}|\banswer(?:\s+is|\s*:)\s*:?(.*)", re.IGNORECASE)


class Verdict(NamedTuple):
    """What a verifier says of a response."""

    score: float | None  # 1.0 right; 0.0 wrong, or no answer; None not verified: missing, not wrong
    answer: str | None  # normalized, so that majority votes can compare texts; None without one


def _math(response: str, label: str) -> Verdict:
    # The question is not known here, so a formula that is copied from it counts.
    score, value, _ = judge(response, label)
    if value:
        return Verdict(score, canonical(value))
    # A box that states no value still votes for its text.
    return Verdict(score, _boxed(response) or None)


def _boxed(response: str) -> str:
    return spelled(answers.last_box(response) or "")


def _math_or_text(response: str, label: str) -> Verdict:
    text = _boxed(response)
    try:
        verdict = _math(response, label)
    except ValueError:  # the label cannot be read
        verdict = Verdict(None, text or None)
    if verdict.score is not None:
        return verdict
    return Verdict(float(text == spelled(label)), verdict.answer)


def _choice(response: str, label: str, letters: str = answers.LETTERS) -> Verdict:
    answer = answers.letter(response, letters)
    return Verdict(float(answer == label), answer)


def _exact(response: str, label: str) -> Verdict:
    """Compare by Big-Bench Hard's rule for the form of the label.

    Case, punctuation and LaTeX around the answer do not matter.
    """
    if isinstance(read(label), Number):
        return _math(response, label)
    if re.fullmatch(r"\([A-R]\)", label):  # reasoning_about_colored_objects has 18 options
        return _choice(response, label[1], answers.ALPHABET[:18])
    if label.lower() in answers.TRUTHS:
        return _math(response, label)
    bare = _bare if _PARENTHESES.fullmatch(label) else _words
    answer = bare(_last_said(response))
    return Verdict(float(answer is not None and answer == bare(label)), answer)


def _last_said(response: str) -> str:
    """Return what the last line with a box or the words "answer is" says, else the last line."""
    for line in reversed(response.splitlines()):
        said = _SAID_ON_A_LINE.search(line)
        if said:
            return said[said.lastindex or 0]
    return answers.last_line(response)


def _words(text: str) -> str | None:
    """Return the words of a text in lower case; None if it has none."""
    return " ".join(_WORD.findall(answers.without_markup(text).lower())) or None


def _bare(text: str) -> str | None:
    """Return the parentheses in ``text`` if it contains nothing else."""
    text = re.sub(r"\A\s*\\(?:text|texttt|mathtt|mathrm)\s*\{(.*)\}\s*\Z", r"\1", text)
    text = re.sub(r"\\(?:langle|lt)(?![a-z])", "<", text)
    text = re.sub(r"\\(?:rangle|gt)(?![a-z])", ">", text)
    text = re.sub(r"\\(?:left|right)(?![a-z])|[\s$`*\"'\\~.,]", "", text)
    return text if _PARENTHESES.fullmatch(text) else None


def _reasoning_gym(response: str, label: str) -> Verdict:
    return Verdict(reasoning_gym.score(response, label), None)


VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "math": _math,
    "math_or_text": _math_or_text,
    "choice": _choice,
    "exact": _exact,
    "reasoning_gym": _reasoning_gym,
}
"""Thread-safe functions of a response without special tokens and a label.

"math" raises ValueError for a label that cannot be read.
"""
