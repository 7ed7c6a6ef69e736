"""Warm start: copy a run's posteriors and run-wide state to a new run, in the same or from another database."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from storage import schema, shared
from storage.bulk import insert_columns
from storage.engine import CHUNK, Database, chunks
from storage.errors import StoreError
from storage.events import record_event
from storage.prompts import HASH_BYTES
from storage.records import RunRecord, StateLayout, WarmStart

_HASH = f"V{HASH_BYTES}"


def check_source(own: RunRecord, source: RunRecord, weight: float) -> None:
    """Raise StoreError if run ``own`` cannot begin from ``source`` with this weight."""
    if source.state_fields != own.state_fields:
        raise StoreError(
            f"run {source.name!r} keeps {list(source.state_fields)} per prompt (estimator "
            f"{source.estimator!r}), run {own.name!r} needs {list(own.state_fields)} "
            f"({own.estimator!r}); name a run with the same fields"
        )
    if source.estimator == own.estimator and source.estimator_version != own.estimator_version:
        raise StoreError(
            f"run {source.name!r} was written by version {source.estimator_version} of estimator "
            f"{own.estimator!r}, this is version {own.estimator_version}; name a run of the same version"
        )
    if not 0 < weight <= 1:
        raise StoreError(f"the warm start's weight is {weight!r}; it must be in (0, 1]")
    if weight != 1 and set(own.state_fields) != {"alpha", "beta"}:
        raise StoreError(
            f"the warm start's weight is {weight!r}, but estimator {own.estimator!r} keeps "
            f"{list(own.state_fields)} and only alpha and beta can be weighted; use weight 1"
        )


def begin(
    connection: Connection,
    database: Database,
    own: RunRecord,
    last_step: int,
    source_database: Database,
    source: RunRecord,
    ids: NDArray[np.int64],
    weight: float,
) -> tuple[dict[str, Any], WarmStart]:
    """Warm-start run ``own``, which is at ``last_step``, in this transaction, which has locked it.

    Args:
        ids: (P,) prompts of the run, unique, ascending.

    Returns:
        The new parent, as ``RunRecord.parent``, and the outcome.

    Raises:
        StoreError: the run has posteriors, or no prompt has one in the source.
    """
    filled = connection.execute(
        text("SELECT 1 FROM dbb_posterior WHERE run_id = :run LIMIT 1"), {"run": own.run_id}
    ).first()
    if last_step or filled:
        raise StoreError(
            f"run {own.name!r} already has posteriors (step {last_step}); only a new run can be warm-started"
        )
    layout = StateLayout(own.state_fields)
    matched, source_step, source_shared = copy_posteriors(
        connection, database, own.run_id, source_database, source.run_id, layout, ids, weight
    )
    if not matched:
        raise StoreError(
            f"none of the {len(ids)} prompts of run {own.name!r} (data set {own.dataset!r}) has a "
            f"posterior in run {source.name!r} (data set {source.dataset!r}, step {source_step}); "
            "name another run"
        )
    parent = {
        "name": source.name,
        "uuid": source.uuid,
        "step": source_step,
        "weight": float(weight),
        "database": source_database.location,
    }
    connection.execute(
        schema.run.update()
        .where(schema.run.c.run_id == own.run_id)
        .values({f"parent_{key}": value for key, value in parent.items()} | {"shared_start": source_shared})
    )
    unmatched = len(ids) - matched
    record_event(connection, own.run_id, "warm_start", 0, 0, {**parent, "matched": matched, "unmatched": unmatched})
    return parent, WarmStart(matched, unmatched, replace(source, last_step=source_step))


def copy_posteriors(
    connection: Connection,
    target: Database,
    run_id: int,
    source: Database,
    source_run_id: int,
    layout: StateLayout,
    ids: NDArray[np.int64],
    weight: float,
) -> tuple[int, int, str | None]:
    """Copy the posteriors of the prompts that both runs have, with step 0 and 0 visits.

    Args:
        connection: open write transaction on ``target``.
        layout: how both runs store their state.
        ids: (P,) prompts of the new run, unique, ascending; ids in ``target``.
        weight: factor on alpha and beta.

    Returns:
        The number of posteriors copied, the source's last step then, and the text of its run-wide state then.
    """
    if source.identity == target.identity:
        step = _last_step(connection, target, source_run_id, lock=True)
        among, parameters = target.among("prompt_id", ids)
        copied = connection.execute(
            text(
                f"""INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
                    SELECT :run, prompt_id, alpha * :weight, beta * :weight, state, 0, 0
                    FROM dbb_posterior WHERE run_id = :source AND {among}"""
            ),
            {"run": run_id, "weight": float(weight), "source": source_run_id, **parameters},
        )
        return copied.rowcount, step, shared.newest(connection, source_run_id)

    hashes, prompt_ids = _own_hashes(connection, target, ids)
    found, states = [ids[:0]], [np.empty((0, len(layout.fields)))]
    with closing(_read_posteriors(source, source_run_id, layout)) as parts:
        source_step, source_shared, _ = next(parts)
        for _, _, rows in parts if len(hashes) else ():
            digests = _hashes(rows["hash"])
            at = np.searchsorted(hashes[:-1], digests)
            known = hashes[at] == digests
            found.append(prompt_ids[at[known]])
            states.append(layout.from_columns(rows[known]))
    _insert(connection, run_id, np.concatenate(found), np.concatenate(states), layout, weight)
    return sum(map(len, found)), source_step, source_shared


def _insert(
    connection: Connection,
    run_id: int,
    ids: NDArray[np.int64],
    state: NDArray[np.float64],
    layout: StateLayout,
    weight: float,
) -> None:
    # In the order of the table's key: any other order takes twice as long.
    order = np.argsort(ids)
    for start in range(0, len(order), CHUNK):
        part = order[start : start + CHUNK]
        columns: dict[str, int | NDArray[Any]] = {"run_id": run_id, "prompt_id": ids[part], "visits": 0, "step": 0}
        for name, values in layout.to_columns(state[part]).items():
            columns[name] = values * weight if name in ("alpha", "beta") else values
        insert_columns(connection, "dbb_posterior", columns)


def _own_hashes(
    connection: Connection, database: Database, ids: NDArray[np.int64]
) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
    """Hashes of the prompts in ascending order, and their ids; both (P,)."""
    kind = [("hash", _HASH), ("prompt_id", "<i8")]
    parts = [np.empty(0, dtype=kind)]
    among, parameters = database.among("prompt_id", ids)
    for rows in chunks(connection, f"SELECT hash, prompt_id FROM dbb_prompt WHERE {among}", parameters):
        parts.append(np.array(rows, dtype=kind))
    table = np.concatenate(parts)
    hashes = _hashes(table["hash"])
    order = np.argsort(hashes)
    return hashes[order], table["prompt_id"][order]


def _hashes(values: NDArray[np.void]) -> NDArray[np.bytes_]:
    # numpy can sort bytes of a fixed length, but not its void type.
    return np.ascontiguousarray(values).view(f"S{HASH_BYTES}")


def _read_posteriors(
    source: Database, run_id: int, layout: StateLayout
) -> Generator[tuple[int, str | None, NDArray[np.void]], None, None]:
    """The run's last step, run-wide state and posteriors by prompt hash, in parts (the first one empty)."""
    kind = [("hash", _HASH), *layout.columns]
    with source.transaction() as connection:
        step = _last_step(connection, source, run_id, lock=False)
        run_wide = shared.newest(connection, run_id)
        yield step, run_wide, np.empty(0, dtype=kind)
        query = f"""SELECT {", ".join(name for name, _ in kind)}
                    FROM dbb_posterior q JOIN dbb_prompt p ON p.prompt_id = q.prompt_id
                    WHERE q.run_id = :run"""
        for rows in chunks(connection, query, {"run": run_id}):
            yield step, run_wide, np.array(rows, dtype=kind)


def _last_step(connection: Connection, database: Database, run_id: int, *, lock: bool) -> int:
    # The lock keeps the source, which may be training, from recording a step before the copy.
    suffix = " FOR SHARE" if lock and not database.is_sqlite else ""
    step = connection.scalar(text("SELECT last_step FROM dbb_run WHERE run_id = :run" + suffix), {"run": run_id})
    if step is None:
        raise StoreError(f"there is no run with id {run_id} in {database.location}; look it up again with find_run")
    return int(step)
