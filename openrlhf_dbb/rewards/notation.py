r"""Writes a formula or a phrase in one way: LaTeX's, Unicode's and Python's ways to write a thing become one.

Words in an upright font (``\text{}``) begin with the character ``UPRIGHT`` each; other fonts are dropped.
"""

import re
import unicodedata
from pathlib import Path
from typing import Any

from openrlhf_dbb.toml_file import read_toml

TABLES = read_toml(Path(__file__).with_name("tables.toml"))
_SIGNS = dict(TABLES["signs"])
_COMMANDS = dict(TABLES["commands"])
UPRIGHT = "\x01"
FUNCTIONS = [
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "ln",
    "log",
    "exp",
    "arcsin",
    "arccos",
    "arctan",
    "pi",
]
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_DEEPEST = 100  # brackets in each other; reading takes the square of the depth

FONT = re.compile(
    r"\\(text[a-z]*|math[a-z]+|boldsymbol|bm|operatorname|emph|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_FONT_OR_BOX = re.compile(FONT.pattern.replace("emph", "emph|boxed|fbox|framebox"))
_UPRIGHT_FONTS = {"text", "textrm", "textbf", "textit", "texttt", "mathrm", "mbox", "operatorname"}
_LETTERS = re.compile(rf"(?<![{UPRIGHT}\\A-Za-z])(?!(?<=\d)[eE][+-]?\d)[A-Za-z]+")
_GROUPED = r"(?<![\d.,])\d{1,3}(?:(\{,\}|\\[,!]|, ?\\!\s*%s)\d{3})(?:\1\d{3})*(?!\d|,\d| ?/)|"
_DOTTED = r"(?<![\d.])\d{1,3}(?:\.\d{3}){2,}(?![\d.])"
_GROUPS = re.compile(_GROUPED % "|,| " + _DOTTED)
_GROUPS_IN_BRACKETS = re.compile(_GROUPED % "" + _DOTTED)
_DECIMAL_COMMA = re.compile(r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+|\d+),(\d{1,2})(?![\d,]|\.\d)")
_REWRITES: list[tuple[str, Any]] = [
    (
        r"\\(?:left|right|[bB]igg?[lr]?|(?:display|text)style|limits|(?i:large|huge)|small|bf)(?![A-Za-z])",
        "",
    ),
    (r"(?<!\\)(?:\\!|\$)|`|\b(?:np|math)\.(?=[a-z])", ""),
    (r"(?<=[\w)}]) ?\*\* ?(?:\((-?\w+)\)|(-?\w+))", r"^{\1\2}"),
    (r"(?:(?<!\\)\\(?:[,:;> ]|q?quad(?![A-Za-z]))|[\s~])+", " "),
    (r"\\(?:[A-Za-z]+|[%$])|[<>!]=", lambda found: _COMMANDS.get(found[0], found[0])),
    (r"(?<=\d)\.(?= ?[/*+)}-])", ""),  # 1./3
    (rf"(?<![{UPRIGHT}\\A-Za-z])({'|'.join(sorted(FUNCTIONS))})(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\{([^{}]*)\\over([^{}A-Za-z][^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\\binom ?(\d) ?(\d)", r"\\binom{\1}{\2}"),
    (
        r"\\frac ?(?:(\d|\\(?!frac|sqrt)[A-Za-z]+)(?= ?[\d{])|\{([^{}]*)\}) ?(?:(\d)|\{([^{}]*)\})",
        r"\\frac{\1\2}{\3\4}",
    ),
    (r"(?<![\w.}/^])(\d+) ?/ ?(\d+)(?![\w/(]|\.\d)", r"\\frac{\1}{\2}"),
    (r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?!\w|[{^]|\.\d)", r"\1\\times 10^{\2}"),
    (
        rf"(?<=[\d)]) ?(?:\\times|\\cdot|\*|{UPRIGHT}?x) ?10 ?\^ ?(?:(-?\d)|\{{([+-]?\d+)\}})",
        r"\\times 10^{\1\2}",
    ),
    (r"(?<=\d) x (?=\d)", r"\\times "),
    (r"(?<=\d) ?(?=\\binom)", r"\\cdot "),
]


def plain_signs(text: str) -> str:
    """Return a text with LaTeX or ASCII in place of Unicode's signs, digits, and letters of full width."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda raised: f"^{{{unicodedata.normalize('NFKC', raised[0])}}}", text)
    return "".join(
        char if char.isascii() else _SIGNS.get(char) or _compatible(char) for char in text
    )


def _compatible(char: str) -> str:
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    above, slash, below = unicodedata.normalize("NFKC", char).partition("\u2044")
    if slash:
        return rf"\frac{{{above}}}{{{below}}}"
    return above if len(above) == 1 else char


def normal(text: str, *, decimal_comma: bool = False) -> str:
    """Return a text in one notation, with single spaces. With ``decimal_comma``, 3,5 outside of brackets is 3.5."""
    if text.isdigit() and text.isascii():  # the most frequent answer
        return text
    text = re.sub(r"\b([apAP])\.\s?([mM])\b\.?", r"\1\2", plain_signs(text))
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)
    in_brackets = any(bracket in text for bracket in ("(", "[", r"\{"))
    if decimal_comma and not in_brackets:
        text = _DECIMAL_COMMA.sub(lambda found: f"{found[1].replace('.', '')}.{found[2]}", text)
    groups = _GROUPS_IN_BRACKETS if in_brackets else _GROUPS
    text = groups.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    while (bare := _FONT_OR_BOX.sub(_without_font, text)) != text:
        text = bare
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def _without_font(font: re.Match[str]) -> str:
    name, content = font.groups()
    is_upright = name in _UPRIGHT_FONTS and content not in ("i", "e", "d")
    return _LETTERS.sub(UPRIGHT + r"\g<0>", content) if is_upright else content


def squeezed(text: str) -> str:
    """Return a normal text whose spaces part digits or words."""
    return re.sub(r"(?<![^\W_]) | (?![^\W_])", "", text)


def latex(text: str) -> str:
    r"""Return a normal text as LaTeX, with its upright words in ``\text{}``."""
    return re.sub(rf"{UPRIGHT}([A-Za-z]*)", r"\\text{\1}", squeezed(text))


def split(text: str, at: str = "(?!)") -> tuple[list[str], list[str]]:
    """Return the pieces of a normal text and the signs between them, which ``at`` matches outside of brackets.

    There are no pieces if the brackets do not match, or are nested deeper than any answer.
    """
    pieces = []
    signs = []
    depth = 0
    start = 0
    for found in re.finditer(rf"({at})|\\begin\b|\\end\b|\\?[{{}}]|[()\[\]]|\\[A-Za-z]+|\\.", text):
        if found[1] is not None and not depth:
            pieces.append(text[start : found.start()])
            signs.append(found[1])
            start = found.end()
        depth += (found[0][-1] in "([{" or found[0] == r"\begin") - (
            found[0][-1] in ")]}" or found[0] == r"\end"
        )
        if not 0 <= depth <= _DEEPEST:
            break
    return (
        ([stripped(piece) for piece in [*pieces, text[start:]]], signs) if not depth else ([], [])
    )


def stripped(text: str) -> str:
    """Return a text without the spaces and the punctuation at its ends."""
    return text.lstrip().rstrip(" .,;:")
