"""The letter of the option that a response settles on.

The last statement counts: a box, "the answer is ...", "option ... is correct". Letters elsewhere are words ("A", "I")
or options under discussion; without any statement, only a letter alone on the last line counts, or one in parentheses
at its end. A statement with several letters, "(A) or (B)", is not an answer.
"""

from __future__ import annotations

import re

from openrlhf_dbb.evaluation.verifiers.statements import Said, Verdict, last_line, plain, stated

LETTERS = "ABCDEFGHIJ"  # MMLU-Pro has up to ten options

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


def verify(response: str, label: str, letters: str = LETTERS) -> Verdict:
    """Return whether the response settles on the label's letter; its answer is None if it names none, or several.

    Example:
        >>> [verify(text, "B").answer for text in ("It is not (A). The answer is B.", "A dog barks.", "(A) or (B)")]
        ['B', None, None]
    """
    text = plain(response)
    said = [settled for statement in stated(text) if (settled := _settled(statement, letters)) is not None]
    if said:
        answer = said[-1] or None
    else:
        line = last_line(text)
        found = _LONE.fullmatch(line) or _AT_THE_END.search(line)
        answer = found[1].upper() if found and found[1].upper() in letters else None
    return Verdict(float(answer == label), answer)


def _settled(said: Said, letters: str) -> str | None:
    """Return the letter of a statement; "" if it names several letters, None if it names no letter."""
    found = _LETTER.match(said.text)
    if found is None or found[1].upper() not in letters:
        return None
    rest = said.text[found.end() :]
    if _SECOND.match(rest):
        return ""
    alone = found[2] is not None or _ENDS.match(rest) is not None
    # "A lone pair" in a box is an option's text; so are "a lone pair" and "I think" in a sentence, not "B because".
    may_be_a_word = said.boxed or found[1] in "aiI"
    return None if may_be_a_word and not alone else found[1].upper()
