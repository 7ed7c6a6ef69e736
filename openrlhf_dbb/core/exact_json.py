"""JSON that gives a strategy's state back exactly: keys that are numbers, tuples, arrays, random generators.

No pickle, which could run code. A value that is not JSON's own is an object ``{"python": kind, "value": parts}``.
"""

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from openrlhf_dbb.core.drawn import Drawn

_KIND = "python"
_VALUE = "value"
_OLD_GENERATOR = "bit_generator"  # the key by which older checkpoints tell a generator's state
# What a text that somebody has edited raises beside ValueError
_UNREADABLE = (
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
)
_PLAIN = (type(None), bool, int, float, str)
_WORDS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", Drawn: "Drawn"}


def _drawn(values: list[Any]) -> Drawn:
    """Return a draw; an older checkpoint has fewer values of it."""
    return Drawn(*values)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Drawn": _drawn,
    "dict": dict,
}
_KINDS = (
    "numbers, texts, lists, tuples, sets, dictionaries, numpy's arrays and its random generators"
)


def dumps(value: Any, name: str) -> str:
    """Return ``value`` as JSON from which :func:`loads` makes an equal value of the same types.

    Raises:
        ValueError: a part of ``value`` is of a type that cannot be kept; the message calls the value ``name``.
    """
    return json.dumps(_encoded(value, name))


def loads(text: str) -> Any:
    """Return what :func:`dumps` was given, also what older checkpoints hold.

    Raises:
        ValueError: the text is no JSON, or no such JSON.
    """
    try:
        return json.loads(text, object_hook=_decoded)
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"it is no state of a strategy ({reason})") from None


def _encoded(value: Any, name: str) -> Any:
    kind = type(value)  # a subclass would come back as its base
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encoded(part, name) for part in value]
    if kind is dict:
        return _encoded_dictionary(value, name)
    if kind in _WORDS:
        return _of_kind(_WORDS[kind], [_encoded(part, name) for part in value])
    if kind is np.ndarray:
        return _of_kind("array", _bytes_of(value, name))
    if isinstance(value, np.generic):
        return _of_kind("scalar", _bytes_of(value, name))
    if kind is np.random.Generator:
        return _of_kind("generator", _encoded(value.bit_generator.state, name))
    shown = " ".join(repr(value).split())
    raise ValueError(
        f"{name} holds {shown:.80}, a {kind.__name__}, which JSON cannot keep; use {_KINDS}"
    )


def _encoded_dictionary(values: dict[Any, Any], name: str) -> Any:
    texts = all(type(key) is str for key in values)
    if texts and _KIND not in values and _OLD_GENERATOR not in values:
        return {key: _encoded(value, name) for key, value in values.items()}
    pairs = [[_encoded(key, name), _encoded(value, name)] for key, value in values.items()]
    return _of_kind("dict", pairs)


def _of_kind(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, _VALUE: value}


def _bytes_of(values: Any, name: str) -> str:
    """Return an array in numpy's file format: its type, shape, order and bytes."""
    file = io.BytesIO()
    try:
        np.save(file, values, allow_pickle=False)
    except ValueError:
        raise ValueError(
            f"{name} holds an array of objects, which JSON cannot keep; use {_KINDS}"
        ) from None
    return base64.b64encode(file.getvalue()).decode()


def _decoded(values: dict[str, Any]) -> Any:
    """Return what an object of JSON stands for; its parts are decoded already."""
    if _OLD_GENERATOR in values:
        return _generator(values)
    if _KIND not in values:
        return values
    kind = str(values[_KIND])
    value = values[_VALUE]
    if kind == "generator":
        return _generator(value)
    if kind in ("array", "scalar"):
        array = np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
        return array if kind == "array" else array[()]
    return _MAKERS[kind](value)


def _generator(state: dict[str, Any]) -> np.random.Generator:
    makers = {maker.__name__: maker for maker in np.random.BitGenerator.__subclasses__()}
    generator = np.random.Generator(makers[state[_OLD_GENERATOR]]())
    generator.bit_generator.state = state
    return generator
