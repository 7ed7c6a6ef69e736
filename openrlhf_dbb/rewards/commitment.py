"""Says whether a response stands by the answer at a place of its text. The words stand in ``tables.toml``, by kind."""

import re
import unicodedata

from openrlhf_dbb.rewards.notation import TABLES

_CHINESE = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Chinese, Japanese, Korean: written without spaces


def _words(*kinds: str) -> str:
    """Return an expression that matches the words of some kinds; those of Chinese also within a row of letters."""
    words = sorted((word for kind in kinds for word in TABLES["words"][kind]), key=len, reverse=True)
    escaped = [re.escape(word).replace(r"\ ", r"\s+") for word in words]
    spaced = "|".join(word for word in escaped if re.match(rf"[^\W{_CHINESE}]", word))
    others = "".join(f"|{word}" for word in escaped if not re.match(rf"[^\W{_CHINESE}]", word))
    return rf"(?:(?<![^\W{_CHINESE}])(?:{spaced})(?![^\W{_CHINESE}]){others})"


_END = re.compile(r"[.!?](?=\s|\Z)|[\u3002\uff01\uff1f\n]|<answer>|</answer>")
_CLAUSE = re.compile(r"[,;.!?](?=\s|\Z)|[\n\uff0c\u3002\uff1b\uff01\uff1f\u3001]")
_MARKUP = re.compile(r"\\(?:boxed|fbox|framebox|text[a-z]*|math[a-z]+)\s*\{|\\[()\[\],;! ]|[$*_{}`]")
_VERB = r"(?:is|are|was|were|be|equals?)"
# "the correct answer is", "it's", "x ="
_SUBJECT = (
    rf"(?:{_VERB}\s+(?=(?:it|this|that)\s))?"
    r"(?:(?:that|whether|if|when)\s+)?(?:(?:the|my|your|its|a)\s+)?(?:(?:final|correct|right|true)\s+)?"
    r"(?:it|this|that|there|answer|result|solution|value|[a-z])(?:'s|\s+(?:would\s+|could\s+|can\s+)?"
    rf"{_VERB}|\s*=)?(?:\s+equal\s+to)?[\s:]*"
)
_GOVERNING = _words("denial", "wrong", "condition")
# "not 5", "cannot be 5", "nobody would say that the answer is 5"; not "not prime is 5", "not 6 but 5"
_DENIED_BEFORE = re.compile(
    rf"(?:{_GOVERNING}|n't)[\s:]*(?:be\s+)?(?:equal\s+to\s+)?"
    rf"(?:(?!(?:but|rather|yet|so|then|{_VERB}|equals)\b)[^\W\d_{_CHINESE}][^\W\d_]*'?[a-z]*\s+){{0,3}}(?:{_SUBJECT})?\(?\Z"
    rf"|{_words('hedge')}\s+(?:(?!{_VERB})[a-z]+\s+)?\(?\Z"
    rf"|{_GOVERNING}(?<=[{_CHINESE}])[{_CHINESE}\s:\uff1a]{{0,6}}\Z"
    rf"|(?:{_words('bound', 'exception')}|[<>\u00ac+/^]|\\(?:times|cdot|div)"
    rf"|\\[lg]eq?|\\neg?|\\lnot)[\s({_CHINESE}]{{0,3}}\Z",
    re.IGNORECASE,
)
_ASIDE = re.compile(rf"(?<=\w )(?<!is )(?<!are )(?<!be )(?<!lies ){_words('bound')}\s*\Z", re.IGNORECASE)
_BE = (
    r"(?:is|are|was|were|would be|should be|seems?|feels|looks|can|could|does|must|as|ist|n'est|est|es"
    r"|\u662f|\u3067\u306f|\uac00|\uc774)"
)
# "5 is wrong", "5 is a wrong answer", "5 is not it", "5 or more", "5 --> 6", "5 \times"; not "5, not 6"
_DENIED_AFTER = re.compile(
    rf"[\s)}}\]]*(?:(?:{_BE}\s*(?:[a-z]+ly\s+)?)?[\u3041-\u309f]{{0,3}}?"
    rf"(?:{_words('denial', 'wrong', 'bound_after', 'hedge')}|n't\b)(?!\W*\d)"
    rf"|{_BE}\s+(?:[^\W\d_]+\s+){{0,2}}{_words('wrong', 'uncertain')}|\\neq?(?![a-z])|\u2260|-+>|\u2192"
    r"|\\(?:times|cdot|div)(?![a-z])|[-+/^]\s*[\d\\]|[+/^]\s*\Z)",
    re.IGNORECASE,
)
# "which is wrong", "this answer is a mistake", "it cannot be right"; not "this is not a prime"
_CALLED_WRONG = (
    rf"\b(?:and|which|it|this|that|answer|result|solution|box|number|value)(?:\s+above)?(?:'s|\s+{_BE})\s*"
    rf"(?:(?:[a-z]+\s+)?too\s+\w|(?:[^\W\d_]+\s+){{0,2}}{_words('wrong')}"
    r"|(?:n't|not|never)\s+(?:be\s+)?(?:right|correct|true|it|so|valid|possible|sure|check|work|fit|hold|satisfy|meet|make\s+sense|the\s+(?:\w+\s+)?answer)\b)"
)
_ASKED = re.compile(r"\s*[?\uff1f]")
_NO_DOUBT = r"(?<!\bno )(?<!without )"
_FIRST_PERSON = r"\bI\s+(?:do\s+not|don't|cannot|can't|disagree)\b|\b(?:do\s+not|don't)\s+(?:trust|believe|use)\b"
# "If it were so, it would be"; a word with letters of two alphabets
_UNREAL = rf"(?:{_words('condition')}|\A\s*(?:were|had)\b).*,.*\b(?:it|that|this|answer)\s+would\s+be[\s:]*\Z"
_MIXED = r"[a-z][\u0400-\u04ff]|[\u0400-\u04ff][a-z]"
_DOUBT = re.compile(rf"{_NO_DOUBT}{_words('doubt')}|{_UNREAL}|{_MIXED}", re.IGNORECASE | re.DOTALL)
_WRONG = re.compile(rf"{_words('wrong')}|{_FIRST_PERSON}", re.IGNORECASE)
_REST = re.compile(
    rf"{_NO_DOUBT}{_words('doubt', 'correction')}|\bno(?:[,.!]|\s\d|\s*\Z)|{_CALLED_WRONG}|{_FIRST_PERSON}",
    re.IGNORECASE,
)
_LATER = re.compile(
    rf"{_NO_DOUBT}{_words('doubt', 'correction')}|{_CALLED_WRONG}"
    rf"|(?:\A|[.!?\n])\s*(?:no|{_words('wrong')})\b(?=[.!,]|\s*\Z)",
    re.IGNORECASE,
)
CORRECTION = re.compile(rf"{_words('correction', 'wrong', 'denial')}|actually|\bno\b", re.IGNORECASE)
RESTART = re.compile(rf"{_words('correction')}|\bno[,.!]", re.IGNORECASE)
OR_BEFORE = re.compile(rf"[\s$]*{_words('alternative')}[\s$\\(\[{{*]*\Z", re.IGNORECASE)
OR_AFTER = re.compile(rf"[\s$\\)\]}}*,(]*{_words('alternative')}", re.IGNORECASE)
# A comment of LaTeX, HTML or Markdown, a mark of a footnote, and a quotation with an answer in it.
_HIDDEN = re.compile(
    r"^[ \t]*%[^\n]*|(?<=\s)%\s*(?=\\boxed)[^\n]*|<!--.*?(?:-->|\Z)|\\iffalse.*?(?:\\fi|\Z)"
    r"|\\begin\{comment\}.*?(?:\\end\{comment\}|\Z)"
    r"|~~[^~\n]{0,400}~~|\\(?:sout|[bx]?cancel|[hv]?phantom)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
    r"|<(s|del|strike)>.*?(?:</\1>|\Z)|^\[//\]:[^\n]*|\[\^\w+\]:?"
    r"|(?<!\w)['\"\u201c\u201e\u2018\u00ab\u300c](?![\s.,])(?=[^\"\u201d\u00bb\u300d]{0,400}(?:\\boxed|answer\s+is\s))"
    r"[^\n]{0,400}?['\"\u201d\u201c\u2019\u00bb\u300d](?!\w)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def visible(text: str) -> str:
    """Return a response without invisible characters, comments and quoted answers; one that is a quotation stays."""
    if not text.isascii():
        text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    if re.fullmatch(r"[\"\u201c][^\"\u201d]*[\"\u201d]", text):
        return text[1:-1]
    return _HIDDEN.sub("", text)


def sentence_before(text: str, start: int) -> str:
    """Return what stands in the sentence before a place, without markup."""
    before = text[max(0, start - 600) : start]
    ends = [found.end() for found in _END.finditer(before)]
    return _MARKUP.sub("", before[ends[-1] if ends else 0 :])


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether its own sentence denies, doubts, bounds or asks for the answer at a place."""
    sentence = sentence_before(text, start)
    clauses = [found.end() for found in _CLAUSE.finditer(sentence)]
    clause = sentence[clauses[-1] if clauses else 0 :]
    if text.startswith("\\", start):  # a box
        clause = _ASIDE.sub("", clause)  # "so she must score at least \boxed{9} points"
    if _DENIED_BEFORE.search(clause) or _DOUBT.search(sentence):
        return True
    after = _MARKUP.sub("", text[end : end + 600])
    stop = _END.search(after)
    rest = after[: stop.start() if stop else None]
    is_question = stop is not None and _ASKED.match(after, stop.start()) is not None
    return is_question or _DENIED_AFTER.match(rest) is not None or _REST.search(rest) is not None


def is_taken_back(text: str, end: int) -> bool:
    """Return whether what stands behind an answer takes it back; a box by any such word in its paragraph."""
    paragraph = text[end:].partition("\n\n")[0]
    if text.endswith("}", 0, end) and _WRONG.search(_MARKUP.sub("", paragraph)):
        return True
    stop = _END.search(text, end)
    return stop is not None and _LATER.search(_MARKUP.sub("", text[stop.end() :])) is not None


def is_affirmed(text: str, start: int, end: int) -> bool:
    """Return whether neither its own sentence nor what follows denies the answer at a place."""
    return not is_denied(text, start, end) and not is_taken_back(text, end)
