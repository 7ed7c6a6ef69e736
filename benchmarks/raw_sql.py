"""The store's work in plain SQL through the databases' drivers: the floor for benchmarks/store.py.

Tables, indexes, columns, transactions and durability are the store's. Nothing is checked, and a step's rows come
prepared.
"""

from __future__ import annotations

import sqlite3
import struct
from typing import Any

import numpy as np
import psycopg

from openrlhf_dbb.storage.records import TOTALS

CACHE_KIB = 65_536
FETCHED = 50_000  # rows at a time
LOADED = np.dtype(
    [
        ("prompt", "<i8"),
        ("alpha", "<f8"),
        ("beta", "<f8"),
        ("state", "O"),
        ("visits", "<i8"),
        ("step", "<i8"),
    ]
)

ADVANCE = (
    "UPDATE dbb_run SET last_step = {0}, heartbeat_at = {0} WHERE run_id = {0} AND last_step = {0}"
)
RECORD = f"""
    INSERT INTO dbb_step (run_id, step, prompts, rollouts, successes, shared, digest, created_at,
                          {", ".join(TOTALS)})
    VALUES ({", ".join(["{0}"] * (8 + len(TOTALS)))})"""
APPLY = """
    INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
    SELECT run_id, prompt_id, alpha, beta, state, 1, step FROM dbb_history WHERE run_id = {0} AND step = {0}
    ON CONFLICT (run_id, prompt_id) DO UPDATE
    SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
        visits = dbb_posterior.visits + 1, step = excluded.step"""
LOAD = "SELECT prompt_id, alpha, beta, state, visits, step FROM dbb_posterior WHERE run_id = {0} ORDER BY prompt_id"
COPY_RUN = """
    INSERT INTO dbb_posterior SELECT {0}, prompt_id, alpha * {0}, beta * {0}, state, 0, 0
    FROM dbb_posterior WHERE run_id = {0}"""
UNDO = """
    INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
    SELECT h.run_id, h.prompt_id, h.prev_alpha, h.prev_beta, h.prev_state, u.undone, h.prev_step
    FROM dbb_history h
    JOIN (SELECT prompt_id, count(*) AS undone FROM dbb_history
          WHERE run_id = {0} AND step > {0} GROUP BY prompt_id) u ON u.prompt_id = h.prompt_id
    WHERE h.run_id = {0} AND h.step > {0} AND h.prev_step BETWEEN 0 AND {0}
    ON CONFLICT (run_id, prompt_id) DO UPDATE
    SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
        visits = dbb_posterior.visits - excluded.visits, step = excluded.step"""
DROP_LATER = ("DELETE FROM dbb_history WHERE run_id = {0} AND step > {0}",
              "DELETE FROM dbb_rollout WHERE run_id = {0} AND step > {0}",
              "DELETE FROM dbb_step WHERE run_id = {0} AND step > {0}")  # fmt: skip
SET_STEP = "UPDATE dbb_run SET last_step = {0} WHERE run_id = {0}"

Row = tuple[Any, ...]


class RawSQLite:
    """One connection of ``sqlite3`` with the store's settings."""

    def __init__(self, url: str) -> None:
        self.connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        for setting in (
            "synchronous = NORMAL",
            f"cache_size = -{CACHE_KIB}",
            "temp_store = MEMORY",
        ):
            self.connection.execute(f"PRAGMA {setting}")

    def prepared(self, rows: list[Row]) -> list[Row]:
        return rows

    def step(self, totals: Row, history: list[Row], rollouts: list[Row]) -> None:
        run, step, now = totals[0], totals[1], totals[7]
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute(ADVANCE.format("?"), (step, now, run, step - 1))
        self.connection.execute(RECORD.format("?"), totals)
        self.connection.executemany(
            f"INSERT INTO dbb_history VALUES ({', '.join('?' * 16)})", history
        )
        self.connection.executemany(
            f"INSERT INTO dbb_rollout VALUES ({', '.join('?' * 16)})", rollouts
        )
        self.connection.execute(APPLY.format("?"), (run, step))
        self.connection.execute("COMMIT")

    def load(self, run: int) -> np.ndarray[Any, Any]:
        return np.fromiter(self.connection.execute(LOAD.format("?"), (run,)), dtype=LOADED)

    def copy_run(self, source: int, run: int) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute(COPY_RUN.format("?"), (run, 0.5, 0.5, source))
        self.connection.execute("COMMIT")

    def undo(self, run: int, step: int) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute(UNDO.format("?"), (run, step, run, step, step))
        for statement in DROP_LATER:
            self.connection.execute(statement.format("?"), (run, step))
        self.connection.execute(SET_STEP.format("?"), (step, run))
        self.connection.execute("COMMIT")


class RawPostgreSQL:
    """One connection of ``psycopg``; rows travel by binary COPY."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url)

    def prepared(self, rows: list[Row]) -> bytes:
        """Return the rows as the bytes of a binary COPY. Source: PostgreSQL manual, COPY, "Binary Format"."""
        return b"PGCOPY\n\xff\r\n\0" + bytes(8) + b"".join(map(_binary, rows)) + b"\xff\xff"

    def step(self, totals: Row, history: bytes, rollouts: bytes) -> None:
        run, step, now = totals[0], totals[1], totals[7]
        with self.connection.cursor() as cursor:
            cursor.execute(ADVANCE.format("%s"), (step, now, run, step - 1))
            cursor.execute(RECORD.format("%s"), totals)
            for table, rows in (("dbb_history", history), ("dbb_rollout", rollouts)):
                with cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
                    copy.write(rows)
            cursor.execute(APPLY.format("%s"), (run, step))
        self.connection.commit()

    def load(self, run: int) -> np.ndarray[Any, Any]:
        with self.connection.cursor("load", binary=True) as cursor:
            cursor.execute(LOAD.format("%s"), (run,))
            parts = []
            while rows := cursor.fetchmany(FETCHED):
                parts.append(np.array(rows, dtype=LOADED))
        self.connection.commit()
        return np.concatenate(parts)

    def copy_run(self, source: int, run: int) -> None:
        self.connection.execute(COPY_RUN.format("%s"), (run, 0.5, 0.5, source))
        self.connection.commit()

    def undo(self, run: int, step: int) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(UNDO.format("%s"), (run, step, run, step, step))
            for statement in DROP_LATER:
                cursor.execute(statement.format("%s"), (run, step))
            cursor.execute(SET_STEP.format("%s"), (step, run))
        self.connection.commit()


def _binary(row: Row) -> bytes:
    fields = [struct.pack(">h", len(row))]
    for value in row:
        if value is None:
            fields.append(b"\xff\xff\xff\xff")
        elif isinstance(value, bytes | str):
            value = value.encode() if isinstance(value, str) else value
            fields.append(struct.pack(">i", len(value)) + value)
        else:
            fields.append(struct.pack(">iq" if isinstance(value, int) else ">id", 8, value))
    return b"".join(fields)
