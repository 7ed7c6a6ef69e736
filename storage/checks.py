"""Check columns; errors name step, column, prompt and value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import StoreError


def check_name(what: str, name: str) -> None:
    """Raise StoreError if the name of a ``what`` is empty, not printable, or has spaces around it."""
    if not name or not name.isprintable() or name != name.strip():
        raise StoreError(f"the {what}'s name {name!r} is empty, not printable or has spaces around it; choose another")


def integers(name: str, values: Any) -> NDArray[np.int64]:
    """The values as a vector of int64.

    Raises:
        StoreError: they are not one-dimensional, or not integers.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise StoreError(f"{name} has shape {array.shape}; it must be (P,), one value per prompt")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise StoreError(f"{name} has type {array.dtype}; integers (int64) are needed")
    return array.astype(np.int64)


def sorted_ids(step: int, name: str, values: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt ids in ascending order, and the positions they came from; both (P,).

    Raises:
        StoreError: not a vector of integers, or a duplicate prompt.
    """
    ids = integers(name, values)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    twice = ids[1:][ids[1:] == ids[:-1]]
    if twice.size:
        raise StoreError(f"step {step}: {name} holds prompt {twice[0]} more than once; merge its rows")
    return ids, order


def counts(step: int, name: str, values: Any, size: int, lowest: int) -> NDArray[np.int64]:
    """The values as ``size`` integers; raises StoreError if they are not, or one is below ``lowest``."""
    array = integers(name, values)
    _check_shape(step, name, array, (size,))
    if size and array.min() < lowest:
        at = int(array.argmin())
        raise StoreError(f"step {step}: {name}[{at}] must be at least {lowest}, got {array[at]}")
    return array


def reals(step: int, name: str, values: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The values as float64; raises StoreError if the shape differs."""
    array = np.asarray(values, dtype=np.float64)
    _check_shape(step, name, array, shape)
    return array


def check_finite(
    step: int,
    name: str,
    ids: NDArray[np.int64],
    values: NDArray[np.float64],
    rows: NDArray[np.bool_] | None = None,
) -> None:
    """Raise StoreError if a row of ``values`` (of those marked in ``rows``) holds a value that is not finite."""
    finite = np.isfinite(values)
    bad = ~(finite.all(axis=1) if values.ndim > 1 else finite)
    if rows is not None:
        bad &= rows
    if bad.any():
        at = int(bad.argmax())
        raise StoreError(f"step {step}: {name} of prompt {ids[at]} is {values[at].tolist()}; it must be finite")


def policy_versions(
    step: int, name: str, values: Any, ids: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Policy versions in ``order``, as float64, NaN for the step's own policy (step - 1); None if all are of it.

    Args:
        ids: (P,) prompt ids, in that order already.

    Raises:
        StoreError: the shape differs, or a version is neither NaN nor in [0, step - 1].
    """
    if values is None:
        return None
    versions = reals(step, name, values, ids.shape)[order]
    bad = ~(np.isnan(versions) | ((versions >= 0) & (versions <= step - 1)))
    if bad.any():
        at = int(bad.argmax())
        raise StoreError(
            f"step {step}: {name} of prompt {ids[at]} is {versions[at]}; it must be from 0 to {step - 1}, or NaN for "
            "the step's own policy"
        )
    versions[versions == step - 1] = np.nan
    return None if np.isnan(versions).all() else versions


def inclusions(step: int, values: Any, ids: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Probabilities with which prompts were drawn, in ``order``, as float64.

    Args:
        ids: (P,) prompt ids, in that order already.

    Raises:
        StoreError: the shape differs, or a probability is not in (0, 1].
    """
    probabilities = reals(step, "inclusion", values, ids.shape)[order]
    bad = ~((probabilities > 0) & (probabilities <= 1))
    if bad.any():
        at = int(bad.argmax())
        raise StoreError(f"step {step}: inclusion of prompt {ids[at]} is {probabilities[at]}; it must be in (0, 1]")
    return probabilities


def _check_shape(step: int, name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise StoreError(f"step {step}: {name} has shape {values.shape}; it must be {shape}, one row per prompt id")
