"""Says whether a response stands by the answer at a place of its text. The words stand in ``tables.toml``, by kind."""

import re
import unicodedata

from openrlhf_dbb.rewards.language import (
    IDEOGRAPH,
    is_chinese_doubt,
    is_odd,
    is_plain_statement,
    is_read,
    is_read_later,
    is_strange_adverb,
    is_strange_deed,
    without_formulas,
    without_open_formula,
)
from openrlhf_dbb.rewards.notation import TABLES

NEAR = 100  # characters beside an answer that is denied
WINDOW = 600  # characters of a sentence before and behind an answer


def _words(*kinds: str) -> str:
    """Return an expression that matches the words of some kinds; those of Chinese within a row of letters."""
    words = [word for kind in kinds for word in TABLES["words"][kind]]
    words.sort(key=len, reverse=True)
    spaced = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words if word.isascii())
    chinese = "".join(f"|{word}" for word in words if not word.isascii())
    return rf"(?:(?<![A-Za-z])(?:{spaced})(?![A-Za-z]){chinese})"


def _any(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts), re.IGNORECASE | re.DOTALL)


_END = re.compile(
    r"(?<!\bDr)(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\b[Ee]\.g)(?<!\b[Ii]\.e)[.!?](?=[)\"\u201d]?(?:\s|\Z|\())"
    r"|[\u3002\uff01\uff1f\u0964\u061f\n]|<answer>|</answer>"
)
# A line that governs the next one: a heading, or what ends with a colon
_HEADING = re.compile(
    r"^[ \t]*(?:(?:#+|\*\*)\s*([^\n]{1,80}?)[\s:*]*|([^\n]{1,80}):[ \t*]*)\n\s*", re.MULTILINE
)
_CLAUSE = re.compile(r"[,;.!?](?=[\"\u201d]?(?:\s|\Z))|[\n\uff0c\u3002\uff1b\uff01\uff1f\u3001]")
_MARKUP = re.compile(
    r"\\(?:boxed|fbox|framebox|text[a-z]*|math[a-z]+)\s*\{|\\[()\[\],;! ]|[$*_{}`]|</?[a-z]>"
)
_VERB = r"(?:is|are|was|were|be|equals?)"
# "the correct answer is", "it's", "x ="
_SUBJECT = (
    rf"(?:{_VERB}\s+(?=(?:it|this|that)\s))?(?:(?:that|whether|if|when)\s+)?"
    r"(?:(?:the|my|your|its|a)\s+)?(?:(?:final|correct|right|true)\s+)?"
    r"(?:it|this|that|there|answer|result|solution|value|[a-z])"
    rf"(?:'s|\s+(?:would\s+|could\s+|can\s+)?{_VERB}|\s*=)?(?:\s+equal\s+to)?[\s:]*"
)
_UP_TO_THREE = rf"(?:(?!(?:but|rather|yet|so|then|{_VERB}|equals)\b)[a-z]+'?[a-z]*\s+){{0,3}}"
_DENIED_BEFORE = _any(
    # "not 5", "cannot be 5", "nobody would say that the answer is 5"; not "not prime is 5", "not 6 but 5"
    rf"(?:{_words('denial', 'wrong', 'condition')}|n't)[\s:\"]*(?:(?:to\s+)?be\s+)?(?:equal\s+to\s+)?"
    rf"{_UP_TO_THREE}(?:{_SUBJECT})?\(?\Z",
    rf"{_words('wrong')}\s+(?:[a-z]+\s+)?[a-z]+:\s*\Z",  # "Wrong answers:"
    rf"{_words('hedge')}\s+(?:(?!{_VERB})[a-z]+\s+)?\(?\Z",  # "may be 5"
    rf"(?:{_words('bound', 'exception')}|[<>\u00ac+/^])(?:[\s(]|{IDEOGRAPH}){{0,3}}\Z",  # "at least 5"
    r"\\(?:times|cdot|div|[lg]eq?|neg?|lnot)[\s(]*\Z",
)
# "she must score at least 9 points", but not "it is at least 9"
_ASIDE = re.compile(
    r"(?<=\w )(?<!is )(?<!are )(?<!be )(?<!lies )(?:at\s+(?:least|most)|up\s+to|over|under|above|below|near)\s*\Z",
    re.IGNORECASE,
)
_BE = r"(?:is|are|was|were|would be|should be|seems?|feels|looks|can|could|does|must|as)"
_DENIED_AFTER = _any(
    # "5 is not it", "5 or more", "5, more or less"; not "5, not 6"
    rf"[\s)}}\]]*(?:{_BE}\s*(?:[a-z]+ly\s+)?)?(?:{_words('denial', 'wrong', 'bound_after', 'hedge')}|n't\b)(?!\W*\d)",
    rf"[\s,)}}\]]*{_words('bound_after')}(?!\W*\d)",
    rf"[\s)}}\]]*{_BE}\s+(?:[a-z]+\s+){{0,2}}{_words('wrong', 'uncertain')}",  # "5 is a wrong answer"
    r"[\s)}\]]*(?:\\(?:neq?|times|cdot|div)(?![a-z])|\u2260|-+>|\u2192)",
    r"[\s)}\]]*(?:[-+/^\u2013]\s*[\d\\]|[+/^]\s*\Z|\\[lc]?dots|\.(?-i:[.\da-z]))",  # "5 - 3", "5 +", "5..."
    r"\W*but\b(?!\s+not)",
    r"[\s)}\]]*(?:is|works|fits|holds)\s+(?:another|too|also|as\s+well|one(?=[.,;]|\s*\Z))",  # "5 is another"
    r"[\s)}\]]*(?:plus|minus|divided|multiplied|through|and\s+a\s+half|to\s+\\?\d+"
    r"|dozen|hundred|thousand|million|billion)\b",
    r"[\s)}\]]*(?:times\s+(?:[\d\\(]|\w\b)|(?:more|less|fewer)\s+than\s+\d)",
)
# "which is wrong", "this answer is a mistake", "it cannot be right"; not "this is not a prime"
_CALLED_WRONG = (
    r"\b(?:and|which|it|this|that|answer|result|solution|box|number|value)(?:\s+above)?"
    rf"(?:'s|\s+{_BE})\s*(?:(?:[a-z]+\s+)?too\s+\w|(?:[a-z]+\s+){{0,2}}{_words('wrong')}"
    r"|(?:n't|not|never)\s+(?:be\s+)?(?:right|correct|true|it|so|valid|possible|sure|check|work|fit|hold"
    r"|satisfy|meet|make\s+sense|the\s+(?:\w+\s+)?answer)\b)"
)
# "twice the answer", "one more than"
_OF_THE_ANSWER = (
    r"\b(?:twice|half|double|of|than|from)\s+(?:(?:the|my|all|wrong|final|right)\s+)*answers?\b"
    r"|\b(?:one|two|\d)\s+(?:more|less|fewer)\s+than\W*\Z"
)
_NO_DOUBT = r"(?<!\bno )(?<!without )"
_DOUBT = _any(
    rf"{_NO_DOUBT}{_words('doubt', 'report')}",
    rf"{_words('contrast')}(?=\W*\Z)",
    r"\b(?:guess|attempt|candidate|possible)\W*\Z",
    r"[?\uff1f\u061f]|(?:dots|\.\.\.)\W*\Z",
    r"\b(?:it|that|this|answer)\s+would\s+be[\s:]*\Z|\A\s*(?:who|why|how)\s+(?:would|could|can)\b",
    r"\A\W*(?:if|in\s+case|according|under|assuming|supposing|imagine|provided)\b.*\banswer\b",
    _OF_THE_ANSWER,
)
_REST = _any(
    rf"{_NO_DOUBT}{_words('doubt', 'correction', 'report', 'contrast')}",
    r"[?\uff1f\u061f]|\bno(?:[,.!]|\s\d|\s*\Z)|\bnot\W*\Z|[,;(]\s*(?:do\s+not|don't)\s",
    r"\b(?:contradiction|absurd|extraneous)\b|//\s*\w|\belse\W*\d|:\s*(?:false|null)\b",
    _CALLED_WRONG,
    _OF_THE_ANSWER,
)
_NEGATION = r"(?:\b(?:not|never|cannot|nobody|unable)|n't)\b(?!\W*\d)[^,.!?\n]{0,80}"
_RESPONSE = r"\b(?:i|me|my|you|please|(?<!to )answer|grade|guess|believe)\b"
_LATER = _any(
    rf"{_NO_DOUBT}{_words('doubt', 'correction', 'report')}",
    rf"(?:\A|[.!?\n])\s{{0,8}}(?:no|{_words('wrong')})\b(?=[.!,]|\s*\Z)",
    rf"{_NEGATION}{_RESPONSE}|{_RESPONSE}[^,.!?\n]{{0,80}}{_NEGATION}",
    r"\b(?:fails|failed|contradicts?|disagrees?|suspicious|aborted)\b",
    _CALLED_WRONG,
)
_WRONG = _any(_words("wrong"))
_GOVERNED = _any(_words("denial", "wrong", "doubt", "report", "exception"))
_CLOSING = _any(
    r"(?:\A|(?<=[.!?\n]))\s{0,8}(?:please\s+)?(?:let\s+me\s+know|feel\s+free|i\s+hope|hope|would\s+you|do\s+you"
    r"|if\s+you|this\s+(?:completes|concludes))\b[^.!?\n]*(?:[.!?\n]|\Z)"
)
_ANY = ".{0,2000}?"
_DISPLAY = re.compile(
    rf"\s{{0,8}}(?:\$\${_ANY}\$\$|\\\[{_ANY}\\\]|\\begin\{{(?P<kind>\w+\*?)\}}{_ANY}\\end\{{(?P=kind)\}})",
    re.DOTALL,
)
_UNFINISHED = _any(
    r"\b(?:plus|minus|and|or|the|an?|to|of|then|we|because|so|but|which|that|if|by|with|for|from|is|are"
    r"|since)[\s$]*\Z",
    r"[-+*/=(,]\s*\Z",
)
_BRACE = re.compile(
    r"(\\(?:text[a-z]*|math[a-z]+|boldsymbol|bm|underline|emph|boxed|fbox|framebox)\s*)?\{|\\.|\}"
)
_COMMANDS_BEFORE = (
    "approx|implies|iff|Rightarrow|Longrightarrow|Leftrightarrow|therefore|q?quad|in|equiv|displaystyle|to"
    "|[Ll]arge|[Hh]uge|text|boldsymbol|mathbf|begin|left|[bB]ig"
)
_BEFORE_BOX = re.compile(
    r"(?:\\not\s*=|[-<+/^_]|\|(?!\s*\n)|(?<!\*)\*(?!\*?\s*\n)|[\d)]\*\*(?!\s)|(?<!answer)>|(?<!\\)\("
    rf"|\\(?!(?:{_COMMANDS_BEFORE})(?![a-z]))[A-Za-z]+)\s*\Z"
)
_AFTER_BOX = re.compile(
    r"\s*(?:=\s*-?[\d.]+\s*(?:[$\s.,]|\\\]|\Z)"
    r"|(?!</answer|\*\*)[-+*/<>^_]\s*(?!\\circ|\{\\circ|[23{ ]*\\text)[^\s$)]"
    r"|\\(?:times|cdot|div|pm|oplus|le|ge|lt|gt|neq?|to)(?![a-z]))"
)
_CORRECTION = _any(_words("correction", "wrong"), r"actually|\bno\b")
_DENIAL = _any(_words("denial"))
RESTART = _any(_words("correction"), r"\bno[,.!]")
OR_BEFORE = _any(rf"[\s$]*{_words('alternative')}[\s$\\(\[{{*]*\Z")
# A number that is offered as the answer is: "4; 5", "First 4. Then 5.", "We get 6. The answer is 5.", "5 and also 6"
_BARE = r"(?P<other>[-+]?\d(?:[\d.,/]*\d)?)(?![.,/]*\d)"
_NAME = r"(?P<name>[a-z]\s*=\s*|(?:[a-z]+\s+){1,3}(?:is|are|=)\s+)?"  # "x =", "the sum is"
_AND = _words("alternative", "addition")
_LEAD = (
    r"(?:(?:so|thus|hence|therefore|first(?:ly)?|second(?:ly)?|third|finally|both|the|my|final|answers?|result|option"
    rf"|choice|candidate|possibility|case|one|other|another|it|this|that|is|are|equals|maybe|{_AND}|[A-J\d](?=:)"
    r"|i|we|you|get|got|have|find|found|obtain(?:ed)?)"
    r"[\s,:$*]{1,6})*"
)
# Bounded, as spaces and signs overlap
_JOINT = rf"(?:[\s$*()]{{0,4}}(?:[,;|/&.!\n(\uff0c\uff1b\u3001]|{_AND})){{1,4}}[\s$*(]{{0,4}}"
OTHER_BEFORE = _any(
    rf"(?:\A|[.!?]\s+|\n\s*)[$*(]*{_LEAD}{_NAME}[$*(]*{_BARE}{_JOINT}{_LEAD}"
    r"(?(name)(?P=name))[\s$*(]*\Z"
)
OTHER_AFTER = _any(
    rf"[$*)\]}}]*{_JOINT}{_LEAD}{_NAME}[$*(]*{_BARE}[$*)\u3040-\u9fff\uac00-\ud7af]*"
    r"(?:\s+(?:too|also|as\s+well))?(?:[.!](?=\s|\Z)|[\n;,)]|\s*\Z)"
)
_PAIR = rf"[\s$*(]*{_BARE}{_JOINT}{_LEAD}{_BARE.replace('other', 'second')}[\s$*)]*"
_FIT = (
    r"(?:both\s+|each\s+|also\s+)*(?:works?|fits?|holds?|(?:(?:is|are|would\s+be|could\s+be)\s+)(?:both\s+|all\s+)?"
    r"(?:right|correct|possible|valid|fine|acceptable|answers?|solutions?)|\Z)"
)
# "Both 5 and 6 work.", "It is 5 or 6."
BOTH = _any(
    rf"(?:\A|\b(?:both|either(?:\s+of)?|answers?(?:\s+are)?|it\s+is|we\s+(?:get|have|find))){_PAIR}[.!]?\s*{_FIT}"
)
# What stands behind "The answer is"
SAID_NUMBER = _any(rf"[\s$*(]*{_BARE}")
IS_SENTENCE_END = re.compile(r"[\s$*)}\]]*(?:[.!](?=\s|\Z)|[,;\n]|\Z)")
OR_AFTER = _any(rf"[\s$\\)\]}}*,(]*{_words('alternative')}(?!\s+else\b)")
CONCLUSION = _any(
    r"\s*(?:so|thus|hence|therefore|[^.!?\n]*\b(?:total|in\s+all|altogether|final(?:ly)?|result))\b"
)
ASSERTION = _any(
    # "It is 6."
    r"(?:\b(?:is|are|was|be|as|get|got|obtain(?:ed)?|find|found|reach(?:ed)?|equals?|gives?|becomes?|say|that)|'s|:|,(?=\s)|\A[^A-Za-z]*=)"
    r"[\s$*\\(]*-?\d[\d.,]*[\s$*)!.\\]*\Z",
    # "6 is the right one.", "6 is possible as well.", "6 works too."
    r"(?:\A|:)[\s$*]*-?\d[\d.,]*[\s$*]+(?:also\s+)?(?:(?:is|was)\s+(?:also\s+|just\s+as\s+)?(?:the|my|right|correct"
    r"|possible|valid|fine|acceptable|an?\s+(?:answer|solution))|(?:works|fits|holds)\s+(?:too|also|as\s+well))\b",
)
NUMBER_WORD = _any(  # "there are six"
    r"\b(?:is|are|was|be|equals?|gives?|makes?|get|got|have|has|leaves?|total|:)\s+(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty|hundred|thousand)\b"
)
_HIDDEN = re.compile(
    "|".join(
        [
            r"^[ \t]*(?:%|> )[^\n]*|(?<=\s)%\s*(?=\\boxed)[^\n]*",  # a comment of LaTeX, a quotation
            r"<!--.*?(?:-->|\Z)|\[\^\w+\]:?|^\[//\]:[^\n]*",  # comments and footnotes of Markdown
            r"\\iffalse.*?(?:\\fi|\Z)|\\begin\{comment\}.*?(?:\\end\{comment\}|\Z)",
            r"\\(?:footnote|newcommand|def)\b[^\n]*|\\verb\*?(?P<mark>\W).*?(?P=mark)",
            r"^```(?!json|text|math|latex|markdown)\w+\n.*?(?:^```|\Z)|\[asy\].*?(?:\[/asy\]|\Z)",  # programs
            r"~~[^~\n]{0,400}~~|.[\u0335-\u0338]|\\(?:sout|[bx]?cancel|[hv]?phantom)\s*\{(?:[^{}]|\{[^{}]*\})*\}",
            r"<(?P<tag>s|del|strike|details)>.*?(?:</(?P=tag)>|\Z)",
            r"<(?P<styled>\w+)\s[^<>]{0,200}(?:style|hidden)[^<>]{0,200}>.*?(?:</(?P=styled)>|\Z)",
            # "the answer is 5" in quotation marks
            r"(?<!\w)['\"\u201c\u201e\u2018\u00ab\u300c](?![\s.,])"
            r"(?=[^\"\u201d\u00bb\u300d]{0,400}(?:\\boxed|answer\s+is\s))"
            r"[^\n]{0,400}?['\"\u201d\u201c\u2019\u00bb\u300d](?!\w)",
        ]
    ),
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def visible(text: str) -> str:
    """Return a response without invisible characters, comments and quoted answers; one that is a quotation stays."""
    if not text.isascii():
        text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    text = text.replace("\u2019", "'")
    if re.fullmatch(r"[\"\u201c][^\"\u201d]*[\"\u201d]", text):
        return text[1:-1]
    return _HIDDEN.sub("", text)


def is_corrected(text: str, end: int, start: int) -> bool:
    """Return whether a correction stands between the end of an answer and the start of the next, or a denial near."""
    near = f"{text[end : min(start, end + NEAR)]}\n{text[max(end, start - NEAR) : start]}"
    return bool(_CORRECTION.search(text, end, start) or _DENIAL.search(near))


def is_doubtful(text: str) -> bool:
    """Return whether a text, such as a remark in brackets, doubts or denies anything."""
    return any(pattern.search(text) for pattern in (_DOUBT, _REST, _GOVERNED))


def is_affirmed(text: str, start: int, end: int) -> bool:
    """Return whether neither its own sentence nor what follows denies the answer at a place."""
    return not is_denied(text, start, end) and not is_taken_back(text, end)


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether its own sentence denies, doubts, bounds or asks for the answer at a place, or is not read."""
    before = _sentence_before(text, start)
    behind, ending = _sentence_behind(text, end)
    is_box = text.startswith("\\", start)
    if is_box and (_DOUBT.search(text, start, end) or not _stands_alone(text, start, end)):
        return True
    if not is_read(before, text[start:end], behind):
        return True
    words_before = _last_clause(without_open_formula(text[max(0, start - WINDOW) : start]))
    if not is_plain_statement(_MARKUP.sub("", words_before)):
        return True
    if _is_denied_before(before, is_box) or _is_denied_behind(behind + ending[:3]):
        return True
    return ending == "" and _UNFINISHED.search(behind) is not None


def _sentence_before(text: str, start: int) -> str:
    """Return what stands in the sentence before a place and in headings above it, without markup."""
    before = _HEADING.sub(r"\1\2: ", text[max(0, start - WINDOW) : start])
    ends = [found.end() for found in _END.finditer(before)]
    return _MARKUP.sub("", before[ends[-1] if ends else 0 :])


def _sentence_behind(text: str, end: int) -> tuple[str, str]:
    """Return what follows in the sentence of a place, without markup, and what ends it with all behind it."""
    behind = _MARKUP.sub("", text[end : end + WINDOW])
    stop = _END.search(behind)
    return (behind, "") if stop is None else (behind[: stop.start()], behind[stop.start() :])


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether a box is no part of a formula, and no argument of a command that may hide it."""
    if _BEFORE_BOX.search(text[max(0, start - 40) : start]) or _AFTER_BOX.match(text, end):
        return False
    openings: list[str | None] = []
    for brace in _BRACE.finditer(text, 0, start):
        if brace[0].endswith("{") and brace[0] != "\\{":
            openings.append(brace[1])
        elif brace[0] == "}" and openings:
            openings.pop()
    return all(openings)


def _last_clause(text: str) -> str:
    ends = [found.end() for found in _CLAUSE.finditer(text)]
    return text[ends[-1] if ends else 0 :]


def _is_denied_before(sentence: str, is_box: bool) -> bool:
    clause = _last_clause(sentence)
    if is_box:
        clause = _ASIDE.sub("", clause)  # "so she must score at least \boxed{9} points"
    if _DENIED_BEFORE.search(clause) or _DOUBT.search(sentence) or is_chinese_doubt(clause):
        return True
    return is_strange_deed(sentence) or is_strange_adverb(clause)


def _is_denied_behind(behind: str) -> bool:
    if _DENIED_AFTER.match(behind) or _REST.search(behind):
        return True
    return is_odd(behind)


def is_taken_back(text: str, end: int) -> bool:
    """Return whether what stands behind an answer takes it back, or is not read."""
    stop = _END.search(text, end)
    if text.endswith("}", 0, end) and _WRONG.search(text, end, stop.start() if stop else len(text)):
        return True
    if stop is None:
        return False
    later = _CLOSING.sub(" ", _DISPLAY.sub(r" \\formula. ", text[stop.end() :]))
    if _LATER.search(_MARKUP.sub("", without_formulas(later))):
        return True
    return not all(map(is_read_later, _END.split(later)))
