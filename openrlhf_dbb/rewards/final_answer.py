r"""Find the final answer that a response states; no mathematics is done here.

A response that repeats the question must not be paid, because a policy finds that within a run. So for a label that is
a value (a number, a fraction, a percentage) only a value counts: ``7 + 4 - 6`` still has to be computed and is no
answer. For any other label a formula counts, unless the response has copied it from the question.
"""

from __future__ import annotations

import re

from openrlhf_dbb.rewards.answers import TAIL_CHARACTERS, last_box
from openrlhf_dbb.rewards.latex import as_latex, latex_signs, normal, squeezed

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"\\times10\^\{?-?\d+\}?"
_VALUE = re.compile(rf"[-+]?(?:{_DIGITS})(?:\\overline\{{\d+\}}|/\d+|{_POWER})?(?:%|\^\{{?\\circ\}}?)?")
_MIXED = re.compile(r"([-+]?)(\d+)\s*\\[dt]?frac\s*\{?(\d+?)\}?\s*\{?(\d+)\}?")
_INTEGER = re.compile(r"[-+]?\d+")

# A number in running text, also in "it is - 5", where a bullet "- 5" is not negative. "1.2.3", "5:30", "x_5" are none.
_NUMBER = re.compile(
    rf"(?<![\w.,:{{_^\\])(?:[-+]|(?<=[^\n] )- )?(?:\d+ (?=\d+/\d))?(?:{_DIGITS})(?:/\d+)?"
    r"(?:\s*\*\s*10\s*\^\s*\{?-?\d+\}?)?(?:\s?%|\s?\^\{?\\circ\}?)?(?!\w|[.,:/]\d)"
)
_VARIABLE = r"(?<![\w\\'\u2019])(?![aAI]\b)[a-zA-Z]"  # "a" and "I" are words
_SIGN = r"(?:[-+*/^]+|\bx\b)"
_OPERAND = rf"(?:[\d)\]}}%]|{_VARIABLE})"
_JOINED = r"(?:,?[ \t]*\b(?:or|and|plus|minus|times|by|from|to|over|(?:divided|multiplied) by)\b|,)"
_CONTINUES = re.compile(rf"{_OPERAND}[ \t]*{_SIGN}[ \t]*\Z|[\d)%][ \t]*{_JOINED}[ \t]*\Z")
_SUBTRACTED = re.compile(rf"{_OPERAND}[ \t]*\Z")
_ARGUMENT = re.compile(r"\w\([ \t]*\Z")
_LIST_MARKER = (re.compile(r"(?:\A|\n)[ \t]*\Z"), re.compile(r"[.)][ \t]+\S"))
_GOES_ON = re.compile(
    rf"\(|[ \t]*(?:=|\?|!=|{_SIGN}[ \t]*(?:[\d({{\\.$-]|{_VARIABLE}\b|\Z)|\\[a-zA-Z]|{_JOINED}[ \t]*[-+(]?\d)"
)
_DENIED = re.compile(
    r"(?:\bnot|n['\u2019]t|\bnever|\bneither|\bnor|\bthan|\binstead of|!=|\u2260|\\neq?)[ \t:]+"
    r"(?:(?!but\b|rather\b|yet\b|so\b)[a-z']+[ \t]+){0,3}\Z",
    re.IGNORECASE,
)
_NEARBY = 60  # characters around a number that can make it part of something else

_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}")  # "$5 and $7" encloses words, not a formula
_MARKDOWN = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`")  # 2**3 is no emphasis
_TEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(-?\d+)\}\s*\{(\d+)\}|(\d)(\d))")
_TEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|boxed)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,!])\s*(?=\d{3}(?!\d))")
_TEX_MARKS = re.compile(
    r"\\(?:left|right|[bB]igg?|displaystyle|q?quad)(?![A-Za-z])|\\[()\[\],;:! ]|(?<!\\)\$|\\(?=[$%])"
)
_PRODUCT = re.compile(r"\\(?:times|cdot|div)(?![A-Za-z])|[\u00d7\u00f7]")
_OPERATOR = re.compile(r"[-+*/^\\]")


def final_answer(response: str, label: str, question: str = "") -> str | None:
    r"""Return the answer that a response states, in LaTeX without a box, or None if it states none.

    The content of the last complete box is the answer. Without a box the last answer wins: the last number that is not
    part of a calculation, a list, a question or a denial ("not 5"), or, if the label is no value, the last formula.

    Args:
        response: the model's text, without the prompt.
        label: the right answer. If it is a value, only a value is an answer.
        question: the text the response replies to; a formula copied from it is no answer.

    Example:
        >>> final_answer("The answer is 3. No wait, 5.", "5"), final_answer(r"\boxed{7 + 4 - 6}", "5")
        ('5', None)
        >>> final_answer(r"\boxed{\sqrt{12}}", r"2\sqrt{3}", "Simplify $\\sqrt{12}$."), final_answer("5 or 6", "6")
        (None, None)
    """
    box = last_box(response)
    text = latex_signs(response[-TAIL_CHARACTERS:] if box is None else box)
    if _value(label) is not None:
        answer = _value(text) or last_value(text)
        if answer is not None and _INTEGER.fullmatch(normal(label)) and _divides(answer):
            return None
    else:
        answer = _last_formula(text) if box is None else text
        answer = answer and as_latex(answer) if "10^" in label else answer
    if not answer or not answer.strip() or _is_copied(answer, label, question):
        return None
    return answer


def is_value(text: str) -> bool:
    """Whether a label is a number, a fraction or a percentage, with or without a unit."""
    return _value(text) is not None


def last_value(text: str) -> str | None:
    """Return the last number of a text that stands for itself, in LaTeX; None if there is none.

    Example:
        >>> last_value("7 + 4 = 11, minus 6 gives 5."), last_value("To find 7 + 4 - 6, we"), last_value("not 5 but 12")
        ('5', None, '12')
    """
    plain = _plain(text)
    for number in reversed(list(_NUMBER.finditer(plain))):
        before = plain[max(0, number.start() - _NEARBY) : number.start()]
        after = plain[number.end() : number.end() + _NEARBY]
        if _stands_for_itself(number[0], before, after):
            return _value(number[0].replace("*", r"\times").replace("- ", "-"))
    return None


def _value(text: str) -> str | None:
    """A text that is one value and nothing else, in LaTeX; None for any other text."""
    mixed = _MIXED.fullmatch(text.strip().strip("$")) or re.fullmatch(r"([-+]?)(\d+) (\d+)/(\d+)", text.strip())
    if mixed:
        sign, whole, above, below = mixed.groups()
        return f"{sign}{int(whole) * int(below) + int(above)}/{below}"
    value = normal(text)
    return value.replace("%", r"\%") if _VALUE.fullmatch(value) else None


def _divides(value: str) -> bool:
    """Whether a value is a fraction that equals an integer, so that it still has to be divided."""
    above, _, below = value.partition("/")
    return below.isdigit() and int(below) > 0 and above.lstrip("+-").isdigit() and int(above) % int(below) == 0


def _stands_for_itself(number: str, before: str, after: str) -> bool:
    """Whether a number is an answer, and not an operand, a list's item or marker, an argument, a question or denied."""
    starts_line, goes_on = _LIST_MARKER
    return not (
        _CONTINUES.search(before)
        or (number[0] in "+-" and _SUBTRACTED.search(before))
        or _ARGUMENT.search(before)
        or _DENIED.search(before)
        or _GOES_ON.match(after)
        or (starts_line.search(before) and goes_on.match(after))
    )


def _plain(text: str) -> str:
    """A text as one reads it aloud: LaTeX fractions, products and thousands in plain signs, no emphasis, no dollars."""
    text = _MARKDOWN.sub("", _THOUSANDS.sub("", text))
    text = _TEX_FRACTION.sub(lambda part: f" {part[1] or part[3]}/{part[2] or part[4]}", text)
    text = _PRODUCT.sub("*", as_latex(text))
    fonts = 1
    while fonts:  # \textbf{\text{5}}
        text, fonts = _TEX_TEXT.subn(r" \1 ", text)
    return _TEX_MARKS.sub(" ", text)


def _last_formula(text: str) -> str | None:
    """The last formula in dollars or brackets, or a later number that stands for itself."""
    for formula in reversed(list(_FORMULA.finditer(text))):
        content = next(filter(None, formula.groups())).strip()
        if _PROSE.search(content) or not content or _DENIED.search(text[: formula.start()][-_NEARBY:]):
            continue
        return last_value(text[formula.end() :]) or content
    return last_value(text)


def _is_copied(answer: str, label: str, question: str) -> bool:
    """Whether a formula stands in the question as it stands in the answer, and is not the label as written."""
    formula = squeezed(answer)
    return (
        bool(question)
        and _OPERATOR.search(formula.lstrip("+-")) is not None
        and formula != squeezed(label)
        and formula in squeezed(question)
    )
