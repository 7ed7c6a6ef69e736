r"""Reads an answer or a label by one grammar, and compares values. Does no algebra.

:func:`read` takes a text whole or not at all: ``10^{-7}`` is never 7. What is no number, list, interval, time, date,
letter or word is a ``Formula``, which Math-Verify compares.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate

from openrlhf_dbb.rewards.tokens import FUNCTIONS, UPRIGHT, latex, tokens
from openrlhf_dbb.rewards.units import Unit, unit_of

LONGEST = 4000  # characters; Python reads no number of more than 4,300 digits
TOLERANCE = Fraction(1, 10**6)  # relative
MOST_ITEMS, LARGEST_EXPONENT = 50, 1000
Ask = Callable[[str, str], bool | None]
"""Says of two formulas whether they are equal; None if it cannot tell."""

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_EQUALS, _ORDERS = {"=", r"\approx"}, {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le"}
_RELATIONS = _EQUALS | set(_ORDERS) | {r"\ne", r"\in"}
_OPEN, _CLOSE = {"(", "[", "{", r"\{"}, {")", "]", "}", r"\}"}
_NO_UNIT = {"is", "are", "was", "were", "not", "or", "and", "than", "if", "to", "from", "at", "but", "mod", "plus",
            "minus", "times", "over", "by", "no"}  # fmt: skip
_SHORT_WORDS = {"is", "it", "we", "to", "of", "in", "at", "so", "be", "by", "an", "as", "or", "if", "on", "he", "do",
                "no", "up"}  # fmt: skip
_NUMBER = re.compile(
    r"""(?P<sign>[-+]|(?:\\text\{)?(?:minus|negative)\}?\ )?(?:(?P<money>[$\u20ac\u00a3\u00a5])(?P<inner>-)?)?
    (?:(?P<digits>\d+)_\{?(?P<base>\d+)\}?|(?P<whole>\d+)?\ ?\\frac\{(?P<above>[-+]?\d+)\}\{(?P<below>[-+]?\d+)\}
    |(?P<decimal>(?!10\ ?\^\{?[-+]?\d)(?:\d+\.?\d*|\.\d+))?(?:\((?P<period>\d+)\))?
     (?:(?:\\times\ )?10\ ?\^\{?(?P<power>[-+]?\d+)\}?)?)
    \ ?(?P<percent>%|(?:\\text\{)?percent\}?)?""",
    re.VERBOSE,
)
_NAME = re.compile(
    rf"(?:\\(?!frac|sqrt|infty|pm|{'|'.join(sorted(FUNCTIONS))})[A-Za-z]+ ?)?\{{?"
    r"(?:[A-Za-z]|[A-Z]+|(?:\\text\{[^{}]*\}|[A-Za-z]{3,})(?: ?(?:\\text\{[^{}]*\}|[A-Za-z]+))*)?"
    r"\}?(?:_(?:\w|\{[^{}]*\}))?'*(?:\([A-Za-z](?:,[A-Za-z])*\))?|\([A-Za-z](?:,[A-Za-z])+\)"
)
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))? ?(?:\\text\{)?([ap]m|)\}?", re.IGNORECASE)


@dataclass(frozen=True)
class Value:
    text: str = field(compare=False)  # as LaTeX


@dataclass(frozen=True)
class Number(Value):
    value: Fraction
    unit: Unit | None = None
    is_percent: bool = False
    base: int = 0  # if not 0, the value's decimal digits are digits of this base
    is_reducible: bool = False  # a fraction that is not in lowest terms: 10/2


@dataclass(frozen=True)
class Items(Value):
    kind: str  # a list ``,``, a set ``{}``, a union ``u``, a ratio ``:``, or the brackets around the items
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Equation(Value):
    name: str
    value: Value  # or the interval where the name lies


@dataclass(frozen=True)
class Words(Value):
    words: tuple[str, ...]  # in lower case; or one letter, an infinity, a time or a date
    half: str = ""  # of the day: am, pm or unknown


@dataclass(frozen=True)
class Formula(Value):
    is_relation: bool = False


def read(text: str, like: Value | None = None) -> Value | None:
    """Return the value that a text is, or None.

    Args:
        like: the label. Like a number, ``3,5`` is a decimal and ``5 m`` has a unit; like a time, ``12.30`` is one.
    """
    if len(text) > LONGEST or not re.search(r"\w|\\[A-Za-z]|\u221e", text):
        return None
    if isinstance(like, Words) and _TIME.fullmatch(like.words[0]):
        text = re.sub(r"(?<=\d)\.(?=\d\d(?!\d))", ":", text)
    try:
        return _list(tokens(text, decimal_comma=isinstance(like, Number)), isinstance(like, Number))
    except RecursionError:  # a thousand brackets
        return None


def _list(parts: list[str], numeric: bool) -> Value | None:
    """Read pieces between commas and words; ``numeric`` allows letters as units."""
    parts = _strip(parts)
    pieces = _split(parts, {",", ";", "and", "or", UPRIGHT + "and", UPRIGHT + "or"})[0]
    pieces = [piece for piece in map(_strip, pieces) if piece]
    date = _date(parts)
    if len(pieces) < 2 or date is not None:
        return date or _relation(parts, numeric)
    values, text = _each(pieces, _relation), latex(parts)
    if not values:
        return None
    if all(isinstance(value, Words) for value in values):
        return Words(text, tuple(word for value in values if isinstance(value, Words) for word in value.words))
    names = [value.name if isinstance(value, Equation) else "" for value in values]
    items = tuple(map(inner, values))
    if all(names) and len(set(names)) == len(names):  # x=3, y=-2
        return Items(text, "()", tuple(item for _, item in sorted(zip(names, items, strict=True), key=lambda p: p[0])))
    if names[0] and not any(names[1:]):  # n = 1, 2, 3
        return Equation(text, names[0], Items(text, ",", items))
    return _sum(*items) or (Items(text, ",", items) if len(set(names)) == 1 else Formula(text, is_relation=True))


def _sum(large: Value, *rest: Value) -> Value | None:
    """Return 18 dollars and 50 cents as one number of dollars."""
    small = rest[0] if len(rest) == 1 else None
    if isinstance(large, Number) and isinstance(small, Number) and large.unit and small.unit:
        share = small.unit[1] / large.unit[1]
        if large.unit[0] == small.unit[0] and share < 1:
            return replace(large, value=large.value + small.value * share)
    return None


def _each(pieces: list[list[str]], read_one: Callable[[list[str], bool], Value | None]) -> list[Value]:
    """Return the values of all pieces; none if one cannot be read, or if there are too many."""
    values = [read_one(piece, False) for piece in pieces] if len(pieces) <= MOST_ITEMS else []
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _relation(parts: list[str], numeric: bool) -> Value | None:
    members, signs = _split(parts, _RELATIONS)
    if not signs:
        return _single(parts, numeric)
    text, members = latex(parts), [_strip(member) for member in members]
    if not all(members[1:]) or _is_prose(parts):
        return None
    names = [_NAME.fullmatch(latex(member)) is not None for member in members]
    first, last = _single(members[0], numeric), _single(members[-1], numeric)
    if signs == [r"\in"] and names[0]:
        return last and Equation(text, latex(members[0]), last)
    if set(signs) <= _EQUALS:
        if names[-1] and len(members) == 2 and not names[0]:  # 5 = x
            return first and Equation(text, latex(members[1]), first)
        if names[0] and members[0]:
            return last and Equation(text, latex(members[0]), last)
        if any(part.isalpha() and not _is_word(part) for part in parts):
            return Formula(text, is_relation=True)
        # 12 + 9 = 21, or 21 = 12 + 9
        return first if isinstance(first, Number) and not isinstance(last, Number) else last
    return _interval(text, members, signs, names) or Formula(text, is_relation=True)


def _interval(text: str, members: list[list[str]], signs: list[str], names: list[bool]) -> Value | None:
    """Return the interval of ``a < x <= b`` or ``x > a``; None for any other relation."""
    if signs[0] in (">", r"\ge"):
        members, names, signs = members[::-1], names[::-1], [_ORDERS.get(sign, "") for sign in signs[::-1]]
    if not set(signs) <= {"<", r"\le"} or names not in ([True, False], [False, True], [False, True, False]):
        return None
    name = names.index(True)
    low, high = name > 0, name + 1 < len(names)
    ends = _each([*members[:name], *members[name + 1 :]], _single)
    if not ends:
        return None
    ends = [Words("", (r"-\infty",))] * (not low) + ends + [Words("", (r"\infty",))] * (not high)
    kind = ("[" if low and signs[0] == r"\le" else "(") + ("]" if high and signs[-1] == r"\le" else ")")
    return Equation(text, latex(members[name]), Items(text, kind, tuple(ends)))


def _single(parts: list[str], numeric: bool) -> Value | None:
    parts = _strip(parts)
    if not parts or not _is_balanced(parts):
        return None
    text = latex(parts)
    if any(part[:6] == r"\begin" for part in parts):
        return Formula(text)
    pieces = _split(parts, {r"\cup"})[0]
    if len(pieces) > 1:
        return _items(text, "u", pieces)
    number = _number(parts, text, numeric)
    if number is not None:
        return number
    if (parts[0], parts[-1]) == ("{", "}") and _is_balanced(parts[1:-1]):  # a group; with commas a set in plain braces
        pieces = _split(parts[1:-1], {","})[0]
        return _items(text, "{}", pieces) if len(pieces) > 1 else _single(parts[1:-1], numeric)
    if parts[0] in ("(", "[", r"\{") and parts[-1] in (")", "]", r"\}") and _is_balanced(parts[1:-1]):
        return _bracketed(parts, text)
    clock = _TIME.fullmatch(text)
    if clock and (clock[2] or clock[3]) and int(clock[1]) < 25 and int(clock[2] or 0) < 60:
        return Words(text, (f"{int(clock[1])}:{clock[2] or '00'}",), clock[3].lower())
    ratio = _split(parts, {":"})[0]
    if len(ratio) > 1 and r"\{" not in parts:
        return _items(text, ":", ratio)
    bare = parts[-1].strip(UPRIGHT)
    if len(parts) == 1 and len(bare) == 1 and bare.isupper():
        return Words(bare, (bare.lower(),))
    if bare in (r"\infty", "infinity", "infinite") and parts[:-1] in ([], ["+"], ["-"]):
        return Words(text, (("-" if parts[0] == "-" else "") + r"\infty",))
    words = [part for part in parts if part not in (" ", "-", "'")]
    if words and all(map(_is_word, words)):
        return Words(text, tuple(word.strip(UPRIGHT).lower() for word in words))
    if r"\pm" in parts:
        return _items(text, ",", [[sign if part == r"\pm" else part for part in parts] for sign in "+-"])
    starts = [at for at in range(1, len(parts)) if _is_word(parts[at]) and unit_of(parts[at:]) is not None]
    formula = _strip(parts[: starts[0]]) if starts else parts
    return None if _is_prose(formula) else Formula(latex(formula))


def _bracketed(parts: list[str], text: str) -> Value | None:
    inside = _strip(parts[1:-1])
    pieces = _split(inside, {",", ";"})[0]
    kind = parts[0].strip("\\") + parts[-1].strip("\\")
    condition = _split(inside, {"|", ":", r"\mid"})[0][1:] if kind == "{}" else []
    if len(condition) == 1:  # {x | x > 3}
        return _relation(condition[0], False)
    if len(pieces) > 1 or kind == "{}":
        return _items(text, kind, pieces)
    value = _single(inside, False) if kind == "()" else None
    return value if isinstance(value, (Number, Items, Words)) else Formula(text)


def _items(text: str, kind: str, pieces: list[list[str]]) -> Value | None:
    values = _each(pieces, _single)
    return Items(text, kind, tuple(values)) if values else None


def _number(parts: list[str], text: str, numeric: bool) -> Number | None:
    if parts[0] == "(" and parts[-1] == ")" and _is_balanced(parts[1:-1]):
        inner = _strip(parts[1:-1])
        return _number(inner, latex(inner), numeric) if inner else None
    found = _NUMBER.match(text)
    size = _size(found) if found else None
    if found is None or size is None:
        return None
    rest = _strip(tokens(text[found.end() :])) if found.end() < len(text) else []
    unit = unit_of(rest, letters=numeric)
    is_phrase = len(rest) < 10 and all(p == " " or (_is_word(p) and p.strip(UPRIGHT) not in _NO_UNIT) for p in rest)
    if unit is None and not is_phrase:
        return None
    sign = 1 if (found["sign"] or "+")[0] == "+" and not found["inner"] else -1
    value = sign * size
    above, below = value.as_integer_ratio()
    written = str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"
    if "." in (found["decimal"] or "") and not found["period"]:  # Math-Verify compares decimals with a tolerance
        written = f"{'-' * (sign < 0)}{found['decimal']}\\times 10^{{{found['power'] or 0}}}"
    unit = unit_of([found["money"] or ""]) or unit
    is_reducible = int(found["below"] or 0) > below
    return Number(written, value, unit, bool(found["percent"]), int(found["base"] or 0), is_reducible)


def _size(found: re.Match[str]) -> Fraction | None:
    """Return what the digits say, without the sign; None if they say nothing."""
    if found["base"]:
        return Fraction(int(found["digits"]))
    if found["below"]:
        whole, above, below = (int(found[name] or -1) for name in ("whole", "above", "below"))
        is_proper = below != 0 and (whole < 0 or 0 <= above < below)
        return Fraction(above, below) + max(whole, 0) if is_proper else None
    power, decimal = int(found["power"] or 0), found["decimal"] or "1"
    if abs(power) > LARGEST_EXPONENT or not (found["power"] or found["decimal"]):
        return None
    value = Fraction(decimal.rstrip("."))
    if found["period"]:
        places = len(decimal.partition(".")[2])
        value += Fraction(int(found["period"]), (10 ** len(found["period"]) - 1) * 10**places)
    return value * Fraction(10) ** power


def _date(parts: list[str]) -> Words | None:
    words = [
        p.strip(UPRIGHT).lower() for p in parts if p.strip(UPRIGHT) not in (" ", ",", ".", "th", "st", "nd", "rd", "of")
    ]
    months = [word for word in words if word[:3] in _MONTHS and word.isalpha()]
    numbers = [word for word in words if word.isdigit()]
    if len(months) != 1 or len(words) != 1 + len(numbers) or not 0 < len(numbers) < 3 or words[-1] in months:
        return None
    return Words(latex(parts), ("date", *numbers[1:], months[0][:3], numbers[0]))


def _is_word(part: str) -> bool:
    """Return whether letters are a word and no product of variables."""
    is_long = len(part) > 2 or part.lower() in _SHORT_WORDS
    return part[0] == UPRIGHT or (part.isalpha() and is_long and not part.isupper())


def _is_prose(parts: list[str]) -> bool:
    """Return whether words in no font stand apart: ``def`` in a fraction is a product."""
    around = zip([" ", *parts[:-1]], parts, [*parts[1:], " "], strict=True)
    return any(_is_word(word) and word[0] != UPRIGHT and " " in (before, after) for before, word, after in around)


def _depths(parts: list[str]) -> list[int]:
    """Return how many brackets are open behind each token."""
    return list(accumulate((p in _OPEN or p[:6] == r"\begin") - (p in _CLOSE or p[:4] == r"\end") for p in parts))


def _is_balanced(parts: list[str]) -> bool:
    depths = [0, *_depths(parts)]
    return depths[-1] == 0 and min(depths) == 0


def _strip(parts: list[str]) -> list[str]:
    """Return tokens without spaces and punctuation around them."""
    while parts[:1] == [" "]:
        parts = parts[1:]
    while parts and parts[-1] in " .,;:":
        parts = parts[:-1]
    return parts


def _split(parts: list[str], at: Collection[str]) -> tuple[list[list[str]], list[str]]:
    """Split tokens at those that are in no brackets; return the pieces and what was between them."""
    pieces: list[list[str]] = [[]]
    between = []
    for part, depth in zip(parts, _depths(parts), strict=True):
        if depth == 0 and part in at:
            between.append(part)
            pieces.append([])
        else:
            pieces[-1].append(part)
    return pieces, between


def inner(value: Value) -> Value:
    """Return the value of an equation, or of a set of one; any other value as it is."""
    if isinstance(value, Items) and len(value.items) == 1:
        return value.items[0]
    return value.value if isinstance(value, Equation) else value


def equal(label: Value, answer: Value, ask: Ask) -> bool | None:
    """Return whether an answer has the label's value; None if ``ask`` cannot tell."""
    names = [value.name for value in (label, answer) if isinstance(value, Equation)]
    if len(set(names)) == 2 and list(map(len, names)) == [1, 1]:  # x=5 and y=5
        return False
    if not any(isinstance(value, Formula) and value.is_relation for value in (label, answer)):
        label, answer = inner(label), inner(answer)
    if isinstance(label, Number):
        return isinstance(answer, Number) and _same_number(label, answer)
    if isinstance(label, Items) and isinstance(answer, Items):
        return _same_items(label, answer, ask)
    if isinstance(label, Words) and isinstance(answer, Words):
        return label.words == answer.words and (label.half == answer.half or "" in (label.half, answer.half))
    if label.text == answer.text:
        return True
    kinds = {type(label), type(answer)}
    is_vector = kinds == {Items, Formula} and r"\begin" in label.text + answer.text
    if Words in kinds or (Items in kinds and not (is_vector or (_is_relation(label) and _is_relation(answer)))):
        return False
    if not is_vector and _is_relation(label) != _is_relation(answer):
        return False
    return ask(label.text, answer.text)


def _is_relation(value: Value) -> bool:
    if isinstance(value, Formula):
        return value.is_relation
    return isinstance(value, Equation) or (isinstance(value, Items) and value.kind not in (",", ":", "{}"))


def _same_number(label: Number, answer: Number) -> bool:
    right, given = label.value, answer.value
    is_calculation = answer.is_reducible and not label.is_reducible and right.denominator == 1
    if is_calculation or (label.base and answer.base and label.base != answer.base):
        return False
    if label.unit and answer.unit:
        if label.unit[0] != answer.unit[0]:
            return False
        right, given = right * label.unit[1], given * answer.unit[1]
    values = [given]
    if label.is_percent != answer.is_percent:  # 28 % is 28, and 0.28
        values.append(given / 100 if answer.is_percent else given * 100)
    tolerance = 0 if right.denominator == 1 else TOLERANCE * abs(right)
    return any(abs(right - value) <= tolerance for value in values)


def _same_items(label: Items, answer: Items, ask: Ask) -> bool | None:
    kinds = {label.kind, answer.kind}
    is_unordered = kinds <= {",", "{}", "u"}
    if len(label.items) != len(answer.items) or (
        len(kinds) == 2 and not is_unordered and not ("," in kinds and kinds <= {",", "()", "[]"})
    ):
        return False
    rest = list(answer.items)
    for wanted in label.items:
        for given in rest if is_unordered else rest[:1]:
            verdict = equal(wanted, given, ask)
            if verdict is None:
                return None
            if verdict:
                rest.remove(given)
                break
        else:
            return False
    return True


def canonical(value: Value) -> str:
    """Return a text in which equal answers vote together; units and names do not count."""
    value = inner(value)
    if isinstance(value, Number):
        return str(value.value) + "%" * value.is_percent
    if isinstance(value, Items):
        texts = list(map(canonical, value.items))
        return f"{value.kind[:1]}{','.join(sorted(texts) if value.kind in (',', '{}', 'u') else texts)}{value.kind[1:]}"
    return " ".join(value.words) if isinstance(value, Words) and len(value.words[0]) > 1 else value.text


def spelled(text: str) -> str:
    """Return any text in the one spelling of its tokens."""
    return latex([part for part in tokens(text) if part != " "])


def formulas(value: Value) -> list[str]:
    """Return the formulas in a value that only Math-Verify can compare."""
    value = inner(value)
    if isinstance(value, Items):
        return [formula for item in value.items for formula in formulas(item)]
    return [value.text] if isinstance(value, Formula) else []


def is_copied(answer: Value, label: Value, question: str) -> bool:
    """Return whether an answer is a calculation from the question, in one spelling, and not the label itself."""
    answer = inner(answer)
    if isinstance(answer, Number):
        fractions = re.findall(r"\\frac\{(\d+)\}\{(\d+)\}", question)
        return answer.is_reducible and abs(answer.value) in [Fraction(int(a), int(b)) for a, b in fractions if int(b)]
    text = spelled(answer.text)
    is_calculation = isinstance(answer, Formula) and re.search(r"[-+*/^\\]", text.lstrip("+-")) is not None
    return is_calculation and text in question and text not in (spelled(inner(label).text), spelled(label.text))
