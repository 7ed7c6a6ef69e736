"""Copy a run's posteriors to a new run, in the same database or from another one, and read its run-wide state."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from storage import schema, shared
from storage.engine import Database, chunks
from storage.errors import StoreError


def copy_posteriors(
    connection: Connection,
    target: Database,
    run_id: int,
    source: Database,
    source_run_id: int,
    ids: NDArray[np.int64],
    weight: float,
) -> tuple[int, int, str | None]:
    """Copy the posteriors of the prompts that both runs have, as step 0 with 0 visits.

    Args:
        connection: open write transaction on ``target``.
        ids: (P,) prompts of the new run, unique, numbered as in ``target``.
        weight: factor on alpha and beta.

    Returns:
        The number of posteriors copied; the last step of the source they belong to, and the text of its
        run-wide state then.
    """
    if source.identity == target.identity:
        step = _last_step(connection, target, source_run_id, lock=True)
        copied = connection.execute(
            text(
                f"""INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
                    SELECT :run, prompt_id, alpha * :weight, beta * :weight, state, 0, 0
                    FROM dbb_posterior WHERE run_id = :source AND {target.one_of("prompt_id")}"""
            ),
            {"run": run_id, "weight": float(weight), "source": source_run_id, "ids": target.ids(ids)},
        )
        return copied.rowcount, step, shared.newest(connection, source_run_id)

    own_ids: dict[bytes, int] = {}
    query = f"SELECT hash, prompt_id FROM dbb_prompt WHERE {target.one_of('prompt_id')}"
    for rows in chunks(connection, query, {"ids": target.ids(ids)}):
        own_ids.update((bytes(digest), prompt_id) for digest, prompt_id in rows)
    matched = 0
    with closing(_read_posteriors(source, source_run_id)) as parts:
        source_step, source_shared, _ = next(parts)
        for _, _, rows in parts:
            copies = [
                (run_id, own_ids[bytes(digest)], _scaled(alpha, weight), _scaled(beta, weight), state, 0, 0)
                for digest, alpha, beta, state in rows
                if bytes(digest) in own_ids
            ]
            target.insert_rows(connection, schema.posterior, copies)
            matched += len(copies)
    return matched, source_step, source_shared


def _read_posteriors(source: Database, run_id: int) -> Generator[tuple[int, str | None, Sequence[Any]], None, None]:
    """The run's last step and run-wide state, with its posteriors by prompt hash in parts (first an empty one)."""
    with source.transaction() as connection:
        step = _last_step(connection, source, run_id, lock=False)
        run_wide = shared.newest(connection, run_id)
        yield step, run_wide, []
        query = """SELECT p.hash, q.alpha, q.beta, q.state
                   FROM dbb_posterior q JOIN dbb_prompt p ON p.prompt_id = q.prompt_id
                   WHERE q.run_id = :run"""
        for rows in chunks(connection, query, {"run": run_id}):
            yield step, run_wide, rows


def _last_step(connection: Connection, database: Database, run_id: int, *, lock: bool) -> int:
    # The lock keeps the source, which may be running, from a step between this and the copy.
    suffix = " FOR SHARE" if lock and not database.is_sqlite else ""
    step = connection.scalar(text("SELECT last_step FROM dbb_run WHERE run_id = :run" + suffix), {"run": run_id})
    if step is None:
        raise StoreError(f"there is no run number {run_id} in {database.location}; look it up again with find_run")
    return int(step)


def _scaled(count: float | None, weight: float) -> float | None:
    return None if count is None else count * weight
