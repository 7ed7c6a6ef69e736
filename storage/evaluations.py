"""Check and write evaluations of a model: results by benchmark, evaluation run and prompt.

Axes: R evaluation runs (seeds), P prompts of a benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from storage.bulk import insert_columns
from storage.checks import check_name, integers
from storage.errors import StoreError
from storage.events import utc_now
from storage.prompts import storable

TRAINING = "training"
"""Name of the evaluations made during training."""

INTEGER = ("samples", "verified", "tokens", "truncated")
REAL = ("successes", "best", "majority")
"""What is stored of each prompt in each evaluation run: fields of :class:`EvaluationRows`, int64 and float64."""


@dataclass(frozen=True)
class EvaluationRows:
    """Results of a model on one benchmark, summed over the responses to each prompt.

    Attributes, each (R, P) except the first two:
        benchmark: its name.
        prompt_ids: (P,) int, in the benchmark's order; a prompt may occur twice.
        samples: int, >= 1, responses (N).
        verified: int, of these, responses with a score; the others are missing.
        successes: float, sum of the scores.
        best: float, the highest score; NaN if no response is verified.
        majority: float, score of the most frequent answer; NaN if no response is verified or no answer was extracted.
        tokens: int, >= 0, tokens of all responses.
        truncated: int, responses cut at the length limit.
    """

    benchmark: str
    prompt_ids: NDArray[np.int64]
    samples: NDArray[np.int64]
    verified: NDArray[np.int64]
    successes: NDArray[np.float64]
    best: NDArray[np.float64]
    majority: NDArray[np.float64]
    tokens: NDArray[np.int64]
    truncated: NDArray[np.int64]

    def checked(self) -> EvaluationRows:
        """A copy with exact types.

        Raises:
            StoreError: a name that is empty or not printable, no results, or a wrong shape, type or value.
        """
        check_name("benchmark", self.benchmark)
        ids = integers(f"benchmark {self.benchmark!r}: prompt_ids", self.prompt_ids)
        runs = len(np.atleast_1d(self.samples))
        if not ids.size or not runs:
            raise StoreError(f"benchmark {self.benchmark!r} has no results; leave it out of the evaluation")
        integer = {name: self._column(name, np.int64, (runs, len(ids))) for name in INTEGER}
        real = {name: self._column(name, np.float64, (runs, len(ids))) for name in REAL}
        rows = EvaluationRows(self.benchmark, ids, **integer, **real)
        rows._check_values()
        return rows

    def _column(self, name: str, kind: type, shape: tuple[int, int]) -> NDArray[Any]:
        array = np.asarray(getattr(self, name))
        where = f"benchmark {self.benchmark!r}: {name}"
        if array.shape != shape:
            raise StoreError(f"{where} has shape {array.shape}; it must be {shape}, evaluation runs x prompts")
        if kind is np.int64 and not np.issubdtype(array.dtype, np.integer):
            raise StoreError(f"{where} has type {array.dtype}; integers (int64) are needed")
        return array.astype(kind)

    def _check_values(self) -> None:
        none = self.verified == 0
        self._refuse("samples", self.samples < 1, "at least 1")
        for name in ("verified", "truncated"):
            self._refuse(name, (getattr(self, name) < 0) | (getattr(self, name) > self.samples), "0 to samples")
        self._refuse("tokens", self.tokens < 0, "at least 0")
        bad = ~np.isfinite(self.successes) | (none & (self.successes != 0))
        self._refuse("successes", bad, "finite, and 0 if none is verified")
        bad = np.where(none, ~np.isnan(self.best), ~np.isfinite(self.best))
        self._refuse("best", bad, "finite, or NaN if none is verified")
        bad = np.isinf(self.majority) | (none & ~np.isnan(self.majority))
        self._refuse("majority", bad, "finite or NaN, and NaN if none is verified")

    @staticmethod
    def bounds_sql() -> str:
        """SQL that is true of the rows of ``dbb_evaluation_result`` that :meth:`checked` accepts."""
        finite = " AND ".join(f"({name} IS NULL OR abs({name}) <= 1.7976931348623157e308)" for name in REAL)
        return f"""samples >= 1 AND verified BETWEEN 0 AND samples AND truncated BETWEEN 0 AND samples AND tokens >= 0
                   AND (best IS NULL) = (verified = 0)
                   AND (verified > 0 OR (successes = 0 AND majority IS NULL)) AND {finite}"""

    def _refuse(self, name: str, bad_R_P: NDArray[np.bool_], allowed: str) -> None:
        if bad_R_P.any():
            run, place = np.argwhere(bad_R_P)[0].tolist()
            raise StoreError(
                f"benchmark {self.benchmark!r}: {name} of prompt {self.prompt_ids[place]} (place {place}, evaluation "
                f"run {run}, {self.verified[run, place]} of {self.samples[run, place]} samples verified) is "
                f"{getattr(self, name)[run, place]}; it must be {allowed}"
            )


@dataclass(frozen=True)
class Description:
    """What was evaluated, as given to :meth:`storage.PosteriorStore.record_evaluation`; checked on creation."""

    run_id: int | None
    step: int | None
    name: str
    model: str
    config: Mapping[str, Any]
    generated_total: int | None

    def __post_init__(self) -> None:
        check_name("evaluation", self.name)
        for name in ("step", "generated_total"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise StoreError(f"evaluation {self.name!r}: {name} is {value}; it must be None or at least 0")
        if self.step is not None and self.run_id is None:
            raise StoreError(f"evaluation {self.name!r} has step {self.step} but no run; give the run too")

    def values(self) -> dict[str, Any]:
        """Columns of ``dbb_evaluation``."""
        try:
            config = json.dumps(dict(self.config), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"the config of evaluation {self.name!r} cannot be stored as JSON: {error}; pass plain numbers and text"
            ) from None
        numbers = {name: getattr(self, name) for name in ("run_id", "step", "generated_total")}
        numbers = {name: None if value is None else int(value) for name, value in numbers.items()}
        return numbers | {"name": self.name, "model": storable(self.model), "config": config}


def checked(rows: Sequence[EvaluationRows], name: str) -> list[EvaluationRows]:
    """The rows of an evaluation, one for each benchmark, with exact types; raises StoreError if they do not fit."""
    benchmarks = [each.benchmark for each in rows]
    twice = sorted({benchmark for benchmark in benchmarks if benchmarks.count(benchmark) > 1})
    if twice or not rows:
        found = f"benchmark {twice[0]!r} twice" if twice else "no benchmark"
        raise StoreError(f"evaluation {name!r} has {found}; give each benchmark once")
    return [each.checked() for each in rows]


def check_step(step: int | None, last_step: int, run: str) -> None:
    """Raise StoreError if a run has not reached the evaluated step."""
    if step is not None and step > last_step:
        raise StoreError(
            f"cannot store an evaluation of step {step}: run {run!r} is at step {last_step}; record the step first"
        )


_FIND = """
    SELECT evaluation_id FROM dbb_evaluation
    WHERE coalesce(run_id, -1) = coalesce(CAST(:run_id AS BIGINT), -1)
      AND coalesce(step, -1) = coalesce(CAST(:step AS BIGINT), -1) AND name = :name"""

_INSERT = """
    INSERT INTO dbb_evaluation (run_id, step, name, model, config, generated_total, created_at)
    VALUES (:run_id, :step, :name, :model, :config, :generated_total, :now)"""

_UPDATE = """
    UPDATE dbb_evaluation SET model = :model, config = :config, generated_total = :generated_total, created_at = :now
    WHERE evaluation_id = :id"""


def write(connection: Connection, values: dict[str, Any], rows: Sequence[EvaluationRows]) -> int:
    """Write checked rows in this transaction, which nobody else writes this evaluation in; the evaluation's id.

    One of the same run, step and name is replaced and keeps its id, so writing it again changes nothing.

    Args:
        values: from :meth:`Description.values`.
    """
    values = values | {"now": utc_now()}
    found = connection.scalar(text(_FIND), values)
    if found is None:
        connection.execute(text(_INSERT), values)
        found = connection.scalar(text(_FIND), values)
    else:
        connection.execute(text(_UPDATE), values | {"id": found})
        connection.execute(text("DELETE FROM dbb_evaluation_result WHERE evaluation_id = :id"), {"id": found})
    for each in rows:
        repeat, place = (indices.ravel() for indices in np.indices(each.samples.shape))
        columns = {name: getattr(each, name).ravel() for name in (*INTEGER, *REAL)}
        key = {"evaluation_id": int(found), "benchmark": each.benchmark, "repeat": repeat, "place": place}
        insert_columns(connection, "dbb_evaluation_result", key | {"prompt_id": each.prompt_ids[place]} | columns)
    return int(found)


def delete(connection: Connection, run_id: int, after_step: int | None = None) -> int:
    """Delete a run's evaluations (all, or those after ``after_step``) in this transaction; how many there were."""
    of_run = "WHERE run_id = :run" + ("" if after_step is None else " AND step > :step")
    key = {"run": run_id, "step": after_step}
    ids = f"SELECT evaluation_id FROM dbb_evaluation {of_run}"
    connection.execute(text(f"DELETE FROM dbb_evaluation_result WHERE evaluation_id IN ({ids})"), key)
    return connection.execute(text(f"DELETE FROM dbb_evaluation {of_run}"), key).rowcount
