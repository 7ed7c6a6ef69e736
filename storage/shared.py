"""Run-wide state of an estimator: its text in the database, and the latest of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from storage.errors import StoreError

SharedState = dict[str, NDArray[np.float64]]
"""Vectors by name."""

# A step without run-wide state leaves it unchanged.
_NEWEST = text(
    """SELECT coalesce((SELECT shared FROM dbb_step WHERE run_id = :run AND shared IS NOT NULL
                        ORDER BY step DESC LIMIT 1), shared_start)
       FROM dbb_run WHERE run_id = :run"""
)


def checked_shared(step: int, shared: Mapping[str, Any]) -> SharedState:
    """A copy as float64, sorted by name.

    Raises:
        StoreError: not a vector, or a value that is not finite.
    """
    copy = {name: np.array(shared[name], dtype=np.float64) for name in sorted(shared)}
    for name, values in copy.items():
        if values.ndim != 1:
            raise StoreError(f"step {step}: shared[{name!r}] has shape {values.shape}; it must be a vector")
        bad = ~np.isfinite(values)
        if bad.any():
            at = int(bad.argmax())
            raise StoreError(f"step {step}: shared[{name!r}][{at}] is {values[at]}; it must be finite")
    return copy


def to_text(shared: SharedState) -> str | None:
    """JSON, with the shortest decimals that read back as the same float64; None if there is no run-wide state."""
    return json.dumps({name: values.tolist() for name, values in shared.items()}) if shared else None


def from_text(stored: str | None) -> SharedState | None:
    """The inverse of :func:`to_text`, bit for bit; None for None."""
    if stored is None:
        return None
    return {name: np.array(values, dtype=np.float64) for name, values in json.loads(stored).items()}


def newest(connection: Connection, run_id: int) -> str | None:
    """Text of a run's run-wide state: of its last step that has one, else of its start; None if it has none."""
    stored: str | None = connection.scalar(_NEWEST, {"run": run_id})
    return stored
