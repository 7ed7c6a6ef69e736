"""Checks of what a trainer hands to the core: texts, numbers, an estimator; a ValueError is one line."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import estimators
from openrlhf_dbb.estimators import RewardEstimator

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

Key = tuple[str, str]
"""A prompt's text and its label."""

Column = Any
"""A value for each rollout, as numpy takes them; an array (R,) once it is checked. None where nothing is known."""


def keys_of(prompts: Sequence[str], labels: Sequence[str], name: str = "labels") -> list[Key]:
    """Return prompts with their labels; raise ValueError if their numbers differ, or are 0, or one is not a str."""
    for of, texts in (("prompts", prompts), (name, labels)):
        if isinstance(texts, str) or not hasattr(texts, "__len__"):
            raise ValueError(f"{of} = {texts!r:.80} is not a list; pass a list of str")
        if others := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"{of} hold {others[0]!r:.80}, which is not a str; pass texts")
    if len(prompts) != len(labels):
        raise ValueError(f"there are {len(prompts)} prompts and {len(labels)} {name}; pass one for each prompt")
    if not len(prompts):
        raise ValueError("there are no prompts; pass all that will be trained on, with their labels")
    return list(zip(prompts, labels, strict=True))


def numbers(name: str, values: Any) -> Floats:
    """Return finite numbers as an array, NaN for None; raise ValueError for anything else."""
    try:
        array = np.array(values, dtype=np.float64)  # None becomes NaN, and "1" would become 1
        refused = np.asarray(values).dtype.kind in "US" or np.isinf(array).any()
    except (TypeError, ValueError, OverflowError):
        refused = True
    if refused:
        found = " ".join(repr(values).split())
        raise ValueError(f"{name} = {found:.200} holds other values than finite numbers, NaN and None; pass numbers")
    return array


def whole(name: str, value: Any) -> int:
    """Return a whole number from 0 to 2**62 as an int; raise ValueError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= 2**62:
        raise ValueError(f"{name} is {value!r:.80}; give a whole number from 0 to 2**62")
    return number


def column(name: str, values: Any, size: int, within: tuple[float, float] | None = None) -> Floats:
    """Return a column of numbers; those of an interval are never missing."""
    values_R = numbers(name, values)
    if values_R.shape != (size,):
        raise ValueError(f"{name} has shape {values_R.shape}; pass one value for each of the {size} rollouts")
    if within and len(wrong := values_R[~((values_R >= within[0]) & (values_R <= within[1]))]):
        raise ValueError(f"{name} holds {wrong[0]:g}; give numbers from {within[0]:g} to {within[1]:g}")
    return values_R


def known_pass_rates(values: Any, prompts: int) -> Floats:
    """Return successes and attempts of each prompt, (P, 2), if there is a rate in [0, 1], of 1 attempt or more."""
    known_P_2 = numbers("pass_rates", values)
    if known_P_2.shape != (prompts, 2):
        raise ValueError(f"pass_rates have shape {known_P_2.shape}; pass successes and attempts of {prompts} prompts")
    successes, attempts = known_P_2[~np.isnan(known_P_2).any(axis=1)].T
    if not len(attempts) or not ((attempts >= 1) & (successes >= 0) & (successes <= attempts)).all():
        raise ValueError("pass_rates need 0 <= successes <= attempts and 1 attempt or more, for one prompt at least")
    return known_P_2


def as_estimator(estimator: str | RewardEstimator, parameters: Mapping[str, Any] | None) -> RewardEstimator:
    """Return an estimator that is given by name and parameters, or as an object."""
    if isinstance(estimator, str):
        return estimators.build(estimator, **(parameters or {}))
    if not isinstance(estimator, RewardEstimator):
        raise ValueError(f"estimator {estimator!r} is no estimator; give a name, or an object of an estimator's class")
    if parameters is not None:
        raise ValueError(f"parameters {dict(parameters)} belong to an estimator's name; the object has its own")
    return estimator
