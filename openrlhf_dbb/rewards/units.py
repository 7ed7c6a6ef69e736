"""Units after a number: powers of base units with a factor. A word that is no unit here is no unit."""

import re
from fractions import Fraction

from openrlhf_dbb.rewards.notation import UPRIGHT

# In a line, units with the base of its first one: the factor, then the unit's names.
_TABLE = """1 m meter metre, 0.01 cm centimeter centimetre, 0.001 mm millimeter millimetre, 1e-9 nm nanometer, \
1000 km kilometer kilometre, 0.0254 in inch inche, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile
1 s sec second, 0.001 ms millisecond, 60 min minute, 3600 h hr hour, 86400 day, 604800 week
1 month, 12 year yr
1 g gram, 1000 kg kilogram, 0.001 mg milligram
1 lb pound, 0.0625 oz ounce
1 L l liter litre, 0.001 mL ml milliliter
1 dollar $ USD, 0.01 cent
1 J joule, 1000 kJ kilojoule
1 W watt, 1000 kW kilowatt, 1e6 MW megawatt
1 Hz hertz, 1000 kHz kilohertz, 1e6 MHz
1 eV, 1000 keV, 1e6 MeV
1 degree deg|1 rad radian|1 N newton|1 V volt|1 A ampere|1 Pa pascal|1 K kelvin|1 mol mole|1 erg|1 Celsius
1 Fahrenheit|1 \u20ac euro EUR|1 \u00a3 GBP|1 \u00a5 yen"""
UNITS = {
    name: (line.split()[1].rstrip(","), Fraction(factor))
    for line in re.split(r"[|\n]", _TABLE)
    for factor, *names in (unit.split() for unit in line.split(", "))
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
