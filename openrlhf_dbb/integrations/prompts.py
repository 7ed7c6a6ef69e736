"""Which prompt a row is about: its text and its label, the same in every trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def text_of(prompt: Any) -> str:
    """A prompt as one text: text as it is, a single user message as its text, other messages as JSON.

    Not as the chat template shows them: some templates put in the date, and every day would have prompts of its own.

    Raises:
        ValueError: messages with something that is neither text nor JSON, such as an image.

    Example:
        >>> text_of("1+1="), text_of([{"role": "user", "content": "1+1="}])
        ('1+1=', '1+1=')
        >>> text_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}])
        '[{"content": "Be brief.", "role": "system"}, {"content": "1+1=", "role": "user"}]'
    """
    if isinstance(prompt, str):
        return prompt
    messages = [{key: value for key, value in dict(message).items() if value is not None} for message in prompt]
    if len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user":
        content = messages[0]["content"]
        if isinstance(content, str):
            return content
    try:
        return json.dumps(messages, ensure_ascii=False, sort_keys=True)
    except TypeError as error:
        raise ValueError(
            f"a prompt's messages are not text ({error}), and posteriors tell prompts apart by text and label"
        ) from None


def label_of(label: Any) -> str:
    """A label as text: text as it is, other values as JSON, "" for None.

    Example:
        >>> label_of("12"), label_of(12), label_of(["a", "b"]), label_of(None)
        ('12', '12', '["a", "b"]', '')
    """
    if label is None or isinstance(label, str):
        return label or ""
    return json.dumps(label, ensure_ascii=False, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
