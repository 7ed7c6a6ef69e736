r"""Finds the one answer that a response commits to; docs/rewards.md states the rule.

It is the last box, else what follows "answer is" or ``####``, else the last value. A letter or words are found in the
same order; without box or statement, a letter stands alone on the last line or in parentheses at its end.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from openrlhf_dbb.core import NO_ANSWER
from openrlhf_dbb.rewards.commitment import (
    ASSERTION,
    BOTH,
    CONCLUSION,
    IS_SENTENCE_END,
    NUMBER_WORD,
    OR_AFTER,
    OR_BEFORE,
    OTHER_AFTER,
    OTHER_BEFORE,
    RESTART,
    SAID_NUMBER,
    is_affirmed,
    is_corrected,
    is_denied,
    is_doubtful,
    visible,
)
from openrlhf_dbb.rewards.foreign import ANSWER_NOUNS
from openrlhf_dbb.rewards.notation import FONT, FUNCTIONS, TABLES, plain_signs
from openrlhf_dbb.rewards.values import (
    UNITS,
    Formula,
    Items,
    Number,
    Value,
    Words,
    canonical,
    inner,
    is_relation,
    read,
)

TAIL_CHARACTERS = 4000  # only the end of a response without a box or a statement is read
SAID_CHARACTERS = 400
NEAR_CHARACTERS = 100  # before an answer, in which another number may be offered
MOST_OFFERS = 50  # boxes and statements that are compared with the answer
_UNREAD = Formula("?")

_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_MARKDOWN = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`", re.MULTILINE)
_HEADING = re.compile(r"^(?:#{1,3} +|\*\*(?=[A-Z][a-z]+ ))([^*\n]*\w)\W*$", re.MULTILINE)
# "- ", "1. "; "4. 5." are two numbers
_MARKER = re.compile(
    r"^[ \t]*(?:[-*\u2022]|(?!\A(?!1[.)])\d+\.\s[\d.]+$)\d{1,2}[.)])[ \t]+(?=\S)", re.MULTILINE
)
_EXCLUDED = re.compile(r"\s\(not\s[-\d.,]+\)")  # " (not 6)"
# "(apples)", "(that is 7 + 4 - 6)", "(see equation 5)"; not "(xy + 1)", "(or 6)"
_NO_REMARK = rf"(?:{'|'.join(FUNCTIONS)}|or|and|also|alternatively|else|not|maybe|perhaps|possibly|wrong|i)\b"
_REMARK = re.compile(
    rf"\s\((?:[\d.,]+ )?(?!{_NO_REMARK})[A-Za-z]{{3,}}(?! ?[-+*/^=<>_])[^()]*\)|\s?\([\u3040-\u9fff]+\)",
    re.IGNORECASE,
)
_TABLE_ROW = re.compile(r"^\|(?:[^|\n]*\|){2,}$", re.MULTILINE)
_SENTENCE_END = re.compile(r"\n|(?<=[.!?\u3002])(?<!\\!)\s+")
# "Yes, it is.", "No, it is not."
_FIRST_PART = re.compile(r"(.*?)(?:(?<=\bno), it is not\.|(?=[,:;]| because\b))", re.IGNORECASE)
_PLACE = re.compile(r"(?:(?<=\s)|\A|(?<=[:=]))\S")  # where the end of a sentence may begin
_SAID = re.compile(
    r"\s*([^\n]+?)\s*(?:[.?](?=\s|\Z)|(?<!\\)!(?=\Z|\s+[A-Z\d])|\n|\Z"
    r"|[,;] ?(?=[a-z\u3400-\u9fff])|\u3002|</?answer>|####)"
)
_IT_IS = r"\bit(?:\s+is|'s)\s+"
# A number that is a line, or all that a sentence says
_LONE_NUMBER = re.compile(
    rf"(?:(?:^|(?<=[.?!]\s))[ \t$*]*(?:{_IT_IS})?(?=[-+]?[\d.,/]*\d[ \t$*]*(?:[?!]+(?:\s|$)|[.]?[ \t$*]*$))"
    rf"|{_IT_IS}(?=[-+]?[\d.,/]*\d[.?!]\s))",
    re.IGNORECASE | re.MULTILINE,
)
_EQUATED = re.compile(r"[$(]*[a-z]\s*=\s*", re.IGNORECASE)
_INTRODUCTION = re.compile(
    r"\\text[a-z]*\s*\{\s*(?:(?:the|my)\s+)?(?:(?:final|correct|right)\s+)?answer\s+is:?\s*\}",
    re.IGNORECASE,
)
_VERB = (
    r"(?:\s+(?:is|are|was|(?:would|should|must|will|has\s+to)\s+be)\b(?:\s+also\b)?\s*:?"
    r"|\s*\"?[:=]|\s*\n)"
)
STATEMENT = re.compile(
    rf"\b(?:answers?|final\s+(?:result|value|number|total)|(?:correct|right|best|my)\s+(?:option|choice)){_VERB}|####|<answer>"
    rf"|(?:{ANSWER_NOUNS})[^\d$\\:=(*\n.?!-]{{0,30}}[:\uff1a=]?\s{{0,3}}(?=[-$\\\d*(]|(?-i:[A-J]\b))"
    r"|答案\s*[是为:\uff1a]|选\s*[:\uff1a]?(?=\s*\(?[A-Z])",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_MATRIX = re.compile(r"\\begin\{(\w*matrix|array|cases)\}.*?\\end\{\1\}", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}")  # "$5 and $7" encloses words, not a formula
# The parts of a value in running text, each with an example.
_OPERATOR = r"[-=+*/^(<>]"
_LATIN = "A-Za-z\u00c0-\u024f\u1e00-\u1eff"  # "Vậy" has no formula
_NO_LETTER = rf"(?![{_LATIN}]|'[a-z])"
_PARTS = [
    r"\\[A-Za-z]+|\\.",  # \frac, \%
    r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}",  # {n+1}
    r"\.?\d[\d.,]*\d(?:[eE][+-]?\d+)?|\.?\d",  # 1,234.5; 1e-5; .5
    # x; a and I only beside an operator, as they are words; sin
    rf"(?<![{_LATIN}'])(?:[B-HJ-Zb-z]|[aAI](?=\s*{_OPERATOR})|(?<={_OPERATOR})[aAI]|{'|'.join(FUNCTIONS)}){_NO_LETTER}",
    r"(?i:minus|negative)(?=\s*\d)|\.(?=/)",  # minus 5; 1./3
    r"(?![\w?\"',:;.}])[!-~\u20ac\u00a3\u00a5]|_",  # +, (, $
]
_UNIT_NAMES = "|".join(name for name in UNITS if name.isalpha() and name != "in")
_MORE_PARTS = [
    r"[,:](?=\s*[-\d\\$(])",  # 1, 2
    r"(?:and|or|plus|minus|times|to|by|over)(?=\s*[-\d\\$])",  # 1 and 2
    rf"(?:square|cubic|percent|{_UNIT_NAMES})s?(?![^\W\d_])",  # 5 square metres
]
_MATHS = re.compile(
    rf"(?:{'|'.join(_PARTS)})(?:\s*(?:{'|'.join(_PARTS + _MORE_PARTS)}))*", re.ASCII
)
# Behind the digits of "5th", "2 dozen"
_NO_NUMBER = re.compile(r"[A-Za-z]|\s*(?:dozen|hundred|thousand|million|billion)\b")
LETTERS = "ABCDEFGHIJ"  # MMLU-Pro has up to ten options
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRUTHS = {"yes", "no", "true", "false", "valid", "invalid"}

_SAID_ON_ITS_LINE = re.compile(
    rf"(?:{STATEMENT.pattern})\s*(?!\\boxed)(?=(\S[^\n]{{0,{SAID_CHARACTERS}}}))", re.IGNORECASE
)
_PRAISED = re.compile(
    r"(?:\b(?:option|choice|answer)\s+\(?|\(|(?<=[.!]\s))([A-Z])\)?\s+is\s+(?:also\s+)?(?:the\s+)?(?:correct|right|best)\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\*\*|__|\\[()\[\]]|[$`*]")
_ADVERB = r"(?:(?:most\s+likely|likely|probably|clearly|thus|therefore|indeed|actually|definitely)\s*,?\s+)?"
_NOT_BUT = r"(?:not\s+(?:option\s+)?\(?[A-Z]\)?\s*,?\s*(?:but|rather)\s+)?"
_NOUN = r"(?:(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:option|choice|letter|answer)\s*(?:is\s+|:\s*)?)?"
_LETTER = re.compile(rf"\W*?{_ADVERB}{_NOT_BUT}{_NOUN}\(?\s*([A-Z])(?!'?\w)\s*(\))?", re.IGNORECASE)
_X = r"\s*(?:(?i:option|choice)\s+)?\(?[A-Z]\)?(?!'?\w)"
_CLAUSE = r"(?!\s+(?!and\b|or\b)[a-z])"  # as in "B, A is wrong"
_SECOND = re.compile(rf"\?|\s*(?:,?\s*(?i:or)\b{_X}|(?:,?\s*(?i:and)\b|[/&,;]){_X}{_CLAUSE})")
_ENDS = re.compile(r"\s*(?:[.:),;!?\]]|$)")
# "B.", "So it is B."
_ALONE = re.compile(rf"(?:(?:(?:so|thus|therefore),? )?{_IT_IS})?\W*([A-Z])[^\w?]*", re.IGNORECASE)
_AT_THE_END = re.compile(r"(?<!or )(?<!and )(?<!/)(?<!\), )\(([A-Z])\)[\s.!]*$", re.IGNORECASE)
_OPTION = re.compile(r"\(?([A-Z])[.):]\s+(?!.*\b[A-Z][.):])[^?]*")  # a response "C. 42"
_LATEX_SPACE = re.compile(r"\\(?:q?quad|space|displaystyle|left|right)(?![a-z])|\\[ ,;:!\\]|~")


class Offer(NamedTuple):
    """A value that a text offers at a place."""

    start: int
    end: int
    value: Value


class Said(NamedTuple):
    """A letter that a text says at a place; "" for several letters."""

    start: int
    end: int
    letter: str


def rewards(
    judge: Callable[[str, str, str], tuple[float | None, str | None]], *columns: Sequence[Any]
) -> dict[str, Any]:
    """Return what OpenRLHF wants for queries, prompts and labels.

    ``judge`` gets a response without special tokens behind it, its label and its prompt, and returns a score and the
    text that it read as the answer. Raise ValueError for an empty label, and for a query without its prompt.
    """
    scores: list[float | None] = []
    read: list[str | None] = []
    verdict: tuple[float | None, str | None]
    for query, prompt, label in zip(*columns, strict=True):
        text = str(label).strip()
        if not text:
            raise ValueError(
                f"the label of {prompt[:80]!r} is empty; name the column of answers with --data.label_key"
            )
        if not query.startswith(prompt):
            raise ValueError(
                f"the query {query[:80]!r} does not start with its prompt {prompt[:80]!r}"
            )
        response = query[len(prompt) :]
        answered = without_thought(_without_tokens(response), prompt)
        if answered is None:
            verdict = (0.0, f"{NO_ANSWER}: the thought does not end")
        else:
            verdict = judge(answered.lstrip(), text, prompt)
        scores.append(verdict[0])
        read.append(verdict[1])
    return {"rewards": scores, "scores": list(scores), "extra_logs": {}, "read": read}


def _without_tokens(response: str) -> str:
    """Return a response without the special tokens at its end."""
    longer = None
    while response != longer:
        longer = response
        for token in TABLES["special_tokens"]:
            response = response.rstrip().removesuffix(token)
    return response


def without_thought(response: str, prompt: str = "") -> str | None:
    """Return what follows the thought of a response; None if the thought does not end. A prompt may begin one."""
    for opening, closing in TABLES["thoughts"]:
        _, ending, rest = response.rpartition(closing)
        if opening in rest or (not ending and prompt.rstrip().endswith(opening)):
            return None
        response = rest
    return response


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


def bare_label(label: str) -> str:
    """Return the text of a label without its box, what stands before ``####``, and dollars around its formulas."""
    box = last_box(label)
    text = label.rpartition("####")[2] if box is None else box
    return (text.replace("$", "") if text.count("$") > 1 else text).strip()


def read_label(label: str) -> Value | None:
    """Return the value of a label in a box, behind ``####`` or by itself; None if it is none."""
    return read(bare_label(label))


def find(response: str, label: Value) -> Value | None:
    """Return the one answer that a response commits to, read like the label; None if there is none."""
    text = visible(response)
    if boxed := _boxed(text, label):
        answer = boxed[-1]
        is_read = answer.value is not _UNREAD
        return answer.value if is_read and _is_final(text, answer, label) else None
    return None if r"\boxed{" in text else _in_prose(_plain(text), label)


def _boxed(text: str, label: Value) -> list[Offer]:
    """Return what the last boxes offer; a box that is not read offers something else than any answer."""
    offers = []
    for start, end in boxes(text)[-MOST_OFFERS:]:
        value = read(_INTRODUCTION.sub("", text[start:end]), label) or _UNREAD
        offers.append(Offer(text.rindex("\\", 0, start), end + 1, value))
    return offers


def _in_prose(text: str, label: Value) -> Value | None:
    if isinstance(inner(label), Number):
        text = re.sub(r"!(?=\s*(?:\n|\Z|[A-Z]))", ".", text)  # no factorial
    denied = set()
    for offer in _likeliest(text, label):
        if is_denied(text, offer.start, offer.end):
            denied.add(canonical(offer.value))
            continue
        is_final = canonical(offer.value) not in denied and _is_final(text, offer, label)
        return offer.value if is_final else None
    return None


def _likeliest(text: str, label: Value) -> Iterable[Offer]:
    """Return the values that may be the answer, the likeliest first."""
    ends = [said.end() for said in STATEMENT.finditer(text) if text[said.end() :].strip()]
    tail = max(0, len(text) - TAIL_CHARACTERS)
    first = re.match(r"\s*(\S.*)\n\s*\n", text)
    if ends and not RESTART.search(text, ends[-1]):
        return _values(text[: ends[-1] + SAID_CHARACTERS], ends[-1], label)
    value = read(first[1], label) if first and not ends else None
    if first and value and isinstance(inner(value), type(inner(label))):
        return [Offer(*first.span(1), value)]
    return _values(text, max([tail, *ends[-1:]]), label, last_first=True)


def _is_final(text: str, answer: Offer, label: Value) -> bool:
    """Return whether a response affirms an answer, does not take it back and offers no other one."""
    start, end, value = answer
    if not is_affirmed(text, start, end) or _has_alternative(text, answer, label):
        return False
    if isinstance(inner(label), Number) and _concludes_otherwise(text, answer, label):
        return False
    for offer in [*_boxed(text, label), *_stated(text, answer, label)]:
        if offer.start < end and start < offer.end:  # it is the answer
            continue
        if not _is_same(offer.value, value):
            if offer.start > start or not is_corrected(text, offer.end, start):
                return False
        elif _is_hedged(text, offer, label):
            return False
    return True


def _is_hedged(text: str, offer: Offer, label: Value) -> bool:
    """Return whether the answer, stated beside a box, is denied or has an alternative: "5 (alternatively 6)"."""
    if text.startswith("\\", offer.start):
        return False
    return is_denied(text, offer.start, offer.end) or _has_alternative(text, offer, label)


def _stated(text: str, answer: Offer, label: Value) -> list[Offer]:
    """Return what is stated beside an answer: behind "The answer is", or in a line of its own."""
    places = [statement.end() for statement in STATEMENT.finditer(text)]
    is_said = text.startswith("\\", answer.start) or bool(places)
    for lone in _LONE_NUMBER.finditer(text):
        if answer.end <= lone.start() or not is_said:  # before a box it is part of a calculation
            places.append(lone.end())
    offers = []
    for place in places[-MOST_OFFERS:]:
        offers += _stated_at(text, place, answer, label)
    return offers


def _stated_at(text: str, place: int, answer: Offer, label: Value) -> list[Offer]:
    """Return what is stated at a place: a value of the label's kind, and the answer itself as a number."""
    kind = type(inner(label))
    kinds = {Number: (Number, Items), Formula: (Number, Formula)}.get(kind, kind)
    offers = []
    said = _SAID.match(text, place)
    value = read(said[1].replace("*", ""), label) if said else None
    if said and value and isinstance(inner(value), kinds):
        offers.append(Offer(*said.span(1), value))
    number = SAID_NUMBER.match(text, place) if kind is Number else None
    if number and _is_same(read(number["other"]), answer.value):
        offers.append(Offer(*number.span("other"), answer.value))
    return offers


def _concludes_otherwise(text: str, answer: Offer, label: Value) -> bool:
    """Return whether later sentences, as "So there are 6.", conclude with another number than the answer."""
    value = answer.value
    borders = [found.end() for found in _SENTENCE_END.finditer(text, answer.end)]
    is_other = False
    for begin, stop in itertools.pairwise([*borders, len(text)]):
        sentence = _MARKDOWN.sub("", text[begin:stop])
        both = BOTH.search(sentence)
        if both and _is_same(read(both["other"]), value) != _is_same(read(both["second"]), value):
            return True
        numbers = [number.value for number in _numbers(sentence, 0, len(sentence), label)]
        is_conclusion = CONCLUSION.match(sentence) is not None
        is_asserted = ASSERTION.search(sentence) is not None
        if any(_is_same(number, value) for number in numbers):
            # "I got 5 before." does not take "I get 6." back.
            is_other = is_other and not is_conclusion and not is_asserted
        elif is_asserted or (is_conclusion and (numbers or NUMBER_WORD.search(sentence))):
            is_other = True
    return is_other


def _has_alternative(text: str, answer: Offer, label: Value) -> bool:
    """Return whether another value stands beside an answer, with "or" between them, or is offered as it is."""
    others = []
    after = OR_AFTER.match(text, answer.end)
    if after is not None:
        window = text[: after.end() + SAID_CHARACTERS]
        others.append(next((offer.value for offer in _values(window, after.end(), label)), None))
    before = OR_BEFORE.search(text, max(0, answer.start - SAID_CHARACTERS), answer.start)
    if before is not None:
        window = text[: before.start()]
        begin = max(0, before.start() - SAID_CHARACTERS)
        other = next(_values(window, begin, label, last_first=True), None)
        if other is not None and other.end == before.start():
            others.append(other.value)
    if isinstance(inner(label), Number):
        others += map(read, _twins(text, answer))
    return not all(_is_same(other, answer.value) for other in others)


def _twins(text: str, answer: Offer) -> list[str]:
    """Return the numbers that are offered as the answer is: "4; 5", "It is 6. The answer is 5."."""
    name = _EQUATED.match(text, answer.start)
    start = name.end() if name else answer.start
    is_box = text.startswith("\\", answer.start)
    if not is_box and "=" in text[start : answer.end]:  # it is calculated
        return []
    before = text[max(0, answer.start - NEAR_CHARACTERS) : start]
    twins = []
    after = OTHER_AFTER.match(text, answer.end)
    if after and before.lower().endswith((after["name"] or "").lower()):  # both are x
        twins.append(after["other"])
    earlier = OTHER_BEFORE.search(before) if IS_SENTENCE_END.match(text, answer.end) else None
    if earlier:
        twins.append(earlier["other"])
    return twins


def _is_same(other: Value | None, value: Value) -> bool:
    return other is not None and canonical(other).removesuffix("%") == canonical(
        value
    ).removesuffix("%")


def _plain(text: str) -> str:
    text = _TABLE_ROW.sub(lambda row: row[0].replace("|", " "), text)
    text = _HEADING.sub(r"\1:", plain_signs(text))
    text = _MARKDOWN.sub("", text).replace("</answer>", "\n")
    for of_several_lines in (_MATRIX, _FORMULA):
        text = of_several_lines.sub(lambda found: found[0].replace("\n", " "), text)
    text = _EXCLUDED.sub("", _MARKER.sub("", text))
    return _REMARK.sub(lambda remark: remark[0] if is_doubtful(remark[0]) else "", text)


def _values(text: str, start: int, label: Value, *, last_first: bool = False) -> Iterator[Offer]:
    """Yield the places and values behind a place of a text, in order."""
    borders = [start, *(found.end() for found in _SENTENCE_END.finditer(text, start)), len(text)]
    find_in = _numbers if isinstance(inner(label), Number) else _at_the_end
    step = -1 if last_first else 1
    for begin, end in list(itertools.pairwise(borders))[::step]:
        yield from find_in(text, begin, end, label)[::step]


def _numbers(text: str, begin: int, end: int, label: Value) -> list[Offer]:
    places = []
    for found in _MATHS.finditer(text, begin, end):
        value = None if _NO_NUMBER.match(text, found.end()) else read(found[0], label)
        if value is not None and isinstance(inner(value), Number):
            places.append(Offer(*found.span(), value))
    return places


def _at_the_end(text: str, begin: int, end: int, label: Value) -> list[Offer]:
    """Return the longest end of a sentence or of its first part that is of the label's kind, or else its formulas."""
    sentence = text[begin:end].rstrip()
    whole = re.match(r"(.*)", sentence, re.DOTALL)
    for part in filter(None, (whole, _FIRST_PART.match(sentence))):
        for found in list(_PLACE.finditer(part[1]))[-60:]:
            if (value := _like(part[1][found.start() :], label)) is not None:
                return [Offer(begin + found.start(), begin + part.end(), value)]
    places = []
    for found in _FORMULA.finditer(sentence):
        value = None if _PROSE.search(found[0]) else _like(found[0], label)
        if value is not None:
            places.append(Offer(begin + found.start(), begin + found.end(), value))
    return places


def _like(text: str, label: Value) -> Value | None:
    """Return the value of a text if it is of the label's kind."""
    value = read(text, label)
    return value if value is not None and _is_like(value, label) else None


def _is_like(value: Value, label: Value) -> bool:
    """Return whether a value in running text may be the answer for a label: words have to be the label's."""
    value = inner(value)
    like = inner(label)
    if isinstance(like, Words):
        return isinstance(value, Words) and (
            value.words == like.words
            or not value.words[0].isalpha()
            or TRUTHS.issuperset(value.words + like.words)
        )
    if isinstance(like, Formula):
        return value.text == like.text or not (isinstance(value, Words) or value.text.isalpha())
    if isinstance(like, Items) and isinstance(value, Formula):
        return is_relation(like) and value.is_relation
    return isinstance(value, (type(like), Items))


def letter(response: str, letters: str = LETTERS) -> str | None:
    """Return the letter that a response settles on; None if it names none, or several."""
    text = without_markup(visible(response))
    claims = _claims(text, letters) or _at_the_last_line(text, letters)
    if not claims:
        return None
    last = claims[-1]
    for claim in claims:
        if claim.letter != last.letter and not is_corrected(text, claim.end, last.start):
            return None
    if OR_BEFORE.search(text, 0, last.start) or OR_AFTER.match(text, last.end):
        return None
    return last.letter if last.letter and is_affirmed(text, last.start, last.end) else None


def _claims(text: str, letters: str) -> list[Said]:
    """Return in order what boxes say, and what is said after "the answer is" on its line."""
    claims = []
    for start, end in boxes(text):
        said = _letter(text, start, end, letters)
        if said:
            claims.append(Said(text.rindex("\\", 0, start), end + 1, said.letter))
    for found in itertools.chain(_SAID_ON_ITS_LINE.finditer(text), _PRAISED.finditer(text)):
        said = _letter(text, *found.span(1), letters)
        if said:
            claims.append(said)
    return sorted(claims)


def _at_the_last_line(text: str, letters: str) -> list[Said]:
    line = last_line(text)
    said = _ALONE.fullmatch(line) or _AT_THE_END.search(line)
    if said is None and line == text.strip() and not is_doubtful(line):
        said = _OPTION.fullmatch(line)
    if said is None or said[1].upper() not in letters:
        return []
    begin = text.rindex(line)
    return [Said(begin + said.start(), begin + said.end(), said[1].upper())]


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def without_markup(text: str) -> str:
    """Return a text without fonts and marks of LaTeX and Markdown."""
    while (bare := FONT.sub(r"\2", text)) != text:  # \textbf{\text{B}}
        text = bare
    return _MARKUP.sub("", _LATEX_SPACE.sub(" ", text))


def _letter(text: str, start: int, end: int, letters: str) -> Said | None:
    """Return the letter of a statement; "" if it names several letters, None if it names no letter."""
    found = _LETTER.match(text, start, end)
    if found is None or found[1].upper() not in letters:
        return None
    if _SECOND.match(text, found.end(), end):
        return Said(found.start(1), found.end(), "")
    # "A lone pair" in a box is an option's text; so are "a lone pair" and "I think" in a sentence, not "B because".
    is_word = text.startswith("}", end) or found[1] in "aiI"
    if is_word and not found[2] and not _ENDS.match(text, found.end(), end):
        return None
    return Said(found.start(1), found.end(), found[1].upper())
