"""Take responses, boxes and labels out of texts; no mathematics is done here."""

from __future__ import annotations

import re

SPECIAL_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "<pad>",
)
# Math-Verify takes quadratic time on some loops ("$ $ $ ..."): below a second for 4000 characters.
TAIL_CHARACTERS = 4000

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_INLINE_MATH = re.compile(r"\$([^$]+)\$")
_DOLLAR = re.compile(r"(?<!\\)\$")  # \$5 is money
# Math-Verify reads 1\,234 as 1 + 234.
_THOUSANDS = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")
_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


def response_text(query: str, prompt: str) -> str:
    """Return the decoded response without the prompt before it and the special tokens after it.

    Args:
        query: prompt + response, decoded with special tokens kept.
        prompt: the text given to the model.

    Raises:
        ValueError: the query does not start with the prompt, so where the response begins is unknown.
    """
    if not query.startswith(prompt):
        raise ValueError(
            f"the decoded query {query[:80]!r}... does not start with its prompt {prompt[:80]!r}...: either "
            "the prompt was truncated (raise --data.max_len or lower --rollout.max_new_tokens) or the "
            "tokenizer does not round-trip, decode(encode(text)) != text (use one that does)"
        )
    response = query[len(prompt) :].rstrip()
    while response.endswith(SPECIAL_TOKENS):
        token = next(token for token in SPECIAL_TOKENS if response.endswith(token))
        response = response[: -len(token)].rstrip()
    return response.lstrip()


def boxed(text: str) -> str:
    """Put a text into a box, without the LaTeX spaces between thousands that Math-Verify reads as a sum."""
    return f"\\boxed{{{_THOUSANDS.sub('', text)}}}"


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces close, or None; of nested boxes, the outermost.

    Example:
        >>> last_box(r"\boxed{1}, or rather \boxed{\frac{1}{2}} and \boxed{3")
        '\\frac{1}{2}'
    """
    places = boxes(text)
    return text[slice(*places[-1])] if places else None


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


def label_expression(label: str) -> str:
    """Put a label into a box: from bare LaTeX, Math-Verify would read only a number, here the 2 of ``2\\sqrt{3}``."""
    text = label.strip()
    content = last_box(text)
    inline = _INLINE_MATH.fullmatch(text)
    if content is None and inline is None and _DOLLAR.search(text):
        return text
    if content is None:
        content = inline[1] if inline else text
    return boxed(content)


def same_integer(answer: str, label: str) -> bool | None:
    """Compare two integers written plainly; None if one of them is written otherwise, for Math-Verify to compare.

    Integers without leading zeros are equal if and only if their digits are. This takes 1 us; a worker takes 0.3 ms.
    """
    if _PLAIN_INTEGER.fullmatch(answer.strip()) and _PLAIN_INTEGER.fullmatch(label.strip()):
        return answer.strip() == label.strip()
    return None
