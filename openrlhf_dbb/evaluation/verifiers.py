import re
from collections.abc import Callable
from typing import NamedTuple

from openrlhf_dbb.rewards import answers, reasoning_gym
from openrlhf_dbb.rewards.math_answer import judge
from openrlhf_dbb.rewards.values import Number, canonical, read, spelled

_PARENTHESES = re.compile(r"[\[\](){}<>\s]+")
# Up to the last brace of the line: the box may contain unbalanced braces, its answer.
_SAID_ON_A_LINE = re.compile(r".*\\boxed\{(.*)\}|\banswer(?:\s+is|\s*:)\s*:?(.*)", re.IGNORECASE)


class Verdict(NamedTuple):
    score: float | None  # 1.0 correct; 0.0 wrong, or no answer; None not verified (missing, not wrong)
    answer: str | None  # normalized, so that majority votes can compare texts; None if there is none


def _math(response: str, label: str) -> Verdict:
    # The question is not known here, so a formula that is copied from it counts.
    score, value, _ = judge(response, label)
    # A box that states no value still votes for its text.
    return Verdict(score, canonical(value) if value else spelled(answers.last_box(response) or "") or None)


def _math_or_text(response: str, label: str) -> Verdict:
    text = spelled(answers.last_box(response) or "")
    try:
        verdict = _math(response, label)
    except ValueError:  # the label cannot be read
        verdict = Verdict(None, text or None)
    return verdict._replace(score=float(text == spelled(label))) if verdict.score is None else verdict


def _choice(response: str, label: str, letters: str = answers.LETTERS) -> Verdict:
    answer = answers.letter(response, letters)
    return Verdict(float(answer == label), answer)


def _exact(response: str, label: str) -> Verdict:
    """Compare by Big-Bench Hard's rule for the form of the label; case, punctuation and LaTeX around do not matter."""
    if isinstance(read(label), Number):
        return _math(response, label)
    if re.fullmatch(r"\([A-R]\)", label):  # reasoning_about_colored_objects has 18 options
        return _choice(response, label[1], answers.ALPHABET[:18])
    if _PARENTHESES.fullmatch(label):
        said = [found[found.lastindex or 0] for found in map(_SAID_ON_A_LINE.search, response.splitlines()) if found]
        answer, right = _bare(said[-1] if said else answers.last_line(response)), _bare(label)
    else:
        answer, right = answers.words(response, label), answers.words(label, label)
    return Verdict(float(answer is not None and answer == right), answer)


def _bare(text: str) -> str | None:
    """Return the parentheses in ``text`` if it contains nothing else."""
    text = re.sub(r"\A\s*\\(?:text|texttt|mathtt|mathrm)\s*\{(.*)\}\s*\Z", r"\1", text)
    text = re.sub(r"\\(?:langle|lt)(?![a-z])", "<", text)
    text = re.sub(r"\\(?:rangle|gt)(?![a-z])", ">", text)
    text = re.sub(r"\\(?:left|right)(?![a-z])|[\s$`*\"'\\~.,]", "", text)
    return text if _PARENTHESES.fullmatch(text) else None


VERIFIERS: dict[str, Callable[[str, str], Verdict]] = {
    "math": _math,
    "math_or_text": _math_or_text,
    "choice": _choice,
    "exact": _exact,
    "reasoning_gym": lambda response, label: Verdict(reasoning_gym.score(response, label), None),
}
"""Thread-safe functions of a response without special tokens and a label. "math" raises ValueError for a label that
cannot be read."""
