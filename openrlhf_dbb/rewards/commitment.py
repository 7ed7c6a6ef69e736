"""Says whether a response stands by the answer at a place of its text. The words stand in ``tables.toml``, by kind.

What is not understood is a doubt, and an answer in doubt is none: a sentence in another language, an adverb or a deed
of the writer that no table has, a command around the answer that is no font.
"""

import re
import unicodedata

from openrlhf_dbb.rewards.notation import TABLES

_CHINESE = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Chinese, Japanese, Korean: written without spaces
_IDEOGRAPHS = r"[\u3400-\u9fff]"


def _words(*kinds: str) -> str:
    """Return an expression that matches the words of some kinds; those of Chinese also within a row of letters."""
    words = sorted((word for kind in kinds for word in TABLES["words"][kind]), key=len, reverse=True)
    escaped = [re.escape(word).replace(r"\ ", r"\s+") for word in words]
    spaced = "|".join(word for word in escaped if re.match(rf"[^\W{_CHINESE}]", word))
    others = "".join(f"|{word}" for word in escaped if not re.match(rf"[^\W{_CHINESE}]", word))
    return rf"(?:(?<![^\W{_CHINESE}])(?:{spaced})(?![^\W{_CHINESE}]){others})"


_ENGLISH = set(TABLES["english"].split())
_NOT_ENGLISH = set(TABLES["not_english"].split())
_ALONE = set(TABLES["alone"].split())
_ADVERBS = set(TABLES["adverbs"].split())
_DEEDS = "|".join(TABLES["deeds"].split())
_MOST_UNITS = 6  # words behind an answer that need no verb: "eggs per day"
_MOST_IDEOGRAPHS = 12  # behind the sentence of an answer
_FORMULA = re.compile(r"\$[^$\n]*\$|\\(?:begin|end)\{[^}]*\}|\\[A-Za-z]+")
_LETTERS = re.compile(r"[^\W\d_]{2,}(?:'[a-z]+)?")
_OTHER_SCRIPT = re.compile(r"[\u0400-\u1dff\u3040-\u30ff\uac00-\ud7af]")
# "allegedly", "Apparently"; not "Sally"
_ADVERB = re.compile(r"\b[a-z]{2,}ly\b|\b[A-Z][a-z]+(?:[ai]b|ed|ful|nt|al|iv|ous|ing)ly\b")
_SYMBOL = re.compile(r"[\u2600-\u27bf\U0001f000-\U0001faff](?<![\u2705\u2713\u2714\u2728\U0001f389\U0001f44d\U0001f60a])")
_ENGLISH_FORM = re.compile(r"[a-z]{3,}(?:ed|ing)")
_NAMED = re.compile(r"(?:=|\\in|\\equiv|\\approx)\s*\Z")
_DEED = re.compile(rf"\bI(?:'m|'d|'ve|'ll|\s+(?!{_DEEDS})[a-z]+)\b|\bmy\s+(?!(?:final\s+)?(?:answer|result|solution))")
_NO_COMPOUND = "不同(?!意)|不等|不重|不超|不小|不大|不少|不足|非负|非零|没有|无理|无限|无数|若干|假设"
_CHINESE_DOUBT = re.compile("[不没非未别勿否错误假疑猜吗呢谁]|可能|也许|或许|大概|好像|似乎|估计|仅供|参考|随便|更正|改为|修正")
_CLOSING = re.compile(
    r"(?:\A|(?<=[.!?\n]))\s*(?:please\s+)?(?:let\s+me\s+know|feel\s+free|i\s+hope|hope|would\s+you|do\s+you|if\s+you)"
    r"\b[^.!?\n]*(?:[.!?\n]|\Z)",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(
    r"\b(?:plus|minus|and|or|the|an?|to|of|then|we|because|so|but|which|that|if|by|with|for|from|is|are|since)"
    r"[\s$]*\Z|[-+*/=(,]\s*\Z",
    re.IGNORECASE,
)
_OPEN_BRACE = re.compile(r"(\\(?:text[a-z]*|math[a-z]+|boldsymbol|bm|underline|emph|boxed|fbox|framebox)\s*)?\{|\\.|\}")
_BEFORE_BOX = re.compile(
    r"(?:\\not\s*=|[-<>+*/^_|]|(?<!\\)\(|\\(?!(?:approx|implies|iff|Rightarrow|Longrightarrow|therefore|q?quad|in|equiv|displaystyle"
    r"|Large|large|Huge|huge|text|to|Leftrightarrow|boldsymbol|mathbf|begin|left|big|Big)(?![a-z]))[A-Za-z]+)\s*\Z"
)
_AFTER_BOX = re.compile(
    r"\s*(?:=\s*-?[\d.]+\s*(?:[$\s.,]|\\\]|\Z)|[-+*/<>^_]\s*(?!\\circ|\{\\circ|[23{ ]*\\text)[^\s$)]|\\(?:times|cdot|div|pm|oplus|le|ge|lt|gt|neq?|to)"
    r"(?![a-z]))"
)
_END = re.compile(r"(?<!\bDr)(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\b[Ee]\.g)(?<!\b[Ii]\.e)[.!?](?=\s|\Z)|[\u3002\uff01\uff1f\n]|<answer>|</answer>")
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
    rf"(?:{_GOVERNING}|n't)[\s:]*(?:(?:to\s+)?be\s+)?(?:equal\s+to\s+)?"
    rf"(?:(?!(?:but|rather|yet|so|then|{_VERB}|equals)\b)[^\W\d_{_CHINESE}][^\W\d_]*'?[a-z]*\s+){{0,3}}(?:{_SUBJECT})?\(?\Z"
    rf"|{_words('hedge')}\s+(?:(?!{_VERB})[a-z]+\s+)?\(?\Z"
    rf"|(?:{_words('bound', 'exception')}|[<>\u00ac+/^]|\\(?:times|cdot|div)"
    rf"|\\[lg]eq?|\\neg?|\\lnot)[\s({_CHINESE}]{{0,3}}\Z",
    re.IGNORECASE,
)
_ASIDE = re.compile(rf"(?<!\bone )(?<=\w )(?<!is )(?<!are )(?<!be )(?<!lies ){_words('bound')}\s*\Z", re.IGNORECASE)
_BE = (
    r"(?:is|are|was|were|would be|should be|seems?|feels|looks|can|could|does|must|as|ist|n'est|est|es"
    r"|\u662f|\u3067\u306f|\uac00|\uc774)"
)
# "5 is wrong", "5 is a wrong answer", "5 is not it", "5 or more", "5 --> 6", "5 \times"; not "5, not 6"
_DENIED_AFTER = re.compile(
    rf"[\s)}}\]]*(?:(?:{_BE}\s*(?:[a-z]+ly\s+)?)?[\u3041-\u309f]{{0,3}}?"
    rf"(?:{_words('denial', 'wrong', 'bound_after', 'hedge')}|n't\b)(?!\W*\d)"
    rf"|{_BE}\s+(?:[^\W\d_]+\s+){{0,2}}{_words('wrong', 'uncertain')}|\\neq?(?![a-z])|\u2260|-+>|\u2192"
    r"|\\(?:times|cdot|div)(?![a-z])|[-+/^\u2013]\s*[\d\\]|[+/^]\s*\Z"
    r"|(?:plus|minus|divided|multiplied|through|times\s+(?:[\d\\(]|\w\b)|to\s+\\?\d|and\s+a\s+half|(?:more|less|fewer)\s+than\s+\d+)\b)",
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
_MIXED = r"[a-z][\u0370-\u04ff]|[\u0370-\u04ff][a-z]"
# "twice the answer", "one more than 5"
_NO_ANSWER_ITSELF = (
    r"\b(?:twice|half|double|of|than|from)\s+(?:(?:the|my|all|wrong|final|right)\s+)*answers?\b"
    r"|\b(?:one|two|\d)\s+(?:more|less|fewer)\s+than\W*\Z"
)
_DOUBT = re.compile(
    rf"{_NO_DOUBT}{_words('doubt', 'report')}|{_words('contrast')}(?=\W*\Z)|[?\uff1f]|dots\W*\Z|{_NO_ANSWER_ITSELF}|\.\.\.\W*\Z|{_UNREAL}|{_MIXED}",
    re.IGNORECASE | re.DOTALL,
)
_WRONG = re.compile(rf"{_words('wrong')}|{_FIRST_PERSON}", re.IGNORECASE)
_REST = re.compile(
    rf"{_NO_DOUBT}{_words('doubt', 'correction', 'report', 'contrast')}|[?\uff1f]|\b(?:contradiction|absurd|extraneous|else\W*\d)|\bno(?:[,.!]|\s\d|\s*\Z)"
    rf"|{_CALLED_WRONG}|{_FIRST_PERSON}|:\s*(?:false|null)\b"
    rf"|\bnot\W*\Z|{_NO_ANSWER_ITSELF}",
    re.IGNORECASE,
)
_HEADING = re.compile(_words("denial", "wrong", "doubt", "report", "exception"), re.IGNORECASE)
_NEGATION = r"(?:\b(?:not|never|cannot|nobody|unable)|n't)\b(?!\W*\d)"
_RESPONSE = r"\b(?:i|me|my|you|please|answer|box|boxed|number|result|solution|grade|guess|final)\b"
_LATER = re.compile(
    rf"{_NO_DOUBT}{_words('doubt', 'correction', 'report', 'contrast')}|{_CALLED_WRONG}"
    rf"|(?:\A|[.!?\n])\s*(?:no|{_words('wrong')})\b(?=[.!,]|\s*\Z)"
    rf"|{_NEGATION}[^.!?\n]*{_RESPONSE}|{_RESPONSE}[^.!?\n]*{_NEGATION}",
    re.IGNORECASE,
)
CORRECTION = re.compile(rf"{_words('correction', 'wrong', 'denial')}|actually|\bno\b", re.IGNORECASE)
CONCLUSION = re.compile(
    r"\s*(?:so|thus|hence|therefore|[^.!?\n]*\b(?:total|in\s+all|altogether|final(?:ly)?|result))\b", re.IGNORECASE
)
# "It is 6.", "6 is the right one."
ASSERTION = re.compile(
    r"(?:\b(?:is|are|was|be|as|get|got|equals?|gives?|becomes?)|'s|:|\A[^A-Za-z]*=)[\s$*\\(]*-?\d[\d.,]*[\s$*)!.\\]*\Z"
    r"|(?:\A|:)[\s$*]*-?\d[\d.,]*[\s$*]+(?:is|was)\s+(?:the|my|right|correct)\b"
)
NUMBER_WORD = re.compile(
    r"\b(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty|hundred|thousand)\b"
)
RESTART = re.compile(rf"{_words('correction')}|\bno[,.!]", re.IGNORECASE)
OR_BEFORE = re.compile(rf"[\s$]*{_words('alternative')}[\s$\\(\[{{*]*\Z", re.IGNORECASE)
OR_AFTER = re.compile(rf"[\s$\\)\]}}*,(]*{_words('alternative')}", re.IGNORECASE)
# A comment of LaTeX, HTML or Markdown, a mark of a footnote, and a quotation with an answer in it.
_HIDDEN = re.compile(
    r"^[ \t]*(?:%|> )[^\n]*|(?<=\s)%\s*(?=\\boxed)[^\n]*|<!--.*?(?:-->|\Z)|\\iffalse.*?(?:\\fi|\Z)"
    r"|^```(?!json|text|math|latex|markdown)\w+\n.*?(?:^```|\Z)|\\verb\*?(\W).*?\1|\\(?:footnote|newcommand|def)\b[^\n]*"
    r"|\[asy\].*?(?:\[/asy\]|\Z)|\\begin\{comment\}.*?(?:\\end\{comment\}|\Z)"
    r"|~~[^~\n]{0,400}~~|\\(?:sout|[bx]?cancel|[hv]?phantom)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
    r"|<(s|del|strike|details)>.*?(?:</\2>|\Z)|<(\w+)\s[^>]*(?:style|hidden)[^>]*>.*?(?:</\3>|\Z)|.[\u0335-\u0338]|^\[//\]:[^\n]*|\[\^\w+\]:?"
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


def _heading_before(text: str, start: int) -> str:
    """Return the line above an answer's own if it governs it: a heading, or one with a colon at its end."""
    lines = text[max(0, start - 600) : start].rsplit("\n", 1)[0].rstrip()
    line = _MARKUP.sub("", lines.rpartition("\n")[2]).strip()
    return line if "\n" in text[:start] and (line.endswith(":") or line.startswith("#")) else ""


def sentence_before(text: str, start: int) -> str:
    """Return what stands in the sentence before a place, without markup."""
    before = text[max(0, start - 600) : start]
    ends = [found.end() for found in _END.finditer(before)]
    return _MARKUP.sub("", before[ends[-1] if ends else 0 :])


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether its own sentence denies, doubts, bounds or asks for the answer at a place, or is not read."""
    is_box = text.startswith("\\", start)
    if is_box and (_DOUBT.search(text, start, end) or not _stands_alone(text, start, end)):
        return True
    if _HEADING.search(_heading_before(text, start)):
        return True
    before = sentence_before(text, start)
    rest, ending = _sentence_behind(text, end)
    if _is_denied_before(before, is_box) or _is_denied_behind(rest) or _SYMBOL.match(ending.lstrip(" .!")):
        return True
    if _ASKED.match(ending) or (not ending and _UNFINISHED.search(rest)):
        return True
    return not _is_read(before, text[start:end], rest)


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether a box is no part of a formula, and no argument of a command that may hide it."""
    if _BEFORE_BOX.search(text[max(0, start - 40) : start]) or _AFTER_BOX.match(text, end):
        return False
    openings: list[str | None] = []
    for brace in _OPEN_BRACE.finditer(text, 0, start):
        if brace[0].endswith("{") and brace[0] != "\\{":
            openings.append(brace[1])
        elif brace[0] == "}" and openings:
            openings.pop()
    return all(openings)


def _sentence_behind(text: str, end: int) -> tuple[str, str]:
    """Return what follows in the sentence of a place, without markup, and what ends it with all behind it."""
    after = _MARKUP.sub("", text[end : end + 600])
    stop = _END.search(after)
    return (after, "") if stop is None else (after[: stop.start()], after[stop.start() :])


def _is_denied_before(sentence: str, is_box: bool) -> bool:
    clauses = [found.end() for found in _CLAUSE.finditer(sentence)]
    clause = sentence[clauses[-1] if clauses else 0 :]
    if is_box:
        clause = _ASIDE.sub("", clause)  # "so she must score at least \\boxed{9} points"
    is_denied = _DENIED_BEFORE.search(clause) or _is_chinese_doubt(clause)
    return bool(is_denied or _DOUBT.search(sentence) or _is_strange(clause))


def _is_denied_behind(rest: str) -> bool:
    return bool(_DENIED_AFTER.match(rest) or _REST.search(rest) or _SYMBOL.search(rest) or _is_chinese_doubt(rest))


def _is_chinese_doubt(text: str) -> bool:
    return _CHINESE_DOUBT.search(re.sub(_NO_COMPOUND, "", text)) is not None


def _is_strange(text: str) -> bool:
    """Return whether a text has an adverb as "allegedly", or "I" and what no solution does."""
    adverbs = {adverb.strip().lower() for adverb in _ADVERB.findall(text)}
    return not adverbs <= _ADVERBS or any(odd.search(text) for odd in (_DEED, _SYMBOL))


def _letters(text: str) -> set[str]:
    """Return the words of a text without formulas and ideographs; those in capitals keep them."""
    return set(_LETTERS.findall(_FORMULA.sub(" ", re.sub(_IDEOGRAPHS, " ", text))))


def _is_english(words: set[str]) -> bool:
    return any(word.lower() in _ENGLISH or _ENGLISH_FORM.fullmatch(word) for word in words)


def _is_foreign(text: str) -> bool:
    return _OTHER_SCRIPT.search(text) is not None or bool(_letters(text) & _NOT_ENGLISH)


def _may_stand_alone(text: str) -> bool:
    return {word.lower() for word in _letters(text)} <= _ALONE


def _is_read(before: str, answer: str, rest: str) -> bool:
    """Return whether the sentence of an answer is English or Chinese, or a known statement of another language."""
    statement = " ".join(re.findall(r"[^\W\d_]+", before.lower()))
    ending = "".join(re.findall(r"[^\W\d_]+", rest))
    if statement in TABLES["statements"] and ending in TABLES["endings"]:
        return True
    if _is_foreign(f"{before} {rest}"):
        return False
    if _is_english(_letters(f"{before} {rest}")):
        return True
    is_named = _NAMED.search(before) is not None or "=" in answer
    units = re.sub(_IDEOGRAPHS, "", rest)
    return (is_named or _may_stand_alone(before)) and units.isascii() and len(_letters(units)) <= _MOST_UNITS


def is_taken_back(text: str, end: int) -> bool:
    """Return whether what stands behind an answer takes it back, or is not read."""
    paragraph = text[end:].partition("\n\n")[0]
    if text.endswith("}", 0, end) and _WRONG.search(_MARKUP.sub("", paragraph)):
        return True
    stop = _END.search(text, end)
    if stop is None:
        return False
    later = _CLOSING.sub(" ", _MARKUP.sub("", _FORMULA.sub(" ", text[stop.end() :])))
    return _LATER.search(later) is not None or not all(map(_is_read_later, _END.split(later)))


def _is_read_later(sentence: str) -> bool:
    if len(re.findall(_IDEOGRAPHS, sentence)) > _MOST_IDEOGRAPHS or _is_chinese_doubt(sentence):
        return False
    if _is_foreign(sentence) or _DEED.search(sentence) or _SYMBOL.search(sentence):
        return False
    return _may_stand_alone(sentence) or _is_english(_letters(sentence))


def is_affirmed(text: str, start: int, end: int) -> bool:
    """Return whether neither its own sentence nor what follows denies the answer at a place."""
    return not is_denied(text, start, end) and not is_taken_back(text, end)
