"""Warm start: copy a run's posteriors and run-wide state to a new run, in the same or in another database."""

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from openrlhf_dbb.storage import records, schema, write
from openrlhf_dbb.storage.engine import Database, table
from openrlhf_dbb.storage.prompt_ids import HASH_BYTES
from openrlhf_dbb.storage.records import Replayed, RunRecord, SharedState, StateLayout
from openrlhf_dbb.storage.url import StoreError

_HASH = ("hash", f"S{HASH_BYTES}")

# A step without run-wide state leaves it unchanged.
_SHARED = """
    SELECT coalesce((SELECT shared FROM dbb_step WHERE run_id = :run AND shared IS NOT NULL
                     ORDER BY step DESC LIMIT 1), shared_start)
    FROM dbb_run WHERE run_id = :run"""


def newest_shared(connection: Connection, run: RunRecord) -> SharedState | None:
    """Return a run's run-wide state: that of its last step with one, else of its start."""
    return records.shared_from_text(connection.scalar(text(_SHARED), {"run": run.run_id}))


def check(own: RunRecord, source: RunRecord, weight: float, copied: bool) -> None:
    """Raise StoreError if run ``own`` cannot begin with this weight, or with a copy of the posteriors of ``source``."""
    fields, theirs = list(own.state_fields), list(source.state_fields)
    if not isinstance(weight, Real) or not 0 < weight <= 1:
        raise StoreError(f"the warm start's weight is {weight!r}; it must be in (0, 1]")
    if weight != 1 and set(fields) != {"alpha", "beta"}:
        raise StoreError(
            f"the warm start's weight is {weight!r}, but estimator {own.estimator!r} keeps {fields} and only alpha and "
            "beta can be weighted; use weight 1"
        )
    is_older = source.estimator == own.estimator and source.estimator_version != own.estimator_version
    if copied and (theirs != fields or is_older):
        raise StoreError(
            f"run {source.name!r} keeps {theirs} per prompt (estimator {source.estimator!r}, version "
            f"{source.estimator_version}), run {own.name!r} needs {fields} ({own.estimator!r}, version "
            f"{own.estimator_version}); name a run with the same fields and version"
        )


def read(
    database: Database, source: RunRecord, replayed: Replayed | None
) -> tuple[RunRecord, Replayed, NDArray[np.bytes_]]:
    """Return a run, which may be training meanwhile, and what begins from it: what was replayed, or what it knows now.

    The third value has the hash of each prompt (P,).
    """
    layout, key = StateLayout(source.state_fields), {"run": source.run_id}
    with database.transaction() as connection:
        if replayed is not None:
            prompts = _hashes(connection, database, replayed.prompt_ids)
            stored = np.isin(replayed.prompt_ids, prompts["prompt_id"])
            return source, replace(replayed, state=replayed.state[stored]), prompts["hash"]
        step = connection.scalar(text("SELECT last_step FROM dbb_run WHERE run_id = :run"), key)
        if step is None:
            raise StoreError(f"run {source.name!r} is no longer in {database.location}; look it up again with find_run")
        kind = [("prompt_id", "<i8"), _HASH, *layout.columns]
        query = f"""SELECT {", ".join(name for name, _ in kind)}
                    FROM dbb_posterior JOIN dbb_prompt USING (prompt_id) WHERE run_id = :run"""
        shared, found = newest_shared(connection, source), table(connection, kind, query, key)
    known = Replayed(found["prompt_id"], layout.from_columns(found), shared or {})
    return replace(source, last_step=int(step)), known, found["hash"]


def _hashes(connection: Connection, database: Database, ids: NDArray[np.int64]) -> NDArray[np.void]:
    """Return id and hash of the prompts that are stored, ascending by id."""
    query = f"SELECT prompt_id, hash FROM dbb_prompt WHERE {database.one_of('prompt_id')} ORDER BY prompt_id"
    return table(connection, [("prompt_id", "<i8"), _HASH], query, {"ids": database.ids(ids)})


def of_these(
    connection: Connection, database: Database, ids: NDArray[np.int64], known: Replayed, hashes: NDArray[np.bytes_]
) -> Replayed:
    """Return what is known of the prompts ``ids`` of this database; ``hashes`` are of those in ``known``."""
    prompts = _hashes(connection, database, ids)
    _, at, theirs = np.intersect1d(prompts["hash"], hashes, assume_unique=True, return_indices=True)
    order = np.argsort(at)  # ascending as in the key of the table
    return Replayed(prompts["prompt_id"][at[order]], known.state[theirs[order]], known.shared)


def fill(connection: Connection, own: RunRecord, known: Replayed, of_run: Mapping[str, Any]) -> None:
    """Store what run ``own`` begins with, and the columns ``of_run`` of its row.

    Raise StoreError if it has posteriors already.
    """
    filled = "SELECT 1 FROM dbb_posterior WHERE run_id = :run LIMIT 1"
    if own.last_step or connection.scalar(text(filled), {"run": own.run_id}):
        raise StoreError(f"run {own.name!r} has posteriors (step {own.last_step}); only a new run can be warm-started")
    key = {"run_id": own.run_id, "prompt_id": known.prompt_ids, "visits": 0, "step": 0}
    write.insert(connection, "dbb_posterior", key | StateLayout(own.state_fields).to_columns(known.state))
    mine = schema.run.update().where(schema.run.c.run_id == own.run_id)
    connection.execute(mine.values({**of_run, "shared_start": records.shared_to_text(known.shared)}))
