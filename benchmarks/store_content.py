"""The rows that benchmarks/store.py stores: steps of scattered prompts, and the long history beside them.

Axes: P prompts, F state fields.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
from sqlalchemy import text

from openrlhf_dbb.core import KEEP
from storage import PosteriorStore, RolloutRows, Run, StepRows, UsageRows
from storage.usage import COUNTS

WIDE_STEP = 512  # prompts of a step of the long run
STRIDE = 611_953  # coprime with the number of prompts: steps of scattered prompts
PASSES = 5  # over the prompts of the long run
DBB = ("alpha", "beta")
TEXT = 1_000  # characters of a kept response


@dataclass
class Trainer:
    """Owns a run, keeps its state in memory, and makes steps of scattered prompts."""

    run: Run
    prompts: int
    fields: tuple[str, ...] = DBB
    shared: dict[str, int] = field(default_factory=dict)
    keep: int = KEEP

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.step, self.seen = self.run.record.last_step, 0
        table = self.run.load(np.arange(1, self.prompts + 1))
        self.state_P_F, self.last_P = table.state, table.step

    def rows(self, size: int) -> StepRows:
        """Return the rows of the next step."""
        self.step += 1
        at = (np.arange(self.seen, self.seen + size) % self.prompts) * STRIDE % self.prompts
        self.seen += size
        state_P_F = self.rng.random((size, len(self.fields))) + 0.5
        mean = state_P_F[:, 0] / 2
        rows = StepRows(
            prompt_ids=at + 1,
            rollouts=np.full(size, 8),
            successes=self.rng.integers(0, 9, size).astype(float),
            mean=mean,
            variance=mean * (1 - mean),
            state=state_P_F,
            previous_state=self.state_P_F[at],
            previous_step=self.last_P[at],
            shared={name: self.rng.random(length) for name, length in self.shared.items()},
            usage=self.usage(at + 1),
            kept=self.kept(at + 1) if self.keep else None,
        )
        self.state_P_F[at], self.last_P[at] = state_P_F, self.step
        return rows

    def usage(self, ids: np.ndarray[Any, Any]) -> UsageRows:
        """Return counts of 8 trained rollouts a prompt, half of them in zero-variance groups."""
        rollouts, tokens = np.full(len(ids), 8), self.rng.integers(800, 8_000, len(ids))
        zero_variance, none = self.rng.integers(0, 2, len(ids)) * 8, np.zeros(len(ids), dtype=np.int64)
        return UsageRows(
            prompt_ids=ids, generated=rollouts, generated_tokens=tokens, trained=rollouts, trained_tokens=tokens,
            zero_variance=zero_variance, informative=rollouts, rescued=zero_variance, replayed=none,
            replayed_tokens=none, skipped=none,
        )  # fmt: skip

    def kept(self, ids: np.ndarray[Any, Any]) -> RolloutRows:
        """Return groups of 8 responses of 1,000 characters."""
        size = min(self.keep, 8 * len(ids))
        place = np.arange(size)
        reward = self.rng.integers(0, 2, size).astype(float)
        letters = self.rng.integers(97, 123, (size, TEXT), dtype=np.uint8)
        return RolloutRows(
            prompt_ids=ids[place // 8], sample=place % 8, reward=reward, score=reward, advantage=reward - 0.5,
            length=self.rng.integers(100, 1_000, size), truncated=np.zeros(size), log_prob=-self.rng.random(size),
            text=[row.tobytes().decode() for row in letters],
        )  # fmt: skip

    def raw(self, rows: StepRows) -> tuple[Any, ...]:
        """Return the step's rows of dbb_step, history, usage and rollouts, in the order of the columns."""
        assert rows.usage is not None
        run, size = self.run.record.run_id, len(rows.prompt_ids)
        shared = {name: values.tolist() for name, values in rows.shared.items()}
        totals = (
            *(run, self.step, size, int(rows.rollouts.sum()), float(rows.successes.sum())),
            *(json.dumps(shared) if shared else None, bytes(16), "2026-01-01T00:00:00.000Z"),
            *rows.usage.totals().values(),
        )
        order = np.argsort(rows.prompt_ids)
        columns = [
            *([run] * size, [self.step] * size, rows.prompt_ids[order].tolist(), rows.rollouts[order].tolist()),
            rows.successes[order].tolist(),
            *_columns(rows.state[order]),
            *(rows.mean[order].tolist(), rows.variance[order].tolist()),
            *_columns(rows.previous_state[order]),
            rows.previous_step[order].tolist(),
            [None] * size,  # of the step's own policy
        ]
        counts = (getattr(rows.usage, name)[order].tolist() for name in ("prompt_ids", *COUNTS))
        usage = [[run] * size, [self.step] * size, *counts]
        kept = [] if rows.kept is None else _rollouts(run, self.step, rows.kept)
        return totals, list(zip(*columns, strict=True)), list(zip(*usage, strict=True)), kept


def _rollouts(run: int, step: int, rows: RolloutRows) -> list[tuple[Any, ...]]:
    numbers = (rows.prompt_ids, rows.sample, rows.reward, rows.score, rows.advantage, rows.length)
    columns = (*(each.tolist() for each in numbers), rows.truncated.astype(int).tolist(), rows.log_prob.tolist())
    return [(run, step, *row, None) for row in zip(*columns, rows.text, strict=True)]


def _columns(state_P_F: np.ndarray[Any, Any]) -> list[list[Any]]:
    rows = [
        (None, None, None) if np.isnan(row[0]) else (float(row[0]), float(row[1]), row[2:].astype("<f8").tobytes())
        for row in state_P_F
    ]
    return [[row[0] for row in rows], [row[1] for row in rows], [row[2] or None for row in rows]]


def create(store: PosteriorStore, name: str, fields: tuple[str, ...] = DBB) -> Run:
    return store.create_run(
        name, estimator="dbb", estimator_version=1, parameters={}, state_fields=fields, model="", dataset="",
        dataset_digest="", reward="", config={},
    )  # fmt: skip


def fill(
    store: PosteriorStore, run: Run, prompts: int, *, passes: int = PASSES, a_step: int = WIDE_STEP
) -> tuple[float, float]:
    """Give a run a long history: ``passes`` over its prompts; bytes per row of history and of usage."""
    run_id, rows = run.record.run_id, prompts * passes
    series = f"generate_series(0, CAST({rows - 1} AS BIGINT)) AS k(i)"
    if store.database.is_sqlite:
        series = (
            f"(WITH RECURSIVE k(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM k WHERE i + 1 < {rows}) SELECT i FROM k)"
        )
    before = "CASE WHEN i >= {0} THEN 0.5 + (i - {0}) % {1} END"
    with store.database.transaction(write=True) as connection:
        empty = _size(store, connection)
        connection.execute(
            text(
                f"""INSERT INTO dbb_history
                    SELECT {run_id}, i / {a_step} + 1, (i % {prompts}) * {STRIDE} % {prompts} + 1, 8, i % 9,
                           0.5 + i % 97, 0.5 + i % 89, NULL, 0.5 + (i % 7) / 64.0, 0.25, {before.format(prompts, 97)},
                           {before.format(prompts, 89)}, NULL,
                           CASE WHEN i >= {prompts} THEN (i - {prompts}) / {a_step} + 1 ELSE -1 END, NULL
                    FROM {series}"""
            )
        )
        with_history = _size(store, connection)
        connection.execute(
            text(
                f"""INSERT INTO dbb_usage
                    SELECT {run_id}, i / {a_step} + 1, (i % {prompts}) * {STRIDE} % {prompts} + 1,
                           8, 800 + i % 7200, 8, 800 + i % 7200, i % 2 * 8, 8, i % 2 * 8, 0, 0, 0
                    FROM {series}"""
            )
        )
        with_usage = _size(store, connection)
        connection.execute(
            text(
                f"""INSERT INTO dbb_posterior SELECT run_id, prompt_id, alpha, beta, state, {passes}, step
                    FROM dbb_history WHERE run_id = {run_id} AND step > {rows // a_step - prompts // a_step}
                    ORDER BY prompt_id"""
            )
        )
        connection.execute(
            text(
                f"""INSERT INTO dbb_step (run_id, step, prompts, rollouts, successes, digest, created_at)
                    SELECT run_id, step, count(*), sum(rollouts), sum(successes), :digest, ''
                    FROM dbb_history WHERE run_id = {run_id} GROUP BY run_id, step"""
            ),
            {"digest": bytes(16)},
        )
        connection.execute(text(f"UPDATE dbb_run SET last_step = {rows // a_step} WHERE run_id = {run_id}"))
    if not store.database.is_sqlite:
        with psycopg.connect(store.url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
    return (with_history - empty) / rows, (with_usage - with_history) / rows


def _size(store: PosteriorStore, connection: Any) -> int:
    if store.database.is_sqlite:
        return connection.scalar(text("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"))
    return connection.scalar(text("SELECT pg_total_relation_size('dbb_history') + pg_total_relation_size('dbb_usage')"))


def kept_bytes(store: PosteriorStore) -> float:
    """Bytes of a kept rollout of ``TEXT`` characters, its index included."""
    with store.database.transaction() as connection:
        if store.database.is_sqlite:
            size = "SELECT sum(pgsize) FROM dbstat WHERE name IN ('dbb_rollout', 'sqlite_autoindex_dbb_rollout_1')"
        else:
            size = "SELECT pg_total_relation_size('dbb_rollout')"
        return float(connection.scalar(text(size)) / connection.scalar(text("SELECT count(*) FROM dbb_rollout")))


def texts(prompts: int) -> tuple[list[str], list[str]]:
    return [f"What is {i} + {i}?" for i in range(prompts)], [str(2 * i) for i in range(prompts)]
