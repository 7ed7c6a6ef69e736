"""The letter of the option, or the words, that a response settles on.

The last statement counts: a box, "the answer is ...", "option ... is correct"; without one, a letter alone on the last
line or in parentheses at its end. Several letters, "(A) or (B)", are not an answer. MMLU-Pro takes the first statement.
"""

import re

from openrlhf_dbb.rewards.answers import SAID_CHARACTERS, STATEMENT, TAIL_CHARACTERS, boxes
from openrlhf_dbb.rewards.notation import FONT

LETTERS, ALPHABET = "ABCDEFGHIJ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # MMLU-Pro has up to ten options
_PAIRS = (("yes", "no"), ("true", "false"), ("valid", "invalid"))

_PRAISED = re.compile(
    r"(?:\b(?:option|choice|answer)\s+(?:\(?([A-Z])\)?)|\(([A-Z])\))\s+is\s+(?:the\s+)?(?:correct|right|best)\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\*\*|__|\\[()\[\]]|[$`*]")
_ADVERB = r"(?:(?:most\s+likely|likely|probably|clearly|thus|therefore|indeed|actually|definitely)\s*,?\s+)?"
_NOT_BUT = r"(?:not\s+(?:option\s+)?\(?[A-Z]\)?\s*,?\s*(?:but|rather)\s+)?"
_NOUN = r"(?:(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:option|choice|letter|answer)\s*(?:is\s+|:\s*)?)?"
_LETTER = re.compile(rf"\W*?{_ADVERB}{_NOT_BUT}{_NOUN}\(?\s*([A-Z])(?!'?\w)\s*(\))?", re.IGNORECASE)
_X = r"\s*(?:(?i:option|choice)\s+)?\(?[A-Z]\)?(?!'?\w)"
_CLAUSE = r"(?!\s+(?!and\b|or\b)[a-z])"  # as in "B, A is wrong"
_SECOND = re.compile(rf"\s*(?:,?\s*(?i:or)\b{_X}|(?:,?\s*(?i:and)\b|[/&,;]){_X}{_CLAUSE})")
_ENDS = re.compile(r"\s*(?:[.:),;!?\]]|$)")
_LONE = re.compile(r"\W*([A-Z])\W*", re.IGNORECASE)
_AT_THE_END = re.compile(r"(?<!or )(?<!and )(?<!/)(?<!\), )\(([A-Z])\)[\s.!]*$", re.IGNORECASE)
_LATEX_SPACE = re.compile(r"\\(?:q?quad|space|displaystyle|left|right)(?![a-z])|\\[ ,;:!\\]|~")
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_DENIALS = {"not", "no", "never", "or", "nor", "neither", "isn't", "than"}


def letter(response: str, letters: str = LETTERS) -> str | None:
    """Return the letter that a response settles on; None if it names none, or several."""
    text = _plain(response)
    said = [settled for each in _stated(text) if (settled := _settled(*each, letters)) is not None]
    if said:
        return said[-1] or None
    found = _LONE.fullmatch(last_line(text)) or _AT_THE_END.search(last_line(text))
    return found[1].upper() if found and found[1].upper() in letters else None


def words(response: str, label: str) -> str | None:
    """Return the last words that a response states as its answer, in lower case; for a label as yes, yes or no."""
    text = _plain(response)
    pair = next((pair for pair in _PAIRS if label.lower() in pair), ())
    size, right = len(label.split()), _WORD.findall(label)
    for said, is_boxed in reversed(_stated(text) or [(last_line(text), False)]):
        found = _WORD.findall(said.lower())
        if pair:
            found = [word for word in found[:1] + found[-1:] if word in pair and "not" not in found][:1]
        elif not is_boxed and right == found[-size:] and not _DENIALS & set(found[:-size][-1:]):  # the function is odd
            found = right
        if found:
            return " ".join(found)
    return None


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _plain(text: str) -> str:
    while (bare := FONT.sub(r"\2", text)) != text:  # \textbf{\text{B}}
        text = bare
    return _MARKUP.sub("", _LATEX_SPACE.sub(" ", text))


def _stated(text: str) -> list[tuple[str, bool]]:
    """Return in order what is said after "the answer is" on its line, and, with True, in boxes that are not long."""
    found = [(start, (text[start:end], True)) for start, end in boxes(text) if end - start <= TAIL_CHARACTERS]
    for statement in STATEMENT.finditer(text):
        line = text[statement.end() : statement.end() + SAID_CHARACTERS].lstrip().split("\n", 1)[0].strip()
        if line and not line.startswith("\\boxed"):
            found.append((statement.end(), (line, False)))
    found += [(praised.end(), (praised[1] or praised[2], False)) for praised in _PRAISED.finditer(text)]
    return [said for _, said in sorted(found, key=lambda place: place[0])]


def _settled(said: str, is_boxed: bool, letters: str) -> str | None:
    """Return the letter of a statement; "" if it names several letters, None if it names no letter."""
    found = _LETTER.match(said)
    if found is None or found[1].upper() not in letters:
        return None
    rest = said[found.end() :]
    if _SECOND.match(rest):
        return ""
    # "A lone pair" in a box is an option's text; so are "a lone pair" and "I think" in a sentence, not "B because".
    is_text = (is_boxed or found[1] in "aiI") and not found[2] and not _ENDS.match(rest)
    return None if is_text else found[1].upper()
