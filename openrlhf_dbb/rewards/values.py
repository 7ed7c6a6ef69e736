r"""Reads an answer or a label by one grammar, and compares values. Does no algebra.

:func:`read` takes a text whole or not at all: ``10^{-7}`` is never 7. What is no number, list, interval,
letter or word is a ``Formula``, which Math-Verify compares.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from openrlhf_dbb.rewards.notation import (
    FUNCTIONS,
    TABLES,
    UPRIGHT,
    latex,
    normal,
    split,
    squeezed,
    stripped,
)

LONGEST = 4000  # characters; Python reads no number of more than 4,300 digits
TOLERANCE = Fraction(1, 10**6)  # relative; of decimals alone
MOST_ITEMS = 50
LARGEST_EXPONENT = 1000
# Says of two formulas whether they are equal; None if it cannot tell
Ask = Callable[[str, str], bool | None]

_COMMA = rf"[,;]|{UPRIGHT}?\b(?:and|or)\b"
_JOINED = {"and": "&", "or": "u"}  # the kind of "x < 1 or x > 3"
_UNION = r"\\cup(?![A-Za-z])"
_RELATION = r"[=<>]|\\(?:approx|le|ge|ne|in)(?![A-Za-z])"
_LETTERS = r"[^\W\d_]+"
_BARE_WORD = (  # letters that are a word and no product of variables
    rf"(?<![^\W\d_])(?<![\\{UPRIGHT}])(?![A-Z]+(?![^\W\d_])|[^\W\d_]+[A-Z])"  # not GM, GMm
    r"(?:[^\W\d_]{3,}|(?i:is|it|we|to|of|in|at|so|be|by|an|as|or|if|on|he|do|no|up))(?![^\W\d_])"
)
_WORD = re.compile(rf"{UPRIGHT}{_LETTERS}|{_BARE_WORD}")
_NAMED = re.compile(rf"{_WORD.pattern}|(?<![\\{UPRIGHT}])\b[A-Z]+\b")  # Quadrant I
_VARIABLE = re.compile(rf"(?<![\\{UPRIGHT}])(?<![^\W\d_]){_LETTERS}")
# Of words that may follow a formula
_START = re.compile(rf"(?<![\\A-Za-z{UPRIGHT}])(?:{UPRIGHT}|[A-Za-z]{{2}})")
# ``def`` in a fraction is a product
_PROSE = re.compile(rf"(?<![^ ]){_BARE_WORD}|{_BARE_WORD}(?![^ ])")
_PHRASE = re.compile(rf"(?:[ /]?(?:{_WORD.pattern})(?:\^\{{?[23]\}}?)?){{0,5}}")
# 9 (apples)
_REMARK = re.compile(rf"(?<=[\d}}%]) ?\(([A-Za-z{UPRIGHT}][A-Za-z{UPRIGHT}' ,.&-]*)\)$")
_NO_UNIT = re.compile(
    rf"{UPRIGHT}?\b(?:is|are|was|were|not|or|and|than|if|to|from|at|but|mod|plus|minus|times|over|by|no|wrong|false"
    r"|dozen|hundred|thousand|million|billion)\b"
)
_SIGN = rf"(?P<sign>[-+]|{UPRIGHT}?(?:minus|negative)\ ?)?(?:(?P<money>[$\u20ac\u00a3\u00a5])(?P<inner>-)?)?"
# 2\frac{1}{3}
_FRACTION = r"(?P<whole>\d+)?\ ?\\frac\{(?P<above>[-+]?\d+)\}\{(?P<below>[-+]?\d+)\}"
# 12, 2.50, .5; not the 10 of 10^3
_DECIMAL = r"(?P<decimal>(?!10\ ?\^\{?[-+]?\d)(?:\d+\.?\d*|\.\d+))?"
_POWER = r"(?P<scale>(?:\\times\ )?10\ ?\^\{?(?P<power>[-+]?\d+)\}?)?"  # \times 10^{-5}
_NUMBER = re.compile(
    rf"{_SIGN}(?:{_FRACTION}|{_DECIMAL}{_POWER})\ ?(?P<percent>%|{UPRIGHT}?percent)?", re.VERBOSE
)
_NAME = re.compile(
    rf"(?:\\(?!frac|sqrt|infty|pm|{'|'.join(sorted(FUNCTIONS))})[A-Za-z]+ ?)?\{{?"
    r"(?:[A-Za-z]|[A-Z]+|(?:\\text\{[^{}]*\}|[A-Za-z]{3,})(?: ?(?:\\text\{[^{}]*\}|[A-Za-z]+))*)?"
    r"\}?(?:_(?:\w|\{[^{}]*\}))?'*(?:\([A-Za-z](?:,[A-Za-z])*\))?|\([A-Za-z](?:,[A-Za-z])+\)"
)
_INFINITE = re.compile(rf"\+?(-?) ?(?:\\infty|{UPRIGHT}?(?:infinity|infinite))")
_BRACKETS = re.compile(r"(\\?\{|[(\[])(.*?)(\\\}|[)\]}])", re.DOTALL)
# \frac{27}{35} \approx 0.771
_APPROXIMATION = re.compile(r"(.*\S) ?(?:\\approx|=) ?(-?\d*\.\d+)\D*")

UNITS = {name: unit for unit, names in TABLES["units"].items() for name in names.split()}
_UNIT = re.compile(
    r"(?:(?P<before>square|sq|cubic)\.? ?)?(?P<name>[A-Za-z$\u20ac\u00a3\u00a5]+)"
    r"(?: ?\^?(?P<power>[23])| (?P<after>squared|cubed))?"
)
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_BARE = re.compile(rf"(?<![A-Za-z\\{UPRIGHT}])(?:[A-Za-z]|in)(?![A-Za-z])")  # a variable
_PLAIN_UNIT = r"(?:[A-Za-z]{2,}|[mshgL])(?: ?\^ ?\{?[23]\}?)?"
# What may be a unit though it is in no font, as in "5 m"; other single letters are variables
_PLAIN_UNITS = re.compile(rf"(?<=[\d}}]) ?{_PLAIN_UNIT}(?: ?/ ?{_PLAIN_UNIT})?$")
# What asks for a calculation.
_UNEVALUATED = re.compile(
    r"\\(?:i*int|sum|prod|lim|max|min|gcd|lcm|det|sup|inf)(?![A-Za-z])|vmatrix|\\text\{(?:lcm|gcd)"
)
# What changes no value: 0 + F, +F, 1 \cdot F, \frac{2}{2} F, F + 0, F^1, \frac{F}{1}, -(-F).
_TRIVIAL = re.compile(
    r"^0\+|^\+|^1(?:\\cdot|\\times)?(?=[(\\])|^\\frac\{(\d+)\}\{\1\}(?:\\cdot|\\times)?|[-+]0$|(?:\\cdot|\\times|/|\^)1$"
    r"|\^\{1\}$|^\\frac\{(.*)\}\{1\}$|^-\(-(.*)\)$"
)


@dataclass(frozen=True)
class Value:
    """What an answer or a label is."""

    text: str = field(compare=False)  # as LaTeX


@dataclass(frozen=True)
class Number(Value):
    """A number with its unit, in the unit or in percent as it is written."""

    value: Fraction
    unit: str | None = None  # with its power, as m^2 or m^1/s^2
    is_percent: bool = False
    half_place: Fraction | None = None  # half a unit of a decimal's last place; None: exact
    is_reducible: bool = False  # a fraction that is not in lowest terms: 10/2


@dataclass(frozen=True)
class Items(Value):
    """Several values: those of a list, a set, a tuple or a ratio, the ends of an interval, the parts of a union."""

    kind: str  # a list ``,``, a set ``{}``, a union ``u``, a ratio ``:``, inequalities ``&``, or the brackets around
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Equation(Value):
    """A name and what it equals, as ``x = 5``."""

    name: str
    value: Value  # or the interval where the name lies


@dataclass(frozen=True)
class Words(Value):
    """A phrase, a capital letter or an infinity."""

    words: tuple[str, ...]  # in lower case; or one letter or an infinity


@dataclass(frozen=True)
class Formula(Value):
    """What Math-Verify compares."""

    is_relation: bool = False
    right: Value | None = None  # the value of ``m + n = 5``


def read(text: str, like: Value | None = None) -> Value | None:
    """Return the value that a text is, or None.

    Args:
        like: the label. Like a number, ``3,5`` is a decimal and ``5m`` has a unit; unlike an equation, ``m + n = 5``
            is 5. In a label ``5 m`` has a unit, and ``5m`` is a formula.
    """
    if len(text) > LONGEST or not re.search(r"\w|\\[A-Za-z]|\u221e", text):
        return None
    is_number = like is not None and isinstance(inner(like), Number)
    try:
        text = _without_remark(stripped(normal(text, decimal_comma=is_number)))
        if is_number or (like is None and re.search(r"\d [A-Za-z]", text)):
            text = _PLAIN_UNITS.sub(_in_font, text)
        value = _list(text)
        exact = None if value is None or _is_decimal(like) else _exact(text)
    except RecursionError:  # a thousand brackets
        return None
    return exact or _right_side(value, like)


def _in_font(units: re.Match[str]) -> str:
    return re.sub(_LETTERS, rf"{UPRIGHT}\g<0>", units[0])


def _right_side(value: Value | None, like: Value | None) -> Value | None:
    """Return 5 for ``m + n = 5`` if the label is no relation, any other value as it is."""
    if like is None or is_relation(like) or not isinstance(value, Formula):
        return value
    return value.right or value


def _is_decimal(value: Value | None) -> bool:
    number = value and inner(value)
    return isinstance(number, Number) and number.half_place is not None


def _without_remark(text: str) -> str:
    """Return ``9`` for ``9 (apples)``; ``4 (ab)`` and any other text as it is."""
    found = _REMARK.search(text)
    is_remark = found and re.search("[A-Za-z]{3}", found[1]) and " - " not in found[1]
    return text[: found.start()] if found and is_remark else text


def _exact(text: str) -> Value | None:
    """Return the exact value before a decimal that approximates it, None if there is none."""
    found = _APPROXIMATION.fullmatch(text)
    exact = _list(found[1]) if found else None
    exact = exact and inner(exact)
    is_constant = isinstance(exact, Formula) and not _VARIABLE.search(exact.text)
    return exact if is_constant or (isinstance(exact, Number) and not _is_decimal(exact)) else None


def _agree(one: Number, other: Number) -> bool:
    """Return whether two numbers are equal, or one is the other's rounding."""
    place = max(one.half_place or 0, other.half_place or 0)
    return (
        abs(one.value - other.value) <= place
        or _same_number(one, other)
        or _same_number(other, one)
    )


def _list(text: str) -> Value | None:
    """Read pieces between commas and words."""
    pieces, signs = split(text, _COMMA)
    pieces = [piece for piece in pieces if piece]
    if len(pieces) < 2:
        return _relation(text)
    members = _items(latex(text), ",", pieces, _relation)
    if members is None:
        return None
    words = [word for value in members.items if isinstance(value, Words) for word in value.words]
    if all(isinstance(value, Words) for value in members.items):
        return Words(members.text, tuple(words))
    if any(isinstance(value, Formula) and value.is_relation for value in members.items):
        return replace(members, kind=_JOINED.get(signs[-1].strip(UPRIGHT), ","))
    return _named(members)


def _named(members: Items) -> Value:
    """Return the list of what stands behind names: ``x=3, y=-2`` is a tuple, ``n = 1, 2, 3`` a list."""
    named = [value for value in members.items if isinstance(value, Equation)]
    names = {value.name for value in named}
    items = tuple(map(inner, members.items))
    if len(names) > 1:
        if len(names) < len(items):
            return Formula(members.text, is_relation=True)
        return Items(members.text, "()", tuple(inner(value) for value in sorted(named, key=_name)))
    return Items(members.text, "{}" if len(named) > 1 else ",", items)


def _name(equation: Equation) -> str:
    return equation.name


def _relation(text: str) -> Value | None:
    members, signs = split(text, _RELATION)
    if not signs:
        return _single(text)
    if not all(members[1:]) or _PROSE.search(" ".join(members[:-1])):
        return None
    written = latex(text)
    names = [_NAME.fullmatch(latex(member)) is not None for member in members]
    if set(signs) <= {"=", r"\approx"}:
        return _equation(written, members, names)
    if names[0] and signs == [r"\in"]:
        value = _single(members[1])
        return value and Equation(written, latex(members[0]), value)
    return Formula(written, is_relation=True)


def _equation(text: str, members: list[str], names: list[bool]) -> Value | None:
    """Return the value of ``x = 5``, ``5 = x``, ``12 + 9 = 21`` or ``m + n = 5``; None for ``5 = 6``."""
    if names == [False, True]:
        return _equation(text, members[::-1], [True, False])
    values = [_single(member) for member in members if member]
    if not _is_true(values):
        return None
    if names[0] and members[0]:
        return values[-1] and Equation(text, latex(members[0]), values[-1])
    if not _VARIABLE.search(_WORD.sub("", "".join(members))):
        return values[-1]
    return Formula(text, is_relation=True, right=values[-1])


def _is_true(values: list[Value | None]) -> bool:
    """Return whether the numbers of an equation agree, and are no repetition as ``5 = 5``."""
    numbers = [value for value in values if isinstance(value, Number)]
    return all(left != right and _agree(left, right) for left, right in itertools.pairwise(numbers))


def _single(text: str) -> Value | None:
    if not text or not split(text)[0]:
        return None
    if r"\begin" in text:
        return None if _PROSE.search(text) else Formula(latex(text))
    for kind, sign in (("u", _UNION), (":", ":")):
        pieces = split(text, sign)[0]
        if len(pieces) > 1:
            return _items(latex(text), kind, pieces)
    if number := _number(squeezed(text)):
        return number
    if (brackets := _BRACKETS.fullmatch(text)) and split(brackets[2])[0]:
        return _bracketed(brackets)
    return _words(text) or _formula(text)


def _words(text: str) -> Words | None:
    """Read a capital letter, an infinity or words."""
    if letter := re.fullmatch(rf"{UPRIGHT}?([A-Z])", squeezed(text)):
        return Words(letter[1], (letter[1].lower(),))
    if infinite := _INFINITE.fullmatch(squeezed(text)):
        return Words(latex(text), (infinite[1] + r"\infty",))
    if not _WORD.search(text) or _NAMED.sub("", text).strip(" '-"):
        return None
    return Words(latex(text), tuple(word.strip(UPRIGHT).lower() for word in _NAMED.findall(text)))


def _formula(text: str) -> Value | None:
    if re.search(r"\\pm(?![A-Za-z])", text):
        return _items(latex(text), ",", [re.sub(r"\\pm(?![A-Za-z])", sign, text) for sign in "+-"])
    ends = (
        word.start() for word in _START.finditer(text, 1) if _is_after_formula(text[word.start() :])
    )
    formula = stripped(text[: next(ends, None)])
    return None if _PROSE.search(formula) else Formula(latex(formula))


def _is_after_formula(text: str) -> bool:
    r"""Return whether a text is a unit, or ``\text{square units}``: upright words that deny and join nothing."""
    words = re.sub(r"\.|\^\{?[23]\}?", "", text)
    is_phrase = words[0] == UPRIGHT and words[2:3].isalpha() and _PHRASE.fullmatch(words)
    return bool(unit_of(text) or (is_phrase and not _NO_UNIT.search(words)))


def _bracketed(brackets: re.Match[str]) -> Value | None:
    left, inside, right = map(stripped, brackets.groups())
    kind = (left + right).replace("\\", "")
    text = latex(left + inside + right)
    pieces = split(inside, "[,;]")[0]
    condition = split(inside, r"[|:]|\\mid(?![A-Za-z])")[0][1:] if left == r"\{" else []
    if len(condition) == 1:  # {x | x > 3}
        return _relation(condition[0])
    if len(pieces) > 1 or left == r"\{":
        return _items(text, kind, pieces)
    value = _single(inside) if left in "({" else None
    return value if isinstance(value, (Number, Items, Words)) or left == "{" else Formula(text)


def _items(
    text: str, kind: str, pieces: list[str], read_one: Callable[..., Value | None] = _single
) -> Items | None:
    values = [read_one(piece) for piece in pieces] if len(pieces) <= MOST_ITEMS else [None]
    known = tuple(value for value in values if value is not None)
    return Items(text, kind, known) if len(known) == len(values) else None


def _number(text: str) -> Number | None:
    found = _NUMBER.match(text)
    size = _size(found) if found else None
    if found is None or size is None:
        return None
    rest = stripped(text[found.end() :])
    unit = unit_of(rest)
    if unit is None and (not _PHRASE.fullmatch(rest) or _NO_UNIT.search(rest)):
        return None
    return _number_of(found, size, unit)


def _number_of(found: re.Match[str], size: Fraction, unit: str | None) -> Number:
    is_positive = found["sign"] in (None, "+") and found["inner"] is None
    value = size if is_positive else -size
    places = len((found["decimal"] or "").partition(".")[2])
    text = _fraction(value)
    half_place = None
    if places:  # Math-Verify has a tolerance for decimals
        sign = "" if is_positive else "-"
        text = f"{sign}{found['decimal']}{found['scale'] or ''}"
        half_place = Fraction(10) ** (_power(found) - places) / 2
    return Number(
        text=text,
        value=value,
        unit=unit_of(found["money"] or "") or unit,
        is_percent=found["percent"] is not None,
        half_place=half_place,
        is_reducible=int(found["below"] or 0) > value.denominator,
    )


def _power(found: re.Match[str]) -> int:
    return int(found["power"] or 0)


def _fraction(value: Fraction) -> str:
    above, below = value.as_integer_ratio()
    return str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"


def _size(found: re.Match[str]) -> Fraction | None:
    if found["below"]:
        return _mixed(int(found["above"]), int(found["below"]), found["whole"])
    power = _power(found)
    if abs(power) > LARGEST_EXPONENT or not (found["power"] or found["decimal"]):
        return None
    return Fraction((found["decimal"] or "1").rstrip(".")) * Fraction(10) ** power


def _mixed(above: int, below: int, whole: str | None) -> Fraction | None:
    """Return a fraction, or a whole number and a proper fraction."""
    if below == 0 or (whole and not 0 <= above < below):
        return None
    return int(whole or 0) + Fraction(above, below)


def unit_of(text: str) -> str | None:
    """Return the unit that a normal text is, or None. A bare m is a variable."""
    if _BARE.search(text):
        return None
    text = re.sub(r"\^ ?\\circ ?", "degree", re.sub(rf"[{{}}{UPRIGHT}]", "", text))
    units = [_base_unit(part.strip()) for part in re.split(r"/|\bper\b", text)]
    return "/".join(units) if all(units) else None


def _base_unit(text: str) -> str:
    """Return a unit with its power, as ``m^2``; "" if there is no such unit."""
    found = _UNIT.fullmatch(text)
    name = _known_unit(found["name"]) if found else ""
    if found is None or not name:
        return ""
    power = found["power"] or _POWERS.get(found["before"] or found["after"], "1")
    return f"{UNITS[name]}^{power}"


def _known_unit(name: str) -> str:
    """Return the name of a unit in the singular; "" if there is no such unit."""
    singular = name if name in UNITS or len(name) < 4 else name.lower().removesuffix("s")
    return singular if singular in UNITS else ""


def inner(value: Value) -> Value:
    """Return the value of an equation, or of a set of one; any other value as it is."""
    if isinstance(value, Items) and len(value.items) == 1:
        return value.items[0]
    return value.value if isinstance(value, Equation) else value


def equal(label: Value, answer: Value, ask: Ask) -> bool | None:
    """Return whether an answer has the label's value; None if ``ask`` cannot tell."""
    if _have_other_letters(label, answer):  # B = C and C = B
        return label.text.split("=") == answer.text.split("=")[::-1]
    if not any(isinstance(value, Formula) and value.is_relation for value in (label, answer)):
        label = inner(label)
        answer = inner(answer)
    return _same_value(label, answer, ask)


def _same_value(label: Value, answer: Value, ask: Ask) -> bool | None:
    match label, answer:
        case Number(), _:
            return isinstance(answer, Number) and _same_number(label, answer)
        case Items(), Items():
            return _same_items(label, answer, ask)
        case Words(), Words():
            return label.words == answer.words
    return label.text == answer.text or _same_formula(label, answer, ask)


def _have_other_letters(label: Value, answer: Value) -> bool:
    """Return whether two values are of equations for two letters, as x = 5 and y = 5."""
    names = {value.name for value in (label, answer) if isinstance(value, Equation)}
    return len(names) == 2 and {len(name) for name in names} == {1}


def _same_formula(label: Value, answer: Value, ask: Ask) -> bool | None:
    kinds = {type(label), type(answer)}
    is_vector = kinds == {Items, Formula} and r"\begin" in label.text + answer.text
    has_relation = is_relation(label)
    if is_vector or (
        Words not in kinds
        and has_relation == is_relation(answer)
        and (has_relation or Items not in kinds)
    ):
        return ask(label.text, answer.text)
    return False


def is_relation(value: Value) -> bool:
    """Return whether a value is an equation, an inequality or an interval, which may equal one."""
    if isinstance(value, Formula):
        return value.is_relation
    return isinstance(value, Equation) or (
        isinstance(value, Items) and value.kind not in (",", ":", "{}", "&")
    )


def _same_number(label: Number, answer: Number) -> bool:
    # A calculation
    if answer.is_reducible and not label.is_reducible and label.value.denominator == 1:
        return False
    return any(_is_near(label, answer, given) for given in _readings(label, answer))


def _readings(label: Number, answer: Number) -> list[Fraction]:
    """Return what an answer may be beside the label; nothing if their units differ."""
    given = answer.value
    if label.is_percent and not answer.is_percent:  # 28 % is 28, and 0.28
        return [given, given * 100]
    if answer.is_percent and not label.is_percent:  # 50 % is 0.5; 500 % is no good way to write 5
        return [given / 100] if abs(label.value) <= 1 else []
    have_other_units = label.unit and answer.unit and label.unit != answer.unit
    return [] if have_other_units else [given]


def _is_near(label: Number, answer: Number, given: Fraction) -> bool:
    """Return whether two values are equal; a decimal may differ from a value that is no integer, as it is rounded."""
    right = label.value
    half_place = label.half_place or answer.half_place
    if right == given or half_place is None or right.denominator == 1:
        return right == given
    relative = TOLERANCE * abs(right)
    is_rough = label.half_place is None and half_place > relative  # 1.0 for 2097151/2097152
    return not is_rough and abs(right - given) <= min(half_place, relative)


def _same_items(label: Items, answer: Items, ask: Ask) -> bool | None:
    kinds = {label.kind, answer.kind}
    is_unordered = kinds <= {",", "{}", "u"} or kinds <= {",", "&"}
    is_list = kinds in ({",", "()"}, {",", "[]"}) and not re.search(
        r"[<>]|\\[lg]e", label.text + answer.text
    )
    is_like = is_unordered or len(kinds) == 1 or is_list
    if len(label.items) != len(answer.items) or not is_like:
        return False
    rest = list(answer.items)
    for wanted in label.items:
        candidates = rest if is_unordered else rest[:1]
        place, verdict = _first_equal(wanted, candidates, ask)
        if not verdict:
            return verdict
        del rest[place]
    return True


def _first_equal(label: Value, candidates: list[Value], ask: Ask) -> tuple[int, bool | None]:
    """Return the place of the first value that equals a label, and True; else False, or None if one cannot be told."""
    verdict: bool | None = False
    for place, candidate in enumerate(candidates):
        one = equal(label, candidate, ask)
        if one:
            return place, True
        verdict = None if one is None else verdict
    return 0, verdict


def canonical(value: Value) -> str:
    """Return a text in which equal answers vote together; units and names do not count."""
    value = inner(value)
    if isinstance(value, Number):
        return str(value.value) + ("%" if value.is_percent else "")
    if isinstance(value, Items):
        texts = list(map(canonical, value.items))
        if value.kind in (",", "{}"):
            return ",".join(sorted(texts))
        return f"{value.kind[:1]}{','.join(sorted(texts) if value.kind in 'u&' else texts)}{value.kind[1:]}"
    return (
        " ".join(value.words)
        if isinstance(value, Words) and len(value.words[0]) > 1
        else value.text
    )


def spelled(text: str) -> str:
    """Return any text in the one spelling of its tokens."""
    return latex(normal(text)).replace(" ", "")


def formulas(value: Value) -> list[str]:
    """Return the formulas in a value that only Math-Verify can compare."""
    value = inner(value)
    if isinstance(value, Items):
        return [formula for item in value.items for formula in formulas(item)]
    return [value.text] if isinstance(value, Formula) else []


def is_copied(answer: Value, label: Value, question: str) -> bool:
    """Return whether an answer is left to be calculated: an integral, or the question's own formula, not the label."""
    answer = inner(answer)
    if isinstance(answer, Number):
        return answer.is_reducible and _is_fraction_of(question, abs(answer.value))
    if _UNEVALUATED.search(answer.text) and not _UNEVALUATED.search(label.text):
        return True
    text = spelled(answer.text)
    if not isinstance(answer, Formula) or text in (spelled(inner(label).text), spelled(label.text)):
        return False
    text = _bare(text)
    return re.search(r"[-+*/^\\]", text.lstrip("+-")) is not None and text in question


def _is_fraction_of(question: str, value: Fraction) -> bool:
    fractions = re.findall(r"\\frac\{(\d+)\}\{(\d+)\}", question)
    return any(
        int(below) and Fraction(int(above), int(below)) == value for above, below in fractions
    )


def _bare(text: str) -> str:
    """Return a formula without what changes no value, and without brackets around it."""
    while (bare := _TRIVIAL.sub(r"\2\3", text)) != text:
        text = bare
    brackets = _BRACKETS.fullmatch(text)
    return brackets[2] if brackets and split(brackets[2])[0] else text
