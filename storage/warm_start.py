"""Warm start: copy a run's posteriors and run-wide state to a new run, in the same or in another database."""

from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from openrlhf_dbb.storage import records, schema, write
from openrlhf_dbb.storage.engine import Database, table
from openrlhf_dbb.storage.prompt_ids import HASH_BYTES
from openrlhf_dbb.storage.records import Replayed, RunRecord, SharedState, StateLayout, WarmStart
from openrlhf_dbb.storage.url import StoreError

_HASH = ("hash", f"S{HASH_BYTES}")

# A step without run-wide state leaves it unchanged.
_SHARED = """
    SELECT coalesce((SELECT shared FROM dbb_step WHERE run_id = :run AND shared IS NOT NULL
                     ORDER BY step DESC LIMIT 1), shared_start)
    FROM dbb_run WHERE run_id = :run"""


class Posteriors(NamedTuple):
    """The posteriors of a run at one moment."""

    source: RunRecord  # at that moment
    location: str  # of its database
    shared: SharedState | None  # the run-wide state; None if there is none
    hashes: NDArray[np.bytes_]  # (P,) of the prompts
    state: NDArray[np.float64]  # (P, F)


def newest_shared(connection: Connection, run: RunRecord) -> SharedState | None:
    """Return a run's run-wide state: that of its last step with one, else of its start."""
    return records.shared_from_text(run.name, connection.scalar(text(_SHARED), {"run": run.run_id}))


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


def read(database: Database, source: RunRecord, replayed: Replayed | None) -> Posteriors:
    """Return the replayed posteriors, or the current ones of a run, which may be training meanwhile."""
    layout, key = StateLayout(source.state_fields), {"run": source.run_id}
    if replayed is not None:
        with database.transaction() as connection:
            found = _hashes(connection, database, replayed.prompt_ids)
        state = replayed.state[np.isin(replayed.prompt_ids, found["prompt_id"])]
        return Posteriors(source, database.location, replayed.shared, found["hash"], state)
    kind = [_HASH, *layout.columns]
    query = f"""SELECT {", ".join(name for name, _ in kind)}
                FROM dbb_posterior q JOIN dbb_prompt p ON p.prompt_id = q.prompt_id WHERE q.run_id = :run"""
    with database.transaction() as connection:
        step = connection.scalar(text("SELECT last_step FROM dbb_run WHERE run_id = :run"), key)
        if step is None:
            raise StoreError(f"run {source.name!r} is no longer in {database.location}; look it up again with find_run")
        shared, found = newest_shared(connection, source), table(connection, kind, query, key)
    now = replace(source, last_step=int(step))
    return Posteriors(now, database.location, shared, found["hash"], layout.from_columns(source.name, found))


def _hashes(connection: Connection, database: Database, ids: NDArray[np.int64]) -> NDArray[np.void]:
    """Return id and hash of the prompts that are stored, ascending by id."""
    query = f"SELECT prompt_id, hash FROM dbb_prompt WHERE {database.one_of('prompt_id')} ORDER BY prompt_id"
    return table(connection, [("prompt_id", "<i8"), _HASH], query, {"ids": database.ids(ids)})


def fill(
    connection: Connection,
    own: RunRecord,
    prompt_ids: NDArray[np.int64],
    columns: write.Columns,
    shared: SharedState | None,
    of_run: dict[str, Any],
) -> None:
    """Store the posteriors, the run-wide state and the columns ``of_run`` that run ``own`` begins with.

    Raise StoreError if it has posteriors already.
    """
    filled = "SELECT 1 FROM dbb_posterior WHERE run_id = :run LIMIT 1"
    if own.last_step or connection.scalar(text(filled), {"run": own.run_id}):
        raise StoreError(f"run {own.name!r} has posteriors (step {own.last_step}); only a new run can be warm-started")
    key = {"run_id": own.run_id, "prompt_id": prompt_ids, "visits": 0, "step": 0}
    write.insert(connection, "dbb_posterior", {**key, **columns})
    mine = schema.run.update().where(schema.run.c.run_id == own.run_id)
    connection.execute(mine.values(of_run | {"shared_start": records.shared_to_text(shared)}))


def begin(
    connection: Connection,
    database: Database,
    own: RunRecord,
    posteriors: Posteriors,
    ids: NDArray[np.int64],
    weight: float,
) -> tuple[dict[str, Any], WarmStart]:
    """Warm-start run ``own``, which the transaction has locked; return its ``RunRecord.parent`` and the outcome."""
    source = posteriors.source
    prompts = _hashes(connection, database, ids)
    _, at, theirs = np.intersect1d(prompts["hash"], posteriors.hashes, assume_unique=True, return_indices=True)
    order = np.argsort(at)  # ascending as in the key of the table
    found_ids, state = prompts["prompt_id"][at[order]], posteriors.state[theirs[order]]
    if not len(found_ids):
        raise StoreError(
            f"none of the {len(ids)} prompts of run {own.name!r} (data set {own.dataset!r}) has a "
            f"posterior in run {source.name!r} (data set {source.dataset!r}, step {source.last_step}); "
            "name another run"
        )
    columns = StateLayout(own.state_fields).to_columns(state)
    columns |= {name: columns[name] * weight for name in ("alpha", "beta") if name in columns}
    parent = {
        "name": source.name,
        "uuid": source.uuid,
        "step": source.last_step,
        "weight": float(weight),
        "database": posteriors.location,
    }
    fill(connection, own, found_ids, columns, posteriors.shared, {f"parent_{name}": of for name, of in parent.items()})
    counts = {"matched": len(found_ids), "unmatched": len(ids) - len(found_ids)}
    write.event(connection, own.run_id, "warm_start", 0, 0, parent | counts)
    return parent, WarmStart(**counts, source=source)
