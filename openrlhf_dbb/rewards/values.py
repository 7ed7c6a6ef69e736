r"""Reads an answer or a label by one grammar, and compares values. Does no algebra.

:func:`read` takes a text whole or not at all: ``10^{-7}`` is never 7. What is no number, list, interval, time, date,
letter or word is a ``Formula``, which Math-Verify compares.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from openrlhf_dbb.rewards.notation import FUNCTIONS, TABLES, UPRIGHT, latex, normal, split, squeezed, stripped

LONGEST = 4000  # characters; Python reads no number of more than 4,300 digits
TOLERANCE = Fraction(1, 10**6)  # relative
MOST_ITEMS, LARGEST_EXPONENT = 50, 1000
Ask = Callable[[str, str], bool | None]  # says of two formulas whether they are equal; None if it cannot tell
Unit = tuple[tuple[tuple[str, int], ...], Fraction]  # powers of base units, sorted, and the factor to them

_COMMA, _UNION = rf"[,;]|{UPRIGHT}?\b(?:and|or)\b", r"\\cup(?![A-Za-z])"
_RELATION = r"[=<>]|\\(?:approx|le|ge|ne|in)(?![A-Za-z])"
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_TURNED = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le"}
_LETTERS = r"[^\W\d_]+"
_BARE_WORD = (  # letters that are a word and no product of variables
    rf"(?<![^\W\d_])(?<![\\{UPRIGHT}])(?![A-Z]+(?![^\W\d_]))"
    r"(?:[^\W\d_]{3,}|(?i:is|it|we|to|of|in|at|so|be|by|an|as|or|if|on|he|do|no|up))(?![^\W\d_])"
)
_WORD = re.compile(rf"{UPRIGHT}{_LETTERS}|{_BARE_WORD}")
_NAMED = re.compile(rf"{_WORD.pattern}|(?<![\\{UPRIGHT}])\b[A-Z]+\b")  # Quadrant I
_START = re.compile(rf"(?<![\\A-Za-z{UPRIGHT}])(?:{UPRIGHT}|[A-Za-z]{{2}})")  # of words that may follow a formula
_PROSE = re.compile(rf"(?<![^ ]){_BARE_WORD}|{_BARE_WORD}(?![^ ])")  # ``def`` in a fraction is a product
_PHRASE = re.compile(rf"(?: ?(?:{_WORD.pattern})){{0,5}}")
_NO_UNIT = re.compile(
    rf"{UPRIGHT}?\b(?:is|are|was|were|not|or|and|than|if|to|from|at|but|mod|plus|minus|times|over|by|no|wrong|false)\b"
)
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]|{UPRIGHT}?(?:minus|negative)\ ?)?(?:(?P<money>[$\u20ac\u00a3\u00a5])(?P<inner>-)?)?
    (?:(?P<digits>\d+)_\{{?(?P<base>\d+)\}}?|(?P<whole>\d+)?\ ?\\frac\{{(?P<above>[-+]?\d+)\}}\{{(?P<below>[-+]?\d+)\}}
    |(?P<decimal>(?!10\ ?\^\{{?[-+]?\d)(?:\d+\.?\d*|\.\d+))?(?:\((?P<period>\d+)\))?
     (?:(?:\\times\ )?10\ ?\^\{{?(?P<power>[-+]?\d+)\}}?)?)
    \ ?(?P<percent>%|{UPRIGHT}?percent)?""",
    re.VERBOSE,
)
_NAME = re.compile(
    rf"(?:\\(?!frac|sqrt|infty|pm|{'|'.join(sorted(FUNCTIONS))})[A-Za-z]+ ?)?\{{?"
    r"(?:[A-Za-z]|[A-Z]+|(?:\\text\{[^{}]*\}|[A-Za-z]{3,})(?: ?(?:\\text\{[^{}]*\}|[A-Za-z]+))*)?"
    r"\}?(?:_(?:\w|\{[^{}]*\}))?'*(?:\([A-Za-z](?:,[A-Za-z])*\))?|\([A-Za-z](?:,[A-Za-z])+\)"
)
_TIME = re.compile(rf"(?=\d+\D)([01]?\d|2[0-4])(?::([0-5]\d))? ?{UPRIGHT}?([ap]m|)", re.IGNORECASE)
_INFINITE = re.compile(rf"\+?(-?) ?(?:\\infty|{UPRIGHT}?(?:infinity|infinite))")
_BRACKETS = re.compile(r"(\\?\{|[(\[])(.*?)(\\\}|[)\]}])", re.DOTALL)

UNITS = {
    name: (base, Fraction(factor))
    for base, sizes in TABLES["units"].items()
    for factor, *names in map(str.split, sizes)
    for name in names
}
_FACTOR = re.compile(
    r" *(?P<over>/|per\b)? *(?P<before>square|sq|cubic)?\.? *(?P<name>[A-Za-z$\u20ac\u00a3\u00a5]+)"
    r"(?: *\^?(?P<sign>-?)(?P<power>[123])| *(?P<after>squared|cubed))? *"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_BARE = re.compile(rf"(?<![A-Za-z\\{UPRIGHT}])(?:[A-Za-z]|in)(?![A-Za-z])")
_UNITS_WITHOUT_FONT = {"m", "s", "h", "g", "L", "in"}  # other single letters are variables


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
        like: the label. Like a number, ``3,5`` is a decimal and ``5m`` has a unit; like a time, ``12.30`` is one. In a
            label ``5 m`` has a unit, and ``5m`` is a formula.
    """
    if len(text) > LONGEST or not re.search(r"\w|\\[A-Za-z]|\u221e", text):
        return None
    if isinstance(like, Words) and _TIME.fullmatch(like.words[0]):
        text = re.sub(r"(?<=\d)\.(?=\d\d(?!\d))", ":", text)
    is_number = isinstance(like, Number)
    try:
        text = stripped(normal(text, decimal_comma=is_number))
        return _list(text, is_number or (like is None and re.search(r"\d [A-Za-z]", text) is not None))
    except RecursionError:  # a thousand brackets
        return None


def _list(text: str, numeric: bool) -> Value | None:
    """Read pieces between commas and words; ``numeric`` allows letters as units."""
    pieces = [piece for piece in split(text, _COMMA)[0] if piece]
    date = _date(text)
    if len(pieces) < 2 or date is not None:
        return date or _relation(text, numeric)
    members = _items(latex(text), ",", pieces, _relation)
    if members is None:
        return None
    text, values = members.text, members.items
    if all(isinstance(value, Words) for value in values):
        return Words(text, tuple(word for value in values if isinstance(value, Words) for word in value.words))
    names = [value.name if isinstance(value, Equation) else "" for value in values]
    items = tuple(map(inner, values))
    if all(names) and len(set(names)) == len(names):  # x=3, y=-2
        return Items(text, "()", tuple(item for _, item in sorted(zip(names, items, strict=True), key=lambda p: p[0])))
    if names[0] and not any(names[1:]):  # n = 1, 2, 3
        return Equation(text, names[0], Items(text, ",", items))
    match items:  # 18 dollars and 50 cents
        case [Number(unit=(base, size)) as large, Number(unit=(other, part)) as small] if base == other and part < size:
            return replace(large, value=large.value + small.value * part / size)
    return Items(text, ",", items) if len(set(names)) == 1 else Formula(text, is_relation=True)


def _relation(text: str, numeric: bool) -> Value | None:
    members, signs = split(text, _RELATION)
    if not signs:
        return _single(text, numeric)
    if not all(members[1:]) or _PROSE.search(text):
        return None
    written, names = latex(text), [_NAME.fullmatch(latex(member)) is not None for member in members]
    is_equation = set(signs) <= {"=", r"\approx"}
    if is_equation and names == [False, True]:  # 5 = x
        members, names = members[::-1], names[::-1]
    first, last = _single(members[0], numeric), _single(members[-1], numeric)
    if names[0] and (signs == [r"\in"] or (is_equation and members[0])):
        return last and Equation(written, latex(members[0]), last)
    if is_equation and not re.search(rf"(?<![\\{UPRIGHT}])(?<![^\W\d_]){_LETTERS}", _WORD.sub("", text)):
        # 12 + 9 = 21, or 21 = 12 + 9
        return first if isinstance(first, Number) and not isinstance(last, Number) else last
    return _interval(written, members, signs, names) or Formula(written, is_relation=True)


def _interval(text: str, members: list[str], signs: list[str], names: list[bool]) -> Value | None:
    """Return the interval of ``a < x <= b`` or ``x > a``; None for any other relation."""
    if signs[0] in (">", r"\ge"):
        members, names, signs = members[::-1], names[::-1], [_TURNED.get(sign, "") for sign in signs[::-1]]
    if names == [True, False]:
        members, signs = [r"-\infty", *members], ["<", *signs]
    elif names == [False, True]:
        members, signs = [*members, r"\infty"], [*signs, "<"]
    elif names != [False, True, False]:
        return None
    if not set(signs) <= {"<", r"\le"}:
        return None
    kind = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
    interval = _items(text, kind, members[::2])
    return interval and Equation(text, latex(members[1]), interval)


def _single(text: str, numeric: bool = False) -> Value | None:
    if not text or not split(text)[0]:
        return None
    tight, written = squeezed(text), latex(text)
    united, ratio = split(text, _UNION)[0], split(text, ":")[0]
    if r"\begin" in text:
        return Formula(written)
    if len(united) > 1:
        return _items(written, "u", united)
    if number := _number(tight, numeric):
        return number
    if (brackets := _BRACKETS.fullmatch(text)) and split(brackets[2])[0]:
        return _bracketed(brackets, numeric)
    if clock := _TIME.fullmatch(tight):
        return Words(written, (f"{int(clock[1])}:{clock[2] or '00'}",), clock[3].lower())
    if len(ratio) > 1 and r"\{" not in text:
        return _items(written, ":", ratio)
    if letter := re.fullmatch(rf"{UPRIGHT}?([A-Z])", tight):
        return Words(letter[1], (letter[1].lower(),))
    if infinite := _INFINITE.fullmatch(tight):
        return Words(written, (infinite[1] + r"\infty",))
    if _WORD.search(text) and not _NAMED.sub("", text).strip(" '-"):
        return Words(written, tuple(word.strip(UPRIGHT).lower() for word in _NAMED.findall(text)))
    if re.search(r"\\pm(?![A-Za-z])", text):
        return _items(written, ",", [re.sub(r"\\pm(?![A-Za-z])", sign, text) for sign in "+-"])
    ends = (word.start() for word in _START.finditer(text, 1) if _is_after_formula(text[word.start() :]))
    formula = stripped(text[: next(ends, None)])
    return None if _PROSE.search(formula) else Formula(latex(formula))


def _is_after_formula(text: str) -> bool:
    r"""Return whether a text is a unit, or ``\text{square units}``: upright words that deny and join nothing."""
    words = re.sub(r"\.|\^\{?[23]\}?", "", text)
    is_phrase = words[0] == UPRIGHT and words[2:3].isalpha() and _PHRASE.fullmatch(words)
    return bool(unit_of(text) or (is_phrase and not _NO_UNIT.search(words)))


def _bracketed(brackets: re.Match[str], numeric: bool) -> Value | None:
    left, inside, right = map(stripped, brackets.groups())
    kind, text, pieces = (left + right).replace("\\", ""), latex(left + inside + right), split(inside, "[,;]")[0]
    condition = split(inside, r"[|:]|\\mid(?![A-Za-z])")[0][1:] if left == r"\{" else []
    if len(condition) == 1:  # {x | x > 3}
        return _relation(condition[0], False)
    if len(pieces) > 1 or left == r"\{":
        return _items(text, kind, pieces)
    value = _single(inside, numeric) if left in "({" else None
    return value if isinstance(value, (Number, Items, Words)) or left == "{" else Formula(text)


def _items(text: str, kind: str, pieces: list[str], read_one: Callable[..., Value | None] = _single) -> Items | None:
    values = [read_one(piece, False) for piece in pieces] if len(pieces) <= MOST_ITEMS else [None]
    known = tuple(value for value in values if value is not None)
    return Items(text, kind, known) if len(known) == len(values) else None


def _number(text: str, numeric: bool) -> Number | None:
    if (found := _NUMBER.match(text)) is None or (size := _size(found)) is None:
        return None
    rest = stripped(text[found.end() :])
    unit = unit_of(rest, letters=numeric)
    if unit is None and (not _PHRASE.fullmatch(rest) or _NO_UNIT.search(rest)):
        return None
    is_negative = found["sign"] not in (None, "+") or found["inner"] is not None
    value = -size if is_negative else size
    above, below = value.as_integer_ratio()
    written = str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"
    if "." in (found["decimal"] or "") and not found["period"]:  # Math-Verify compares decimals with a tolerance
        written = f"{'-' * is_negative}{found['decimal']}\\times 10^{{{found['power'] or 0}}}"
    is_reducible = int(found["below"] or 0) > below
    unit = unit_of(found["money"] or "") or unit
    return Number(written, value, unit, bool(found["percent"]), int(found["base"] or 0), is_reducible)


def _size(found: re.Match[str]) -> Fraction | None:
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


def unit_of(text: str, *, letters: bool = False) -> Unit | None:
    """Return the unit that a normal text is, or None. With ``letters`` a bare m is a metre and no variable."""
    bare = set(_BARE.findall(text))
    text = re.sub(rf"[{{}}{UPRIGHT}]|\\cdot", " ", text).replace("^ ", "^").strip()
    if not text or not bare <= (_UNITS_WITHOUT_FONT if letters else set()):
        return None
    text = re.sub(r"^\^\\circ ?(C?)(F?)$", lambda m: "Celsius" if m[1] else "Fahrenheit" if m[2] else "degree", text)
    powers: dict[str, int] = {}
    factor, at, sign = Fraction(1), 0, 1
    while at < len(text):
        found = _FACTOR.match(text, at)
        name = found["name"] if found else ""
        name = name if name in UNITS or len(name) < 4 else name.lower().removesuffix("s")
        if found is None or name not in UNITS:
            return None
        sign = -1 if found["over"] else sign
        power = _POWERS.get(found["before"] or found["after"]) or int(found["power"] or 1)
        power *= -sign if found["sign"] else sign
        base, size = UNITS[name]
        powers[base], factor, at = powers.get(base, 0) + power, factor * size**power, found.end()
    return tuple(sorted(powers.items())), factor


def _date(text: str) -> Words | None:
    bare = re.sub(r"\b(?:th|st|nd|rd|of)\b|(?<=\d)(?:th|st|nd|rd)\b", "", text.lower())
    words = re.findall(rf"\d+|{_LETTERS}|[^\s,.{UPRIGHT}]", bare)
    months = [word for word in words if word.isalpha() and word[:3] in _MONTHS]
    numbers = [word for word in words if word.isdigit()]
    if len(months) != 1 or len(words) != 1 + len(numbers) or not 0 < len(numbers) < 3 or words[-1] in months:
        return None
    return Words(latex(text), ("date", *numbers[1:], months[0][:3], numbers[0]))


def inner(value: Value) -> Value:
    """Return the value of an equation, or of a set of one; any other value as it is."""
    if isinstance(value, Items) and len(value.items) == 1:
        return value.items[0]
    return value.value if isinstance(value, Equation) else value


def equal(label: Value, answer: Value, ask: Ask) -> bool | None:
    """Return whether an answer has the label's value; None if ``ask`` cannot tell."""
    names = {value.name for value in (label, answer) if isinstance(value, Equation)}
    if len(names) == 2 and set(map(len, names)) == {1}:  # x=5 and y=5
        return False
    if not any(isinstance(value, Formula) and value.is_relation for value in (label, answer)):
        label, answer = inner(label), inner(answer)
    if isinstance(label, Formula) and isinstance(answer, Number) and answer.unit:  # 5m, and 5 metres
        label = _number(label.text, True) or label
    if isinstance(label, Number):
        return isinstance(answer, Number) and _same_number(label, answer)
    if isinstance(label, Items) and isinstance(answer, Items):
        return _same_items(label, answer, ask)
    if isinstance(label, Words) and isinstance(answer, Words):
        return label.words == answer.words and (label.half == answer.half or "" in (label.half, answer.half))
    if label.text == answer.text:
        return True
    kinds, is_relation = {type(label), type(answer)}, _is_relation(label)
    is_vector = kinds == {Items, Formula} and r"\begin" in label.text + answer.text
    is_wrong = Words in kinds or is_relation != _is_relation(answer) or (Items in kinds and not is_relation)
    return False if is_wrong and not is_vector else ask(label.text, answer.text)


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
    is_like = is_unordered or len(kinds) == 1 or kinds in ({",", "()"}, {",", "[]"})
    if len(label.items) != len(answer.items) or not is_like:
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
    return latex(normal(text)).replace(" ", "")


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
