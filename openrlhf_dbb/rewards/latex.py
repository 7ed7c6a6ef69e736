"""LaTeX and numbers in one notation, so that equal answers are mostly equal texts; no mathematics is done."""

from __future__ import annotations

import re

# 4.5e33: Math-Verify reads it as 4.5 times e times 33.
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([+-]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([+-]?\d{1,4})(?![\w.])")
_NUMPY = re.compile(r"(?<![\w\\])(?:np|math)\.(sin|cos|tan|arcsin|arccos|arctan|exp|log|pi)\b")
_NUMPY_ROOT = re.compile(r"(?<![\w\\])(?:np|math)\.sqrt\(([^()]*)\)")

_DOLLAR = re.compile(r"\\?\$")
_DROPPED = re.compile(r"\\(?:left|right|[bB]igg?|displaystyle|q?quad)(?![A-Za-z])|\\[,;:!> ]|[\s$~]")
_WITH_UNIT = re.compile(
    r"((?:[^A-Za-z\\]|\\[,;:! ]|\\(?:[dt]?frac|sqrt|times|cdot|pi)(?![A-Za-z]))*[\d}])"  # a value without variables
    r"(?:\\[,;: ]|[\s~])*\\(?:text|textrm|mathrm|operatorname)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?"
)
_FONT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|boldsymbol|operatorname|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,!])\s*(?=\d{3}(?!\d))")
_PLAIN_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"([+-]?)0*(\d+?)(?:\.(\d*?)0*)?")
_NAME_AND_EQUALS = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?=(?!=)")
MINUS = "\u2212"
_SAME = {
    MINUS: "-",
    "\u2013": "-",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u00b0": r"^\circ",
    "\u03c0": r"\pi ",
}


def latex_signs(text: str) -> str:
    """Unicode minus (also the en dash), times, dot, degree and pi, in LaTeX."""
    for sign, latex in _SAME.items():
        text = text.replace(sign, latex)
    return text


def as_latex(text: str) -> str:
    r"""A formula in LaTeX, whose numbers and functions may be in Python notation.

    Example:
        >>> as_latex("4.5e33"), as_latex("np.arcsin(10/13)")
        ('4.5 \\times 10^{33}', '\\arcsin(10/13)')
    """
    text = _NUMPY_ROOT.sub(r"\\sqrt{\1}", _NUMPY.sub(r"\\\1", text))
    return _SCIENTIFIC.sub(lambda number: rf"{number[1]} \times 10^{{{int(number[2])}}}", text)


def number(text: str) -> str | None:
    """A decimal number without redundant signs and zeros; None if ``text`` is not a number.

    Example:
        >>> number("+007"), number("-1,234.50"), number("-0"), number("3 m")
        ('7', '-1234.5', '0', None)
    """
    text = latex_signs(text).strip()
    if _PLAIN_THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    found = _NUMBER.fullmatch("0" + text if text.startswith(".") else text)
    if found is None:
        return None
    digits = found[2] + (f".{found[3]}" if found[3] else "")
    return "-" + digits if found[1] == "-" and digits != "0" else digits


def normal(text: str) -> str:
    r"""Return LaTeX without what is irrelevant: spaces, sizes, fonts, units after a value, a name before ``=``.

    Example:
        >>> normal(r"x = \dfrac{1}{2} \text{ cm}"), normal(r"\left( 0, \, 1 \right]"), normal("1{,}000.0")
        ('1/2', '(0,1]', '1000')
    """
    text = as_latex(latex_signs(text).strip().rstrip("."))
    text = _THOUSANDS.sub("", _DOLLAR.sub("", text)).replace(r"\%", "%")
    name = _NAME_AND_EQUALS.match(text.replace(" ", ""))
    if name:
        text = text.split("=", 1)[1]
    value = _WITH_UNIT.fullmatch(text.strip())
    text = squeezed(value[1] if value else text)
    return number(text) or text


def squeezed(text: str) -> str:
    r"""Return LaTeX without spaces, sizes and fonts, with short fractions as ``1/2``; units and names stay.

    Example:
        >>> squeezed(r"Simplify $\dfrac{12}{24}$ m")
        'Simplify12/24m'
    """
    return _DROPPED.sub("", _FRACTION.sub(_fraction, _FONT.sub(r"\1", latex_signs(text))))


def _fraction(found: re.Match[str]) -> str:
    above, below = (found[1] or found[2] or "").strip(), (found[3] or found[4] or "").strip()
    return f"{above}/{below}" if re.fullmatch(r"-?\w+ \w+", f"{above} {below}") else rf"\frac{{{above}}}{{{below}}}"
