"""Reads sentences in the languages of ``tables.toml``, beside English and Chinese."""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from openrlhf_dbb.rewards.notation import TABLES

_ENGLISH = set(TABLES["english"].split())
_ENGLISH_FORM = re.compile(r"[a-z]{3,}(?:ed|ing)")
# ASCII but letters and "'", and the marks of Spanish, French, Arabic, Hindi and Japanese
_NO_WORD = re.compile(
    r"[\s!-&(-@\[-`{-~\u00a1\u00ab\u00bb\u00bf\u060c\u061b\u061f\u0964\u2010-\u2015\u201c-\u203a"
    r"\u3001-\u3011\uff01\uff08\uff09\uff0c\uff1a\uff1f]+"
)
_VARIABLE = re.compile(r"(?<![^\W\d_])[a-z](?=\s?[(=^_+])")
_OPENING_NO = re.compile(r"\A\W*no\s*[,:;]", re.IGNORECASE)  # takes back what stands before it
# Of the words of a sentence, but for names, in a language that has no letters of its own
_FEWEST_COMMON = 0.4


@dataclass(frozen=True)
class Language:
    """What is known of a language.

    Attributes:
        letters: an expression for those that it alone has; one that matches nothing for Latin ones.
        common: its commonest words; empty if it has letters.
        doubt: words that deny or doubt, with a space where a word has to begin or end.
    """

    letters: str
    common: frozenset[str]
    doubt: list[str]


def _language(table: dict[str, str]) -> Language:
    doubt = " ".join(table["doubt"].split()).split(", ")
    marked = [f" {word} ".replace("* ", "").replace(" *", "") for word in doubt]
    return Language(
        f"[{table['letters']}]" if "letters" in table else "(?!)",
        frozenset(table.get("common", "").split()),
        marked,
    )


_LANGUAGES = [_language(table) for table in TABLES["languages"].values()]
ANSWER_NOUNS = "|".join(
    table["answer"].replace(", ", "|") for table in TABLES["languages"].values()
)


def _words(text: str) -> list[str]:
    """Return the words of a text; "l'eau" is two."""
    words = _VARIABLE.sub(" ", unicodedata.normalize("NFC", text))
    return _NO_WORD.sub(" ", words.replace("'", "' ")).split()


def has_english(words: Iterable[str]) -> bool:
    """Return whether any of some words, in lower case, is English."""
    return any(word in _ENGLISH or _ENGLISH_FORM.fullmatch(word) for word in words)


def languages(text: str) -> list[Language]:
    """Return the languages that a text without formulas is likelier in than in English; none for Chinese."""
    words = _words(text.lower())
    written = [language for language in _LANGUAGES if re.search(language.letters, text)]
    if written:
        return [] if has_english(words) else written
    english = [word for word in words if has_english([word])]
    without_names = [word for word in _words(text) if word[0].islower()]
    return _likeliest(words, max(len(english) + 1, _FEWEST_COMMON * len(without_names)))


def _likeliest(words: list[str], fewest: float) -> list[Language]:
    """Return the languages that have the most of some words in common, and no fewer than ``fewest``."""
    counts = [len(language.common.intersection(words)) for language in _LANGUAGES]
    likely = zip(_LANGUAGES, counts, strict=True)
    return [language for language, count in likely if count >= max(fewest, *counts)]


def is_doubted(text: str) -> bool:
    """Return whether a text without formulas denies or doubts in its language; if none is known, in any."""
    text = _OPENING_NO.sub("", text)
    words = _words(text.lower())
    likely = languages(text)
    if not likely and not has_english(words):
        likely = _LANGUAGES
    spaced = f" {' '.join(words)} "
    return any(word in spaced for language in likely for word in language.doubt)
