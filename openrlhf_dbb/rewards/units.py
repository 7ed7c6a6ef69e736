"""Units after a number: powers of base units with a factor. A word that is no unit here is no unit."""

import re
from fractions import Fraction

from openrlhf_dbb.rewards.notation import TABLES, UPRIGHT

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

Unit = tuple[tuple[tuple[str, int], ...], Fraction]
"""Powers of base units, sorted, and the factor to them."""


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
