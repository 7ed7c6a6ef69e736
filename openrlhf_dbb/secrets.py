"""Masks passwords, tokens and keys in whatever is stored, shown, or sent to a tracker."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

MASK = "***"
_URL = re.compile(r"://((?:(?!,[\w+.-]+://)\S)*)")  # it ends at a space, or at a comma before another URL
_QUERY = re.compile(r"([?#])(?!\*\*\*).+")
_SECRET = re.compile(
    r"(^|\.)key$|(api|access|secret|private)_?key$|(token|password|passwd|secret|credentials?|authorization)$"
    r"|(store\.url|warm_start_url)$",
    re.IGNORECASE,
)


def without_passwords(text: str) -> str:
    """Return the text with user, password, query and fragment of every URL in it masked.

    Example:
        >>> without_passwords("reward http://ann:p@ss/w@host/score?token=1,http://other/score#2")
        'reward http://***@host/score?***,http://other/score#***'
    """

    def masked(url: re.Match[str]) -> str:
        user, at, place = url[1].rpartition("@")  # a password may hold an @
        return "://" + (MASK + at if user else "") + _QUERY.sub(rf"\1{MASK}", place)

    return _URL.sub(masked, text)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a value with URLs masked, and keys, tokens and stores' URLs as a whole.

    Example:
        >>> without_secrets({"hub_token": "hf_1", "input_key": "question", "files": ["s3://key:secret@bucket/a"]})
        {'hub_token': '***', 'input_key': 'question', 'files': ['s3://***@bucket/a']}
    """
    if value and _SECRET.search(name):
        return MASK
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**without_secrets(vars(value)))
    if isinstance(value, Mapping):
        return {key: without_secrets(entry, str(key)) for key, entry in value.items()}
    return [without_secrets(entry) for entry in value] if isinstance(value, (list, tuple)) else value
