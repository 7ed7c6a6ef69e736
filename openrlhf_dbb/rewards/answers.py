r"""Reads responses, boxes, labels and final answers as texts, in one LaTeX notation. Does no mathematics.

A response that repeats the question must get no reward, because a policy learns this within a run. So for a label that
is a value (a number, a fraction, a percentage) only a value counts: ``7 + 4 - 6`` is a calculation and no answer. For
any other label a formula counts, unless the response has copied the formula from the question.
"""

from __future__ import annotations

import re

SPECIAL_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>", "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>", "<pad>",
)  # fmt: skip
# Only the end of a response without a box is read, and no box that is longer: on "$ $ $ ..." and on nested commands the
# patterns take quadratic time, and Python reads no number of more than 4,300 digits.
TAIL_CHARACTERS = 4000
MINUS = "\u2212"
_LATEX_SIGNS = str.maketrans(
    {MINUS: "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00b0": r"^\circ", "\u03c0": r"\pi "}
)

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_INLINE_MATH = re.compile(r"\$([^$]+)\$")
_DOLLAR = re.compile(r"(?<!\\)\$")  # \$5 is money
_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]*")

# LaTeX notation
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([+-]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([+-]?\d{1,4})(?![\w.])")
_NUMPY = re.compile(r"(?<![\w\\])(?:np|math)\.(sin|cos|tan|arcsin|arccos|arctan|exp|log|pi)\b")
_NUMPY_ROOT = re.compile(r"(?<![\w\\])(?:np|math)\.sqrt\(([^()]*)\)")
_SIZES = r"\\(?:left|right|[bB]igg?|displaystyle|q?quad)(?![A-Za-z])"
_DROPPED = re.compile(_SIZES + r"|\\[,;:!> ]|[\s$~]")
_WITH_UNIT = re.compile(
    r"((?:[^A-Za-z\\]|\\[,;:! ]|\\(?:[dt]?frac|sqrt|times|cdot|pi)(?![A-Za-z]))*[\d}])"  # a value without variables
    r"(?:\\[,;: ]|[\s~])*\\(?:text|textrm|mathrm|operatorname)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?"
)
FONT = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|math(?:rm|bf|it|tt)|boldsymbol|operatorname|emph|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,!])\s*(?=\d{3}(?!\d))")
_PLAIN_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = re.compile(r"([+-]?)0*(\d+?)(?:\.(\d*?)0*)?")
_NAME_AND_EQUALS = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?=(?!=)")
_OPERATOR = re.compile(r"[-+*/^\\]")

# values
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"\\times10\^\{?-?\d+\}?"
_VALUE = re.compile(rf"[-+]?(?:{_DIGITS})(?:\\overline\{{\d+\}}|/\d+|{_POWER})?(?:%|\^\{{?\\circ\}}?)?")
_MIXED = re.compile(r"([-+]?)(\d+)\s*\\[dt]?frac\s*\{?(\d+?)\}?\s*\{?(\d+)\}|([-+]?)(\d+) (\d+)/(\d+)")
_INTEGER = re.compile(r"[-+]?\d+")

# A number in running text, also in "it is - 5". A bullet "- 5" is not negative. "1.2.3", "5:30", "x_5" are no numbers.
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
_LINE_START, _AFTER_MARKER = re.compile(r"(?:\A|\n)[ \t]*\Z"), re.compile(r"[.)][ \t]+\S")
_GOES_ON = re.compile(
    rf"\(|[ \t]*(?:=|\?|!=|[)\]]*[ \t]*{_SIGN}[ \t]*(?:[\d({{\\.$-]|{_VARIABLE}\b|\Z)|"
    rf"\\[a-zA-Z]|{_JOINED}[ \t]*[-+(]?\d)"
)
_DENIED = re.compile(
    r"(?:\bnot|n['\u2019]t|\bnever|\bneither|\bnor|\bthan|\binstead of|!=|\u2260|\\neq?)[ \t:]+"
    r"(?:(?!but\b|rather\b|yet\b|so\b)[a-z']+[ \t]+){0,3}\Z",
    re.IGNORECASE,
)
_NEARBY = 60  # characters around a number that can make the number part of something else

# running text
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}")  # "$5 and $7" encloses words, not a formula
_MARKDOWN = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`")  # 2**3 is no emphasis
_INTEGER_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(-?\d+)\}\s*\{(\d+)\}|(\d)(\d))")
_ANY_FONT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|boxed)\s*\{([^{}]*)\}")
_MARKS = re.compile(_SIZES + r"|\\[()\[\],;:! ]|(?<!\\)\$|\\(?=[$%])")
_PRODUCT = re.compile(r"\\(?:times|cdot|div)(?![A-Za-z])|[\u00d7\u00f7]")


def response_text(query: str, prompt: str) -> str:
    """Return the response of a query, without the prompt before it and the special tokens after it.

    Raises:
        ValueError: the query does not start with the prompt, so the start of the response is unknown.
    """
    if not query.startswith(prompt):
        raise ValueError(
            f"the decoded query {query[:80]!r}... does not start with its prompt {prompt[:80]!r}...: either "
            "the prompt was truncated (raise --data.max_len or lower --rollout.max_new_tokens) or the "
            "tokenizer does not round-trip, decode(encode(text)) != text (use another tokenizer)"
        )
    response = query[len(prompt) :].rstrip()
    while response.endswith(SPECIAL_TOKENS):
        token = next(token for token in SPECIAL_TOKENS if response.endswith(token))
        response = response[: -len(token)].rstrip()
    return response.lstrip()


def label_text(label: str | int, prompt: str) -> str:
    """Return a label as text without spaces around it. Raise ValueError if it is empty."""
    text = str(label).strip()
    if not text:
        raise ValueError(f"the label of {prompt[:80]!r} is empty; name the column of answers with --data.label_key")
    return text


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Return start and end of the content of each ``\boxed{...}`` whose braces close, in the order of their ends."""
    places = []
    open_braces: list[tuple[bool, int]] = []  # (is a box, where its content starts)
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            open_braces.append((token[0] != "{", token.end()))
        elif token[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                places.append((start, token.start()))
    return places


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces close, or None; of nested boxes, the outermost."""
    places = boxes(text)
    return text[slice(*places[-1])] if places else None


def boxed(text: str) -> str:
    """Put a text into a box, without the LaTeX spaces between thousands: Math-Verify reads 1\\,234 as 1 + 234."""
    return f"\\boxed{{{_THOUSANDS.sub('', text)}}}"


def label_expression(label: str) -> str:
    r"""Put a label into a box: of bare LaTeX such as ``2\sqrt{3}``, Math-Verify would read only the number 2."""
    text = label.strip()
    content, inline = last_box(text), _INLINE_MATH.fullmatch(text)
    if content is None and inline:
        content = inline[1]
    value = _value(text if content is None else content)  # Math-Verify cannot read "5." or "50\u00b0"
    if value is None and content is None and _DOLLAR.search(text):
        return text
    return boxed(value or content or text)


def same_integer(answer: str, label: str) -> bool | None:
    """Return whether two plainly written integers are equal; None if one of them is written in another way.

    Integers without leading zeros are equal if and only if their digits are. This takes 1 us, Math-Verify 0.3 ms.
    """
    if _PLAIN_INTEGER.fullmatch(answer.strip()) and _PLAIN_INTEGER.fullmatch(label.strip()):
        return answer.strip() == label.strip()
    return None


def final_answer(response: str, label: str, question: str = "") -> str | None:
    r"""Return the answer that a response states, in LaTeX without a box, or None if it states none.

    The content of the last complete box is the answer. Without a box the last answer wins: the last number that is not
    part of a calculation, a list, a question or a denial ("not 5"), or, if the label is no value, the last formula.
    If the label is a value, only a value is an answer. A formula that is copied from the question is no answer.
    """
    box = last_box(response)
    if len(box or "") > TAIL_CHARACTERS:
        return None
    text = latex_signs(response[-TAIL_CHARACTERS:] if box is None else box)
    if is_value(label):
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
    """Return whether a label is a number, a fraction or a percentage, with or without a unit."""
    return _value(text) is not None


def last_value(text: str) -> str | None:
    """Return the last number of a text that stands for itself, in LaTeX; None if there is none."""
    plain = _plain(text)
    for match in reversed(list(_NUMBER.finditer(plain))):
        before = plain[max(0, match.start() - _NEARBY) : match.start()]
        after = plain[match.end() : match.end() + _NEARBY]
        if _stands_for_itself(match[0], before, after):
            return _value(match[0].replace("*", r"\times").replace("- ", "-"))
    return None


def _value(text: str) -> str | None:
    """Return a text that is one value and nothing else, in LaTeX; None for any other text."""
    if len(text) > TAIL_CHARACTERS:
        return None
    mixed = _MIXED.fullmatch(text.strip().strip("$"))
    if mixed:
        sign, whole, above, below = (part for part in mixed.groups() if part is not None)
        return f"{sign}{int(whole) * int(below) + int(above)}/{below}"
    value = normal(text)
    return value.replace("%", r"\%") if _VALUE.fullmatch(value) else None


def _divides(value: str) -> bool:
    """Return whether a value is a fraction that equals an integer: its division has not been carried out."""
    above, _, below = value.partition("/")
    return below.isdigit() and int(below) > 0 and above.lstrip("+-").isdigit() and int(above) % int(below) == 0


def _stands_for_itself(number: str, before: str, after: str) -> bool:
    """Return whether a number is no operand, no item or marker of a list, no argument, no question, and not denied."""
    return not (
        _CONTINUES.search(before)
        or (number[0] in "+-" and _SUBTRACTED.search(before))
        or _ARGUMENT.search(before)
        or _DENIED.search(before)
        or _GOES_ON.match(after)
        or (_LINE_START.search(before) and _AFTER_MARKER.match(after))
    )


def _plain(text: str) -> str:
    """Return a text in plain signs: LaTeX fractions, products and thousands are replaced; emphasis is dropped."""
    text = _MARKDOWN.sub("", _THOUSANDS.sub("", text))
    text = _INTEGER_FRACTION.sub(lambda part: f" {part[1] or part[3]}/{part[2] or part[4]}", text)
    text = _PRODUCT.sub("*", as_latex(text))
    fonts = 1
    while fonts:  # fonts may be nested, as in \textbf{\text{5}}
        text, fonts = _ANY_FONT.subn(r" \1 ", text)
    return _MARKS.sub(" ", text)


def _last_formula(text: str) -> str | None:
    """Return the last formula in dollars or brackets, or a later number that stands for itself."""
    for formula in reversed(list(_FORMULA.finditer(text))):
        content = next(filter(None, formula.groups())).strip()
        if content and not _PROSE.search(content) and not _DENIED.search(text[: formula.start()][-_NEARBY:]):
            return last_value(text[formula.end() :]) or content
    return last_value(text)


def _is_copied(answer: str, label: str, question: str) -> bool:
    """Return whether the question contains the answer, a formula, and the formula is not the label itself."""
    formula = squeezed(answer)
    has_operator = _OPERATOR.search(formula.lstrip("+-")) is not None
    return bool(question) and has_operator and formula != squeezed(label) and formula in squeezed(question)


def latex_signs(text: str) -> str:
    """Replace the Unicode signs of minus (also the en dash), times, dot, degree and pi by LaTeX."""
    return text.translate(_LATEX_SIGNS)


def as_latex(text: str) -> str:
    r"""Return a formula in LaTeX; its numbers and functions may be in Python's notation."""
    text = _NUMPY_ROOT.sub(r"\\sqrt{\1}", _NUMPY.sub(r"\\\1", text))
    # Math-Verify reads 4.5e33 as 4.5 times e times 33.
    return _SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text)


def number(text: str) -> str | None:
    """Return a decimal number without redundant signs and zeros; None if ``text`` is not a number."""
    text = latex_signs(text).strip()
    if _PLAIN_THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    decimal = _DECIMAL.fullmatch("0" + text if text.startswith(".") else text)
    if decimal is None:
        return None
    digits = decimal[2] + (f".{decimal[3]}" if decimal[3] else "")
    return "-" + digits if decimal[1] == "-" and digits != "0" else digits


def normal(text: str) -> str:
    r"""Return LaTeX without spaces, sizes, fonts, units after a value, and a name before ``=``."""
    text = as_latex(latex_signs(text).strip().rstrip("."))
    text = _THOUSANDS.sub("", text.replace(r"\$", "").replace("$", "")).replace(r"\%", "%")
    if _NAME_AND_EQUALS.match(text.replace(" ", "")):
        text = text.split("=", 1)[1]
    value = _WITH_UNIT.fullmatch(text.strip())
    text = squeezed(value[1] if value else text)
    return number(text) or text


def squeezed(text: str) -> str:
    r"""Return LaTeX without spaces, sizes and fonts, with short fractions as ``1/2``; units and names stay."""
    return _DROPPED.sub("", _FRACTION.sub(_short_fraction, FONT.sub(r"\1", latex_signs(text))))


def _short_fraction(match: re.Match[str]) -> str:
    above, below = (match[1] or match[2] or "").strip(), (match[3] or match[4] or "").strip()
    return f"{above}/{below}" if re.fullmatch(r"-?\w+ \w+", f"{above} {below}") else rf"\frac{{{above}}}{{{below}}}"
