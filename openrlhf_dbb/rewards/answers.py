r"""Finds the answer of a response: the last box, else what follows "answer is" or ``####``, else the last value.

A value that is denied ("not 5", "7 is wrong"), a bound ("at least 51"), an operand or a question is no answer.

A letter or words are what a response settles on: the last box, "the answer is ...", "option ... is correct"; without
one, a letter alone on the last line or in parentheses at its end. Several letters, "(A) or (B)", are not an answer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openrlhf_dbb.rewards.notation import FONT, FUNCTIONS, TABLES, plain_signs
from openrlhf_dbb.rewards.values import UNITS, Equation, Formula, Items, Number, Value, Words, inner, read

TAIL_CHARACTERS = 4000  # only the end of a response without a box or a statement is read
SAID_CHARACTERS = 400

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_MARKDOWN = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`|^#{1,3}(?= )", re.MULTILINE)
_MARKER = re.compile(r"^[ \t]*(?:[-*\u2022]|\d{1,2}[.)])[ \t]+(?=\S)", re.MULTILINE)
_REMARK = re.compile(r"\s\([^()]*(?<![\\A-Za-z])[A-Za-z]{2}[^()]*\)")
_VERB = r"(?:\s+(?:is|are|was|would\s+be|should\s+be|must\s+be|will\s+be|has\s+to\s+be)\b\s*:?|\s*\"?[:=]|\s*\n)"
STATEMENT = re.compile(
    rf"\b(?:answers?|(?:correct|right|best|my)\s+(?:option|choice)){_VERB}|####|<answer>|\u7b54\u6848\u662f|\u7b54\u3048\u306f|\u6545\u9009",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}")  # "$5 and $7" encloses words, not a formula
# What neither words nor punctuation part; units and words between numbers are a part, "a" and "I" alone are none.
_OPERATOR = r"[-=+*/^(<>]"
_PART = rf"""\\[A-Za-z]+|\\.|\{{(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})*\}}|\.?\d[\d.,]*\d(?:[eE][+-]?\d+)?|\.?\d
    |(?<![^\W\d_])(?<!')(?:[B-HJ-Zb-z]|[aAI](?=\s*{_OPERATOR})|(?<={_OPERATOR})[aAI]|{"|".join(FUNCTIONS)})(?![^\W\d_']|'[a-z])
    |(?i:minus|negative)(?=\s*\d)|\.(?=/)|(?![\w?"',:;.}}])[!-~\u20ac\u00a3\u00a5]|_"""
_MATHS = re.compile(
    rf"""(?:{_PART})(?:\s*(?:{_PART}|[,:](?=\s*[-\d\\$(])|(?:and|or|plus|minus|times|to|by|over)(?=\s*[-\d\\$])
    |(?:square|cubic|percent|{"|".join(name for name in UNITS if name.isalpha() and name != "in")})s?(?![^\W\d_])))*""",
    re.VERBOSE | re.ASCII,
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|than|instead of|if|whether|unless|false|suppose|assum(?:e|ing)|let|cannot|longer|"
    r"unlikely)|n't)[ :]+(?:(?!but\b|rather\b|yet\b|so\b|then\b)[a-z']+[ ]+){0,3}\Z|(?:\b(?:at least|at most|up to|"
    r"over|under|above|below|between|out of|step|case|equation|chapter|rule)|[<>]|\\[lg]e|\\ne|!=) *\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"\s*(?:(?:(?:is|are|was|would be|seems|can|could|does)\s*)?(?:not\b|n't|never|wrong|incorrect|false|too\b|"
    r"impossible)|(?:isn|can|doesn|wasn)'t|cannot|"
    r"(?:or|and) (?:more|less|fewer|greater|above|below|higher|lower|up)\b|at (?:most|least)\b|\?)",
    re.IGNORECASE,
)

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
_AT_THE_END = re.compile(r"(?<!or )(?<!and )(?<!/)(?<!\), )\(([A-Z])\)[\s.!]*$", re.IGNORECASE)
_LATEX_SPACE = re.compile(r"\\(?:q?quad|space|displaystyle|left|right)(?![a-z])|\\[ ,;:!\\]|~")
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_DENIALS = {"not", "no", "never", "or", "nor", "neither", "isn't", "than"}


def rewards(
    judge: Callable[[str, str, str], tuple[float | None, str | None]], *columns: Sequence[Any]
) -> dict[str, Any]:
    """Return what OpenRLHF wants for queries, prompts and labels.

    ``judge`` gets a response without special tokens behind it, its label and its prompt, and returns a score and the
    text that it read as the answer. Raise ValueError for an empty label, and for a query without its prompt.
    """
    scores, read = [], []
    for query, prompt, label in zip(*columns, strict=True):
        text = str(label).strip()
        if not text:
            raise ValueError(f"the label of {prompt[:80]!r} is empty; name the column of answers with --data.label_key")
        if not query.startswith(prompt):
            raise ValueError(f"the query {query[:80]!r} does not start with its prompt {prompt[:80]!r}")
        response = query[len(prompt) :].rstrip()
        while token := next((token for token in TABLES["special_tokens"] if response.endswith(token)), None):
            response = response.removesuffix(token).rstrip()
        score, answer = judge(response.lstrip(), text, prompt)
        scores.append(score)
        read.append(answer)
    return {"rewards": scores, "scores": list(scores), "extra_logs": {}, "read": read}


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Return start and end of the content of each ``\boxed{...}`` whose braces close, in the order of their ends."""
    places = []
    open_braces: list[tuple[bool, int]] = []  # (is a box, where its content starts)
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            open_braces.append((token[0] != "{", token.end()))
        elif token[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                places.append((start, token.start()))
    return places


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces close, or None; of nested boxes, the outermost."""
    places = boxes(text)
    return text[slice(*places[-1])] if places else None


def read_label(label: str) -> Value | None:
    """Return the value of a label in a box, behind ``####`` or by itself; None if it is none."""
    box = last_box(label)
    text = label.rpartition("####")[2] if box is None else box
    return read(text.replace("$", "") if text.count("$") > 1 else text)


def find(response: str, label: Value) -> Value | None:
    """Return the answer of a response, read like the label; None if there is none."""
    like, box = inner(label), last_box(response)
    if box is not None:
        value, phrase = read(box, like), _REMARK.sub("", FONT.sub(r" \2 ", box))
        if not isinstance(like, Number) or isinstance(value, (Number, Equation)) or not _PROSE.search(phrase):
            return value
        found = list(_values(phrase, like))  # the only number in a phrase, ``\text{about } 5``
        return found[0] if len(found) == 1 else value
    if r"\boxed{" in response:
        return None
    text = _plain(response.rpartition("</think>")[2])
    if isinstance(like, Number):
        text = re.sub(r"!(?=\s*(?:\n|\Z|[A-Z]))", ".", text)  # no factorial
    statements = [statement for statement in STATEMENT.finditer(text) if text[statement.end() :].strip()]
    if statements:
        start, end = statements[-1].span()
        if _is_denied(text, start):
            return None
        text = text[end:].strip()
        if not re.search(r"\b(?:wait|actually|correction|oops|sorry|rather|no)\b", text, re.IGNORECASE):
            return next(_values(text[:SAID_CHARACTERS], like), None)
    text = text[-TAIL_CHARACTERS:].strip()
    first, _, rest = text.partition("\n")
    if not statements and rest.startswith("\n") and isinstance(value := read(first, like), type(like)):
        return value
    return next(_values(text, like, last_first=True), None)


def _is_denied(text: str, start: int) -> bool:
    return _DENIED_BEFORE.search(text[:start][-60:]) is not None


def _plain(text: str) -> str:
    text = _MARKDOWN.sub("", plain_signs(text)).replace("</answer>", "\n")
    text = _FORMULA.sub(lambda found: found[0].replace("\n", " "), text)
    return _REMARK.sub("", _MARKER.sub("", text))


def _values(text: str, like: Value, *, last_first: bool = False) -> Iterator[Value]:
    step = -1 if last_first else 1
    for sentence in re.split(r"\n|(?<=[.!?\u3002])(?<!\\!)\s+", text)[::step]:
        yield from (_numbers if isinstance(like, Number) else _at_the_end)(sentence, like)[::step]


def _numbers(sentence: str, like: Value) -> list[Value]:
    values = []
    for found in _MATHS.finditer(sentence):
        start, end = found.span()
        is_ordinal = re.match("[A-Za-z]", sentence[end:])  # 5th
        if not is_ordinal and not _is_denied(sentence, start) and not _DENIED_AFTER.match(sentence, end):
            values.append(read(found[0], like))
    return [value for value in values if value is not None and isinstance(inner(value), Number)]


def _at_the_end(sentence: str, like: Value) -> list[Value]:
    """Return the longest end of a sentence, or else the last formula in dollars, that is of the label's kind."""
    starts = [found.start() for found in re.finditer(r"(?:(?<=\s)|\A|(?<=[:=]))\S", sentence)][-60:]
    places = [(start, sentence[start:]) for start in starts]
    formulas = [found for found in _FORMULA.finditer(sentence) if not _PROSE.search(found[0])]
    for place, text in places + [(found.start(), found[0]) for found in reversed(formulas)]:
        value = read(text, like) or read(text.rstrip("!"), like)
        if value is not None and _is_like(value, like) and not _is_denied(sentence, place):
            return [value]
    return []


def _is_like(value: Value, like: Value) -> bool:
    """Return whether a value in running text may be the answer for a label: words have to be the label's."""
    value = inner(value)
    if isinstance(like, Words):
        return isinstance(value, Words) and (value.words == like.words or not value.words[0].isalpha())
    if isinstance(like, Formula):
        return value.text == like.text or not (isinstance(value, Words) or value.text.isalpha())
    return isinstance(value, (type(like), Items))


def letter(response: str, letters: str = LETTERS) -> str | None:
    """Return the letter that a response settles on; None if it names none, or several."""
    text = _without_markup(response)
    said = [settled for each in _stated(text) if (settled := _settled(*each, letters)) is not None]
    if said:
        return said[-1] or None
    line = last_line(text)
    found = re.fullmatch(r"\W*([A-Z])[^\w?]*", line, re.IGNORECASE) or _AT_THE_END.search(line)
    return found[1].upper() if found and found[1].upper() in letters else None


def words(response: str, label: str) -> str | None:
    """Return the last words that a response states as its answer, in lower case; for a label as yes, yes or no."""
    text = _without_markup(response)
    pair = next((pair for pair in _PAIRS if label.lower() in pair), ())
    size, right = len(label.split()), _WORD.findall(label)
    for said, is_boxed in reversed(_stated(text) or [(last_line(text).rpartition("?")[2], False)]):
        found = _WORD.findall(said.lower())
        if pair:
            either = rf"\b(?:{'|'.join(pair)})\b"
            if re.search(rf"{either}(?:\W+(?:or|and|nor)\W+|\W*/\W*|\W+(?=\w+\W*\Z)){either}", said, re.IGNORECASE):
                return None  # yes or no
            is_denied = any(word in _DENIALS or word.endswith(("not", "n't")) for word in found[:-1])
            found = [word for word in found[:1] + found[-1:] * (not is_denied) if word in pair][:1]
        elif not is_boxed and right == found[-size:] and not _DENIALS & set(found[:-size][-1:]):  # the function is odd
            found = right
        if found:
            return " ".join(found)
    return None


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _without_markup(text: str) -> str:
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
    is_text = (is_boxed or found[1] in "aiI") and not found[2] and not re.match(r"\s*(?:[.:),;!?\]]|$)", rest)
    return None if is_text else found[1].upper()
