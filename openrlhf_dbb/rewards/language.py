"""Says which sentences beside an answer are read: those of English, Chinese and the languages of ``tables.toml``.

What is not understood is a doubt.
"""

import re

from openrlhf_dbb.rewards.foreign import has_english, is_doubted, languages
from openrlhf_dbb.rewards.notation import TABLES

IDEOGRAPH = r"[\u3400-\u9fff]"

_NOT_ENGLISH = set(TABLES["not_english"].split())
_ALONE = set(TABLES["alone"].split())
_ADVERBS = set(TABLES["adverbs"].split())
_PICTURES = set(TABLES["pictures"])
_BEFORE_ANSWER = set(TABLES["before_answer"].split())
_BEHIND_ANSWER = set(TABLES["behind_answer"].split())
_FEWEST_WORDS = 4  # of a sentence behind an answer that has no number
_FEWEST_SPOKEN = 6  # of one that speaks to somebody
_SPOKEN = re.compile(r"\b(?:let|i|me|my|you|your|it|something|hold|no|well)\b", re.IGNORECASE)
_MOST_UNITS = 6  # words behind an answer that need no verb: "eggs per day"
_MOST_NAMES = 3  # words before ":" in a language that is not known

_FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$\n]*\$|\\(?:begin|end)\{[^}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}(?:'[a-z]+)?")
_NAME_AND_VERB = re.compile(r"\W*[A-Z][a-z]+ [a-z]{3,}s\b")  # "John collects"
_OTHER_SCRIPT = re.compile(r"[\u0370-\u1dff\u3040-\u30ff\uac00-\ud7af]")
_MIXED_WORD = re.compile(r"[A-Za-z][\u0370-\u052f]|[\u0370-\u052f][A-Za-z]")  # n\u043et
_ACCENTED = re.compile(r"\b[a-z]*[\u00df-\u00f6\u00f8-\u024f\u1e00-\u1eff]")
# "allegedly", "Apparently"; not "Sally"
_ADVERB = re.compile(r"\b[a-z]{2,}ly\b|\b[A-Z][a-z]+(?:[ai]b|ed|ful|nt|al|iv|ous|ing)ly\b")
# "I guess", "I'd", "my friend"
_DEED = re.compile(
    rf"\bI(?:'[a-z]+|\s+(?!{'|'.join(TABLES['deeds'].split())})[a-z]+)\b"
    r"|\b[Mm]y\s+(?:friend|teacher|best|bet|guess|hunch|feeling|notes|book|model|score)\b"
)
_PICTURE = re.compile(r"[\u2600-\u27bf\U0001f000-\U0001faff]")
_OPEN_FORMULA = re.compile(r"(?:\$|\\\[|\\\()[^$]*\Z")
_NAMED = re.compile(r":\s*\Z")
_FORMULA_SIGN = re.compile(r"(?:=|\\in|\\equiv|\\approx)\s*\Z")


def without_formulas(text: str) -> str:
    """Return a text without what stands in dollars, and without commands of LaTeX."""
    return _FORMULA.sub(lambda formula: ". " if formula[0].endswith(".$") else " ", text)


def without_open_formula(text: str) -> str:
    """Return a text without its formulas, and without the one that does not end."""
    return _OPEN_FORMULA.sub(" ", without_formulas(text))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(without_formulas(re.sub(IDEOGRAPH, " ", text))))


def _is_english(text: str) -> bool:
    if _ACCENTED.search(re.sub(TABLES["accented"], "", text)):  # n\u00f3t
        return False
    return _NAME_AND_VERB.match(text) is not None or has_english(_words(text.lower()))


def _is_denied(text: str) -> bool:
    if _MIXED_WORD.search(text) or not _NOT_ENGLISH.isdisjoint(_words(text.lower())):
        return True
    return is_doubted(text)


def _may_stand_alone(text: str) -> bool:
    return _words(text.lower()) <= _ALONE


def is_odd(text: str) -> bool:
    """Return whether a text behind an answer says what no solution says, or doubts in Chinese."""
    return is_strange_deed(text) or is_chinese_doubt(text)


def is_chinese_doubt(text: str) -> bool:
    """Return whether a text has a sign that denies or doubts, but for words such as "different"."""
    plain = re.sub(TABLES["chinese_no_doubt"], "", text)
    return re.search(TABLES["chinese_doubt"], plain) is not None


def is_strange_deed(text: str) -> bool:
    """Return whether a text says what "I" do and no solution does, or has a picture other than a tick."""
    if not _PICTURES.issuperset(_PICTURE.findall(text)):
        return True
    return _DEED.search(text) is not None and not languages(without_formulas(text))  # Italian "I"


def is_strange_adverb(text: str) -> bool:
    """Return whether a text has an adverb that no solution has, as "allegedly"."""
    return not {adverb.lower() for adverb in _ADVERB.findall(text)} <= _ADVERBS


def is_plain_statement(clause: str) -> bool:
    """Return whether a clause, if it says "answer", says it as in "so we find that the final answer is"."""
    said = list(re.finditer(r"\banswers?\b", clause.lower()))
    if not said:
        return True
    before = _WORD.findall(clause[: said[-1].start()].lower().rpartition(" and ")[2])
    return set(before[-3:]) <= _BEFORE_ANSWER and _words(clause[said[-1].end() :]) <= _BEHIND_ANSWER


def is_read(before: str, answer: str, behind: str) -> bool:
    """Return whether the sentence of an answer is understood.

    Args:
        before: what stands before the answer in its sentence.
        behind: what stands behind it.
    """
    sentence = without_formulas(f"{before} {behind}")
    if _is_denied(sentence):
        return False
    if languages(sentence) or (_is_english(sentence) and not _OTHER_SCRIPT.search(sentence)):
        return True
    return _stands_alone(before, answer, behind)


def _stands_alone(before: str, answer: str, behind: str) -> bool:
    """Return whether only a name stands before an answer, as "Vastaus:" or "x =", and only its unit behind it."""
    is_named = _NAMED.search(before) is not None and len(before.split()) <= _MOST_NAMES
    is_named = is_named or _FORMULA_SIGN.search(before) is not None
    return (is_named or _may_stand_alone(before) or "=" in answer) and _are_units(behind)


def _are_units(behind: str) -> bool:
    units = re.sub(rf"{IDEOGRAPH}|{_PICTURE.pattern}", "", behind)
    return units.isascii() and len(_words(units)) <= _MOST_UNITS


def _is_remark(sentence: str) -> bool:
    """Return whether a sentence has no numbers and is too short, or speaks to somebody, as "Let us start over"."""
    if re.search(r"[\d$\\]", sentence):
        return False
    words = len(sentence.split())
    return words < _FEWEST_WORDS or (
        words < _FEWEST_SPOKEN and _SPOKEN.search(sentence) is not None
    )


def is_read_later(sentence: str) -> bool:
    """Return whether a sentence behind that of the answer is understood, and says nothing odd."""
    prose = without_formulas(sentence)
    if _is_denied(prose):
        return False
    is_remark = _is_remark(sentence)
    if languages(prose):
        return not is_remark and ("=" in sentence or re.search(r"\d", sentence) is None)
    if _OTHER_SCRIPT.search(prose) or is_odd(sentence):
        return False
    if _may_stand_alone(sentence) or sentence.strip() == "OR":  # another way follows
        return True
    return _is_english(sentence) and not is_remark
