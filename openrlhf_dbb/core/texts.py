"""The one text of a prompt and of a label, by which every door finds the same posterior.

``train``, TRL, verl, ``import`` and ``evaluate`` read rows of any kind with these functions.
"""

import json
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

_DECIMAL = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE
)


def prompt_text(prompt: Any) -> str:
    """Return a prompt as one text: a single user message as its text, other messages as JSON.

    Raises:
        ValueError: the prompt is neither a text nor messages, or a message holds an image.
    """
    # The chat template is not applied: some templates insert the date, and so make new prompts
    # every day.
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray)):
        return _decoded(prompt, "prompt")
    if isinstance(prompt, Mapping) or not hasattr(prompt, "__iter__"):
        value = f"{prompt!r:.80}, a {type(prompt).__name__}"
        raise ValueError(f"a prompt is {value}; give a text, or a list of messages")
    messages = list(map(_plain_message, prompt))
    content = messages[0].get("content") if len(messages) == 1 else None
    if isinstance(content, str) and messages[0] == {"role": "user", "content": content}:
        return content
    try:
        return json.dumps(messages, ensure_ascii=False, sort_keys=True)
    except TypeError as error:
        problem = "a prompt's messages are no text, by which posteriors tell prompts apart"
        raise ValueError(f"{problem} ({error})") from None


def _plain_message(message: Any) -> dict[str, Any]:
    """Return a message without what a table filled with None; text parts are one text."""
    if not isinstance(message, Mapping):
        problem = f"a prompt's message is {message!r:.80}"
        raise ValueError(f"{problem}; give a dictionary with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = content_text(plain["content"])
    return plain


def content_text(content: Any) -> Any:
    """Return a message's content: parts that are all texts as one text; anything else as it is.

    Example:
        >>> content_text([{"type": "text", "text": "1 + 1"}, {"type": "text", "text": " = ?"}])
        '1 + 1 = ?'
    """
    if not isinstance(content, (list, tuple, np.ndarray)) or len(content) == 0:
        return content
    texts = []
    for part in content:
        entries = {}
        if isinstance(part, Mapping):
            entries = {key: value for key, value in part.items() if value is not None}
        is_text = entries.keys() == {"type", "text"} and entries["type"] == "text"
        if not is_text or not isinstance(entries["text"], str):
            return content
        texts.append(entries["text"])
    return "".join(texts)


def response_text(response: Any) -> str:
    """Return a response, or the messages of one as in TRL's tables, as text: "" if it is missing."""
    if not isinstance(response, list):
        return str(response or "")
    texts = []
    for message in response:
        content = message.get("content") if isinstance(message, Mapping) else message
        texts.append(str(content or ""))
    return "\n".join(texts)


def label_text(label: Any) -> str:
    """Return a label as text: "" if it is missing; lists, dictionaries and booleans as JSON.

    A float is its shortest decimal, without ".0", as a column of integers with gaps holds floats.
    A Decimal keeps its zeros. Bytes are UTF-8. A text stays as it is.

    Raises:
        ValueError: the label's bytes are not UTF-8.

    Example:
        >>> [label_text(label) for label in (7.0, 1e-5, Decimal("2.50"), b"12", True, ["7"], None)]
        ['7', '0.00001', '2.50', '12', 'true', '["7"]', '']
    """
    if isinstance(label, str):
        return label
    if is_missing(label):
        return ""
    if isinstance(label, (bytes, bytearray)):
        return _decoded(label, "label")
    if isinstance(label, Decimal):
        return f"{label:f}"
    scalar = _python_scalar(label)
    if isinstance(scalar, (float, np.floating)):
        return f"{Decimal(str(scalar + 0.0)):f}".removesuffix(".0")  # -0.0 + 0.0 is 0.0
    if isinstance(scalar, (bool, list, tuple, Mapping)):
        return json.dumps(scalar, ensure_ascii=False, sort_keys=True, default=_plain)
    return label_text(scalar) if isinstance(scalar, (str, bytes)) else str(scalar)


def number_of(value: Any) -> float:
    """Return a number of a log or of a data set, which may be written as a decimal.

    Raises:
        ValueError: it is no decimal, such as 1_000, 1,5, 0x10 or digits of another script, some of
            which Python reads as numbers.

    Example:
        >>> [number_of(value) for value in (2, " 2.5e0\\n", b"-.5", "nan")]
        [2.0, 2.5, -0.5, nan]
    """
    if isinstance(value, (bytes, bytearray)):
        value = _decoded(value, "number")
    if isinstance(value, str) and not _DECIMAL.fullmatch(value.strip(" \t\r\n")):
        raise ValueError(f"{value!r:.80} is no decimal of the digits 0 to 9")
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except TypeError:
        raise ValueError(f"a {type(value).__name__} is no number") from None


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, or the missing value of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    number = _python_scalar(value)
    if isinstance(number, Decimal):
        return number.is_nan()
    return isinstance(number, (float, np.floating)) and math.isnan(number)


def _python_scalar(value: Any) -> Any:
    """Return a number of numpy or torch as Python's, and an array as a list."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "tolist") or isinstance(value, np.datetime64):
        return value
    plain = value.tolist()
    kind = str(value.dtype).removeprefix("torch.")
    return in_type(plain, kind) if isinstance(plain, float) else plain


def in_type(number: float, kind: str) -> Any:
    """Return a number of a type such as float16 as one whose text is its shortest decimal there.

    Example:
        >>> [str(in_type(0.0999755859375, kind)) for kind in ("float16", "bfloat16", "float64")]
        ['0.1', '0.1', '0.0999755859375']
    """
    if kind in ("float16", "float32"):
        return np.dtype(kind).type(number)
    if kind != "bfloat16" or not math.isfinite(number):
        return number
    for digits in range(1, 17):
        short = float(f"{number:.{digits}g}")
        mantissa, exponent = math.frexp(short)
        if math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8) == number:  # of 8 bits
            return short
    return number


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()  # Parquet gives numpy's arrays and numbers
    return label_text(value)


def _decoded(value: bytes | bytearray, name: str) -> str:
    try:
        return value.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"a {name} is the bytes {bytes(value)!r:.80}, which are not UTF-8 ({error}); write text"
        ) from None


def contradictions(
    prompts: Sequence[Any], labels: Sequence[str], places: Iterable[str] | None = None
) -> dict[str, str]:
    """Return the rows whose prompt an earlier row has with another label, by place, and why.

    A posterior belongs to one prompt with one label. Blanks around a label make no other label.
    ``places`` names the rows; by default they are "row 1", "row 2" and so on.
    """
    if places is None:
        places = (f"row {number}" for number in range(1, len(labels) + 1))
    first: dict[str, tuple[str, str]] = {}
    bad = {}
    for place, prompt, label in zip(places, prompts, labels, strict=True):
        answer = label.strip()
        earlier, other = first.setdefault(prompt_text(prompt), (place, answer))
        if other != answer:
            here = f"its label is {answer!r:.80}"
            bad[place] = f"{here}, but the same prompt in {earlier} has {other!r:.80}"
    return bad


def refuse_contradictions(prompts: Sequence[Any], labels: Sequence[str]) -> None:
    """Raise ValueError if a prompt has two labels."""
    bad = contradictions(prompts, labels)
    if bad:
        raise ValueError(unusable(bad, len(prompts)))


def unusable(bad: Mapping[str, str], total: int) -> str:
    """Return a sentence on rows that cannot be used; ``bad`` has the reason of each."""
    shown = [f"{place}: {reason}" for place, reason in islice(bad.items(), 5)]
    if len(bad) > 5:
        shown.append("...")
    return f"{len(bad)} of {total} rows cannot be used: {'; '.join(shown)}; fix or drop them"


def as_json(value: Any) -> Any:
    """Return a value as JSON can hold it: infinities, NaN and objects become text.

    Example:
        >>> as_json({"clip": math.inf, "betas": (0.9, np.float32(0.5)), 7: Decimal("0.5")})
        {'clip': 'inf', 'betas': [0.9, 0.5], '7': '0.5'}
    """
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return list(map(as_json, value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(as_json, value), key=str)
    entries = _entries(value)
    if entries is None:
        return _object_as_json(value)
    return {str(name): as_json(entry) for name, entry in entries.items()}


def _object_as_json(value: Any) -> Any:
    try:
        if hasattr(value, "tolist") and not isinstance(value, type):  # numpy, torch
            return as_json(value.tolist())
        return str(value)
    except Exception:  # an object may do anything here, and no run depends on it
        return f"a {type(value).__name__}"


def _entries(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a dictionary, a namespace or a dataclass; None for another value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (SimpleNamespace, Namespace)):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: getattr(value, part.name) for part in fields(value)}
    return None
