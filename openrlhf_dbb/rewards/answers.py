r"""Finds the place where a response states its answer.

The last complete ``\boxed{...}`` is the answer. Without a box it is what follows the last "answer is", "Answer:" or
``####``; without such words the last value that stands for itself. A value that is denied ("not 5", "7 is wrong"), a
bound ("at least 51"), an operand, an item of a list or a question is no answer.
"""

import re
from collections.abc import Iterator

from openrlhf_dbb.rewards.tokens import FONT, FUNCTIONS, UPRIGHT, plain_signs
from openrlhf_dbb.rewards.units import unit_of
from openrlhf_dbb.rewards.values import Equation, Formula, Items, Number, Value, Words, inner, read

SPECIAL_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>", "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>", "<pad>",
)  # fmt: skip
TAIL_CHARACTERS = 4000  # only the end of a response without a box or a statement is read
SAID_CHARACTERS = 400

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_MARKDOWN = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|(?<!\w)__|__(?!\w)|`|^#{1,3}(?= )", re.MULTILINE)
_MARKER = re.compile(r"^[ \t]*(?:[-*\u2022]|\d{1,2}[.)])[ \t]+(?=\S)", re.MULTILINE)
_REMARK = re.compile(r"\s\([^()]*(?<![\\A-Za-z])[A-Za-z]{2}[^()]*\)")
_VERB = r"(?:\s+(?:is|are|was|would\s+be|should\s+be|must\s+be|will\s+be|has\s+to\s+be)\b\s*:?|\s*\"?[:=]|\s*\n)"
STATEMENT = re.compile(
    rf"\b(?:answers?|(?:correct|right|best|my)\s+(?:option|choice)){_VERB}|####|<answer>|\u7b54\u6848\u662f|\u7b54\u3048\u306f",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"\b(?:wait|actually|correction|oops|sorry|rather|no)\b", re.IGNORECASE)
_EXCLAIMED = re.compile(r"!(?=\s*(?:\n|\Z|[A-Z]))")  # no factorial
_SENTENCE = re.compile(r"\n|(?<=[.!?\u3002])\s+")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}")  # "$5 and $7" encloses words, not a formula
_PIECE = re.compile(
    r"\\[A-Za-z]+|\\.|[^\W\d_]+(?:['-][^\W\d_]+)*|\.?\d[\d.,]*\d(?:[eE][+-]?\d+)?|\.?\d|\s+|.", re.DOTALL
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|than|instead of|if|unless|false|suppose|cannot|longer|unlikely)|n't)[ :]+"
    r"(?:(?!but\b|rather\b|yet\b|so\b|then\b)[a-z']+[ ]+){0,3}\Z|(?:\b(?:at least|at most|up to|over|under|above|below|"
    r"between|out of|step|case|equation|chapter|rule)|[<>]|\\[lg]e|\\ne|!=) *\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"\s*(?:(?:(?:is|are|was|would be|seems|can|could|does)\s*)?(?:not\b|n't|never|wrong|incorrect|false|too\b|"
    r"impossible)|(?:isn|can|doesn|wasn)'t|cannot|"
    r"(?:or|and) (?:more|less|fewer|greater|above|below|higher|lower|up)\b|\?)",
    re.IGNORECASE,
)
_NEARBY = 60  # characters before a value that may deny it
_JOINS = {"and", "or", "plus", "minus", "times", "to", "by", "over"}


def response_text(query: str, prompt: str) -> str:
    """Return the response of a query, without the prompt before it and the special tokens after it.

    Raises:
        ValueError: the query does not start with the prompt, so the start of the response is unknown.
    """
    if not query.startswith(prompt):
        raise ValueError(
            f"the decoded query {query[:80]!r}... does not start with its prompt {prompt[:80]!r}...: either "
            "the prompt was truncated (raise --data.max_len or lower --rollout.max_new_tokens) or the "
            "tokenizer does not round-trip, decode(encode(text)) != text (use another tokenizer)"
        )
    response = query[len(prompt) :].rstrip()
    while token := next((token for token in SPECIAL_TOKENS if response.endswith(token)), None):
        response = response.removesuffix(token).rstrip()
    return response.lstrip()


def label_text(label: str | int, prompt: str) -> str:
    """Return a label as text without spaces around it. Raise ValueError if it is empty."""
    text = str(label).strip()
    if not text:
        raise ValueError(f"the label of {prompt[:80]!r} is empty; name the column of answers with --data.label_key")
    return text


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
    like = inner(label)
    box = last_box(response)
    if box is not None:
        value = read(box, like)
        phrase = _REMARK.sub("", FONT.sub(r" \2 ", box))  # \text{about } 5
        if isinstance(like, Number) and not isinstance(value, (Number, Equation)) and _PROSE.search(phrase):
            found = list(_values(phrase, like))
            return found[0] if len(found) == 1 else value
        return value
    if r"\boxed{" in response:
        return None
    text = _plain(response.rpartition("</think>")[2])
    text = _EXCLAIMED.sub(".", text) if isinstance(like, Number) else text
    statements = [statement for statement in STATEMENT.finditer(text) if text[statement.end() :].strip()]
    if statements:
        start, end = statements[-1].span()
        if _DENIED_BEFORE.search(text[:start][-_NEARBY:]):
            return None
        text = text[end:].strip()
        if not _CORRECTED.search(text):
            return next(_values(text[:SAID_CHARACTERS], like), None)
    text = text[-TAIL_CHARACTERS:].strip()
    first, _, rest = text.partition("\n")
    if not statements and rest.startswith("\n") and isinstance(value := read(first, like), type(like)):
        return value
    return next(_values(text, like, last_first=True), None)


def _plain(text: str) -> str:
    """Return a text without Markdown, markers of lists and remarks in parentheses."""
    text = _MARKDOWN.sub("", plain_signs(text)).replace("</answer>", "\n")
    text = _FORMULA.sub(lambda found: found[0].replace("\n", " "), text)
    return _REMARK.sub("", _MARKER.sub("", text))


def _values(text: str, like: Value, *, last_first: bool = False) -> Iterator[Value]:
    """Yield the values that are of the label's kind and stand for themselves."""
    step = -1 if last_first else 1
    for sentence in _SENTENCE.split(text)[::step]:
        if isinstance(like, Number):
            yield from _numbers(sentence, like)[::step]
        elif (value := _at_the_end(sentence, like)) is not None:
            yield value


def _numbers(sentence: str, like: Number) -> list[Value]:
    values = [
        read(sentence[start:end], like)
        for start, end in _formulas(sentence)
        if not _DENIED_BEFORE.search(sentence[:start][-_NEARBY:]) and not _DENIED_AFTER.match(sentence, end)
    ]
    return [value for value in values if value is not None and isinstance(inner(value), Number)]


def _formulas(sentence: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of the formulas in a sentence: what neither words nor punctuation part."""
    start, end, depth = -1, -1, 0
    for piece in _PIECE.finditer(sentence):
        text, place = piece[0], piece.start()
        before, after = sentence[:place].rstrip()[-1:], sentence[piece.end() :].lstrip()[:1]
        is_part = text.isascii() and text not in "?\"'"
        if text.isspace():
            continue
        if text in ("{", "}"):
            is_part, depth = text == "{" or depth > 0, max(0, depth + (text == "{") - (text == "}"))
        elif text[0].isalpha() and not depth:
            is_used = text not in "aAI" or after in set("=+-*/^(<>") or before in set("=+-*/^(")
            lone = len(text) == 1 and text.isascii() and is_used
            joins = text in _JOINS and after != "" and (after.isdigit() or after in "-\\$")
            is_unit = text in ("square", "cubic", "percent") or (unit_of([UPRIGHT + text]) is not None and text != "in")
            is_sign = text.lower() in ("minus", "negative") and after.isdigit()
            is_part = lone or text in FUNCTIONS or is_sign or (start >= 0 and (joins or is_unit))
            if not is_part and start >= 0 and place == end and text.isascii():  # 5th
                start = -1
        elif text in ",:;.":
            goes_on = start >= 0 and after != "" and (after.isdigit() or after in "-\\$(")
            is_part = depth > 0 or (text == "." and after == "/") or (text in ",:" and goes_on)
        if is_part:
            start, end = place if start < 0 else start, piece.end()
        elif start >= 0:
            yield start, end
            start = -1
    if start >= 0:
        yield start, end


def _at_the_end(sentence: str, like: Value) -> Value | None:
    """Return the longest end of a sentence, or else the last formula in dollars, that is of the label's kind."""
    starts = [found.start() for found in re.finditer(r"(?:(?<=\s)|\A|(?<=[:=]))\S", sentence)][-60:]
    places = [(start, sentence[start:]) for start in starts]
    formulas = [found for found in _FORMULA.finditer(sentence) if not _PROSE.search(found[0])]
    for place, text in places + [(found.start(), found[0]) for found in reversed(formulas)]:
        value = read(text, like) or read(text.rstrip("!"), like)
        if value is not None and _is_like(value, like) and not _DENIED_BEFORE.search(sentence[:place][-_NEARBY:]):
            return value
    return None


def _is_like(value: Value, like: Value) -> bool:
    """Return whether a value in running text may be the answer for a label: words have to be the label's."""
    value = inner(value)
    if isinstance(like, Words):
        return isinstance(value, Words) and (value.words == like.words or not value.words[0].isalpha())
    if isinstance(like, Formula):
        return not isinstance(value, Words) and not value.text.isalpha()
    return isinstance(value, (type(like), Items))
