"""What goes into a store and what comes out: plain records around numpy arrays.

Axes in comments: P prompts, F state fields of the run's estimator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import StoreError

_COLUMN_FIELDS = ("alpha", "beta")


@dataclass(frozen=True)
class RunRecord:
    """One training run, as stored.

    Attributes:
        run_id: number in its database; uuid: 32 hex digits, unique everywhere; name: unique in its database.
        status: "running" or "finished".
        last_step: the last recorded step, 0 before the first.
        estimator, estimator_version, parameters, state_fields: what computes the posteriors.
        model, dataset, dataset_digest, reward, config: what is trained, as told by the trainer.
        created_at: UTC, ISO 8601.
        parent: None, or where the run was warm-started from: name, uuid, step, weight, database.
    """

    run_id: int
    uuid: str
    name: str
    status: str
    last_step: int
    estimator: str
    estimator_version: int
    parameters: dict[str, Any]
    state_fields: tuple[str, ...]
    model: str
    dataset: str
    dataset_digest: str
    reward: str
    config: dict[str, Any]
    created_at: str
    parent: dict[str, Any] | None


@dataclass(frozen=True)
class WarmStart:
    """Outcome of a warm start: prompts with and without a posterior in ``source``, as it was then."""

    matched: int
    unmatched: int
    source: RunRecord


@dataclass(frozen=True)
class PosteriorTable:
    """Current posteriors, one row per prompt asked for.

    Attributes:
        state: (P, F) float64; a NaN row where the run has no posterior of the prompt.
        visits: (P,) int64, steps of this run in which the prompt was trained on.
        step: (P,) int64, the last such step; 0: warm start only; -1: no posterior.
    """

    state: NDArray[np.float64]
    visits: NDArray[np.int64]
    step: NDArray[np.int64]


@dataclass
class StepRows:
    """The posteriors that one training step changed, with what they were before.

    Attributes:
        prompt_ids: (P,) int, unique.
        rollouts: (P,) int, >= 1, rewards seen in this step.
        successes: (P,) float, their sum.
        mean, variance: (P,) float, the estimate of one reward that the step was scored with.
        state: (P, F) float, the posterior after the step.
        previous_state: (P, F) float, before it; NaN rows where there was none.
        previous_step: (P,) int, as ``PosteriorTable.step``.
    """

    prompt_ids: NDArray[np.int64]
    rollouts: NDArray[np.int64]
    successes: NDArray[np.float64]
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    state: NDArray[np.float64]
    previous_state: NDArray[np.float64]
    previous_step: NDArray[np.int64]

    def checked(self, step: int, num_fields: int) -> StepRows:
        """A copy with exact types, sorted by prompt id.

        Raises:
            StoreError: a shape, a type, a value that is not finite, or a prompt that comes twice.
        """
        ids = whole_numbers("prompt_ids", self.prompt_ids)
        size = len(ids)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if size > 1 and (ids[1:] == ids[:-1]).any():
            twice = ids[1:][ids[1:] == ids[:-1]][0]
            raise StoreError(f"step {step} holds prompt {twice} more than once; merge its rollouts into one row")

        def whole(name: str, lowest: int) -> NDArray[np.int64]:
            values = whole_numbers(name, getattr(self, name))
            _check_shape(step, name, values, (size,))
            if size and values.min() < lowest:
                at = int(values.argmin())
                raise StoreError(f"step {step}: {name}[{at}] = {values[at]} is below {lowest}")
            return values[order]

        def real(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
            values = np.asarray(getattr(self, name), dtype=np.float64)
            _check_shape(step, name, values, shape)
            return values[order]

        rows = StepRows(
            prompt_ids=ids,
            rollouts=whole("rollouts", 1),
            successes=real("successes", (size,)),
            mean=real("mean", (size,)),
            variance=real("variance", (size,)),
            state=real("state", (size, num_fields)),
            previous_state=real("previous_state", (size, num_fields)),
            previous_step=whole("previous_step", -1),
        )
        for name in ("successes", "mean", "variance", "state"):
            _check_finite(step, name, ids, getattr(rows, name), np.ones(size, dtype=bool))
        # A new prompt may come with its prior or with NaN; one that was there before must say what it was.
        known = (rows.previous_step >= 0) | ~np.isnan(rows.previous_state).all(axis=1)
        _check_finite(step, "previous_state", ids, rows.previous_state, known)
        late = rows.previous_step >= step
        if late.any():
            prompt, previous = ids[late][0], rows.previous_step[late][0]
            raise StoreError(f"step {step}: previous_step of prompt {prompt} is {previous}, not before {step}")
        return rows

    def digest(self, step: int) -> bytes:
        """16 bytes that tell two contents of a step apart; of checked rows only (sorted, exact types)."""
        digest = hashlib.blake2b(f"step rows 1:{step}:{self.state.shape}".encode(), digest_size=16)
        for values in vars(self).values():
            digest.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes())
        return digest.digest()


@dataclass(frozen=True)
class StateLayout:
    """Where an estimator's state fields are kept: ``alpha`` and ``beta`` in columns, the rest packed.

    The rest is little-endian float64, in the order of ``fields``.
    """

    fields: tuple[str, ...]

    @property
    def packed(self) -> list[int]:
        """Positions of the packed fields."""
        return [i for i, name in enumerate(self.fields) if name not in _COLUMN_FIELDS]

    def to_columns(self, state: NDArray[np.float64]) -> list[Sequence[Any]]:
        """(P, F) state -> the columns alpha, beta, state as lists of P; None for what there is not."""
        absent = np.logical_and.reduce(np.isnan(state), axis=1).tolist()
        columns: list[Sequence[Any]] = []
        for name in _COLUMN_FIELDS:
            values: list[Any] = [None] * len(state)
            if name in self.fields:
                column = state[:, self.fields.index(name)].tolist()
                values = [None if gone else value for value, gone in zip(column, absent, strict=True)]
            columns.append(values)
        rest = np.ascontiguousarray(state[:, self.packed], dtype="<f8")
        has_rest = bool(self.packed)
        columns.append(
            [row.tobytes() if has_rest and not gone else None for row, gone in zip(rest, absent, strict=True)]
        )
        return columns

    def from_columns(self, rows: Sequence[Sequence[Any]]) -> NDArray[np.float64]:
        """Rows (alpha, beta, state) -> (P, F) state."""
        state = np.full((len(rows), len(self.fields)), np.nan)
        for position, name in enumerate(_COLUMN_FIELDS):
            if name in self.fields:
                state[:, self.fields.index(name)] = [row[position] for row in rows]
        if self.packed:
            rest = np.frombuffer(b"".join(bytes(row[2]) for row in rows), dtype="<f8")
            state[:, self.packed] = rest.reshape(len(rows), len(self.packed))
        return state


def history_rows(run_id: int, step: int, rows: StepRows, layout: StateLayout) -> Iterator[tuple[Any, ...]]:
    """The rows of ``dbb_history``, in the order of its columns."""
    return zip(
        [run_id] * len(rows.prompt_ids),
        [step] * len(rows.prompt_ids),
        rows.prompt_ids.tolist(),
        rows.rollouts.tolist(),
        rows.successes.tolist(),
        *layout.to_columns(rows.state),
        rows.mean.tolist(),
        rows.variance.tolist(),
        *layout.to_columns(rows.previous_state),
        rows.previous_step.tolist(),
        strict=True,
    )


def whole_numbers(name: str, values: Any) -> NDArray[np.int64]:
    """The values as a vector of int64.

    Raises:
        StoreError: they are not one-dimensional, or not whole numbers.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise StoreError(f"{name} has shape {array.shape}; one number per prompt is needed")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise StoreError(f"{name} has type {array.dtype}; whole numbers (int64) are needed")
    return array.astype(np.int64)


def _check_shape(step: int, name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise StoreError(f"step {step}: {name} has shape {values.shape}; {shape} is needed, a row per prompt id")


def _check_finite(
    step: int, name: str, ids: NDArray[np.int64], values: NDArray[np.float64], rows: NDArray[np.bool_]
) -> None:
    finite = np.isfinite(values)
    bad = rows & ~(finite.all(axis=1) if values.ndim > 1 else finite)
    if bad.any():
        at = int(bad.argmax())
        raise StoreError(f"step {step}: {name} of prompt {ids[at]} is {values[at].tolist()}; finite numbers are needed")
