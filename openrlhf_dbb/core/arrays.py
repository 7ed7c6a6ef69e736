"""Checks what comes with a step, and makes arrays of it: prompts, labels, and a value for each rollout.

Axes: R rollouts (rows) of the step.
"""

import operator
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.texts import is_missing
from openrlhf_dbb.estimators.base import exact

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

Key = tuple[str, str]
"""A prompt's text and its label."""

Column = Any
"""A value for each rollout, as numpy takes them; an array (R,) once it is checked. None where nothing is known."""

_NO_LISTS = str, bytes, Mapping, set, frozenset  # a set has no order


def keys_of(prompts: Iterable[str], labels: Iterable[str]) -> list[Key]:
    """Return prompts with their labels; raise ValueError if their numbers differ, or are 0, or one is not a str."""
    prompts = texts_of("prompts", prompts)
    labels = texts_of("labels", labels)
    same_number("labels", len(labels), len(prompts))
    if not prompts:
        raise ValueError(
            "there are no prompts; pass all that will be trained on, with their labels"
        )
    return list(zip(prompts, labels, strict=True))


def texts_of(name: str, values: Iterable[str]) -> list[str]:
    """Return the texts of a list, a column, a view or a generator; ValueError if one is no str."""
    if isinstance(values, _NO_LISTS) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} = {values!r:.80} is not a list; pass a list of str")
    texts = list(values)
    for row, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"row {row} of {name} is {text!r:.80}, which is not a str; pass texts")
    return texts


def same_number(name: str, number: int, prompts: int) -> None:
    """Raise ValueError unless there are as many of the things that ``name`` names as prompts."""
    if number != prompts:
        counts = f"{prompts} prompts and {number} {name}"
        raise ValueError(f"there are {counts}; pass one for each prompt")


def numbers(name: str, values: Any) -> Floats:
    """Return finite numbers as an array, NaN for None and NaN; raise ValueError for anything else.

    Lists, tensors of torch on any device, columns of pandas, and iterators of numbers are read.
    """
    if type(values) is np.ndarray and values.dtype.kind in "biuf":
        array = values.astype(np.float64)
    else:
        listed = _as_floats(name, values, "")
        try:
            array = np.array(listed, dtype=np.float64)
        except ValueError:
            problem = f"the rows of {name} have different lengths"
            raise ValueError(f"{problem}; give rows of one length") from None
    if np.isinf(array).any():
        _as_floats(name, array.tolist(), "")  # raises
    return array


def _as_floats(name: str, values: Any, place: str) -> Any:
    """Return a number as a float, NaN for a missing one, and other values as lists of these."""
    if hasattr(values, "tolist"):  # numpy, torch, pandas
        values = values.tolist()
    elif hasattr(values, "to_numpy"):  # a table of pandas
        values = values.to_numpy().tolist()
    if isinstance(values, Iterable) and not isinstance(values, _NO_LISTS):
        rows = enumerate(values, 1)
        return [_as_floats(name, value, place or f"row {row} of ") for row, value in rows]
    number = _as_float(values)
    if np.isinf(number):
        allowed = "finite numbers, and None or NaN where one is missing"
        raise ValueError(f"{place}{name} is {values!r:.80}; give {allowed}")
    return number


def _as_float(value: Any) -> float:
    """Return a number as a float: NaN for a missing one, infinity for what is no finite number."""
    if is_missing(value):
        return np.nan
    if not isinstance(value, (Real, Decimal)):
        return np.inf
    try:
        return float(value)
    except OverflowError:
        return np.inf


def whole(name: str, value: Any) -> int:
    """Return a whole number from 0 to 2**62 as an int; raise ValueError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= 2**62:
        raise ValueError(f"{name} is {value!r:.80}; give a whole number from 0 to 2**62")
    return number


def column(name: str, values: Any, size: int) -> Floats:
    """Return a column of finite numbers (size,), NaN where missing; ValueError for another one."""
    values_R = numbers(name, values)
    if values_R.shape != (size,):
        expected = f"pass one value for each of the {size} rollouts"
        raise ValueError(f"{name} has shape {values_R.shape}; {expected}")
    return values_R


def within(
    name: str,
    values: Any,
    size: int,
    lowest: float,
    highest: float,
    *,
    above: bool = False,
) -> Floats | None:
    """Return a column of numbers from ``lowest`` to ``highest``; above ``lowest`` if ``above``."""
    if values is None:
        return None
    values_R = column(name, values, size)
    good_R = (values_R > lowest) if above else (values_R >= lowest)
    good_R &= values_R <= highest
    start = "(" if above else "["
    end = ")" if highest == np.inf else "]"
    _refuse_rows(name, values_R, ~good_R, f"numbers in {start}{lowest:g}, {highest:g}{end}")
    return values_R


def token_counts(values: Any, size: int) -> Positions:
    """Return a column of whole numbers of tokens; zeros without one."""
    values_R = within("tokens", values, size, 0, 2**62)
    if values_R is None:
        return np.zeros(size, dtype=np.int64)
    _refuse_rows("tokens", values_R, values_R != np.floor(values_R), "whole numbers")
    return values_R.astype(np.int64)


def flags(name: str, values: Any, size: int) -> NDArray[np.bool_]:
    """Return a column of True and False; all are True without one."""
    if values is None:
        return np.ones(size, dtype=np.bool_)
    values_R = column(name, values, size)
    _refuse_rows(name, values_R, (values_R != 0) & (values_R != 1), "True or False")
    return values_R.astype(np.bool_)


def _refuse_rows(name: str, values_R: Floats, wrong_R: NDArray[np.bool_], allowed: str) -> None:
    """Raise ValueError that names the first wrong row, its value and what is allowed."""
    if wrong_R.any():
        row = int(wrong_R.argmax())
        raise ValueError(f"row {row + 1} of {name} is {exact(values_R[row])}; give {allowed}")
