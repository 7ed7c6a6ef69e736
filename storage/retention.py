"""Prune a run: delete the history of old steps, without breaking the resume from a kept model checkpoint."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, select, text

from storage import schema
from storage.engine import CHUNK, Database
from storage.errors import StoreError
from storage.events import record_event
from storage.records import RunRecord
from storage.retry import retried
from storage.store import PosteriorStore

_Note = tuple[int | None, dict[str, int]]
"""Id and detail of the event that records a prune."""

_COUNTED = ("steps", "history_rows", "probes", "samples", "usage_rows", "rollouts", "groups", "checkpoints")


@dataclass(frozen=True)
class PruneResult:
    """What a prune deleted, or would delete.

    Attributes:
        first_kept: the first step whose history is kept.
        steps: steps whose history was deleted.
        history_rows, probes, usage_rows, rollouts, groups, checkpoints: rows deleted; rollouts: kept ones, with their
            texts; groups: of the ledger.
        bytes_freed: room for new rows in the file (SQLite); None if unknown (PostgreSQL, or nothing was deleted).
    """

    first_kept: int

    steps: int
    history_rows: int
    probes: int
    usage_rows: int
    rollouts: int
    groups: int
    checkpoints: int
    bytes_freed: int | None


def prune(
    store: PosteriorStore,
    run: RunRecord,
    *,
    keep_last: int | None = None,
    before: int | None = None,
    drop_checkpoints: bool = False,
    dry_run: bool = False,
) -> PruneResult:
    """Delete the history, probes, usage, kept rollouts and groups of a run's old steps; ``keep_last`` or ``before``.

    Posteriors, recorded steps with their totals, metrics and run-wide state, and evaluations stay. To resume from a
    model checkpoint, the history of every later step is needed: a prune that would delete it is refused, unless
    ``drop_checkpoints`` gives the checkpoint up; the newest one of an unfinished run (its start, if it has none) is
    never given up. A finished run is never resumed, so its checkpoints need no history. Afterwards a roll back needs
    every step it undoes to be kept.

    The run may be trained meanwhile: rows are deleted in short transactions of whole steps, oldest first, each of
    which leaves a valid run. If killed half-way, the same call deletes the rest.

    Groups go with their step; abandoned ones if they are older than the newest group of the deleted steps. The newest
    group of the run stays, so that no number is used again.

    The mean and variance in view ``posteriors`` of a prompt whose last visit was deleted come from alpha and
    beta; they are NULL for an estimator without these.

    The space is reused for new rows. To return it to the system: ``VACUUM`` on SQLite, ``VACUUM FULL dbb_history,
    dbb_usage, dbb_rollout`` on PostgreSQL, while no run is being trained.

    Args:
        keep_last: number of steps to keep, >= 0.
        before: the first step to keep, >= 1.
        drop_checkpoints: give up the checkpoints that need deleted history; their rows are deleted too.
        dry_run: only count what would be deleted.

    Raises:
        StoreError: a checkpoint needs the history, an argument does not fit, or there is no such run.
    """
    if (keep_last is None) == (before is None):
        raise StoreError("a prune needs exactly one of keep_last and before")
    for name, value, lowest in (("keep_last", keep_last, 0), ("before", before, 1)):
        if value is not None and value < lowest:
            raise StoreError(f"a prune's {name} is {value}; it must be at least {lowest}")
    database = store.database
    first_kept, parts = _plan(database, run, keep_last, before)
    if dry_run:
        counts = _counted(database, run, first_kept, parts, drop_checkpoints)
        return _result(first_kept, counts, bytes_freed=None)
    free = _free_bytes(database)

    def delete(start: int, end: int, note: _Note, connection: Connection) -> _Note:
        event_id, total = note
        stored = _stored(connection, database, run, lock=True)
        given_up = _given_up(connection, stored, first_kept, drop_checkpoints)
        counted = _delete(connection, run.run_id, start, end, given_up)
        total = {"before": end} | {name: total[name] + counted[name] for name in _COUNTED}
        return _write_note(connection, stored, event_id, total), total

    note: _Note = None, dict.fromkeys(_COUNTED, 0)
    for start, end in parts:
        note = database.write_once(partial(delete, start, end, note), _is_noted)
    freed = None if free is None else (_free_bytes(database) or 0) - free
    return _result(first_kept, note[1], bytes_freed=freed)


def _result(first_kept: int, counts: Mapping[str, int], *, bytes_freed: int | None) -> PruneResult:
    named = {name: counts[name] for name in _COUNTED if name != "samples"}
    return PruneResult(first_kept=first_kept, **named, bytes_freed=bytes_freed)


@retried
def _plan(
    database: Database, run: RunRecord, keep_last: int | None, before: int | None
) -> tuple[int, list[tuple[int, int]]]:
    """The first step to keep, and the parts to delete."""
    with database.transaction() as connection:
        last_step = _stored(connection, database, run).last_step
        first_kept = min(last_step + 1, last_step + 1 - (keep_last or 0) if before is None else before)
        return first_kept, _parts(connection, run, first_kept)


def _stored(connection: Connection, database: Database, run: RunRecord, *, lock: bool = False) -> Row[Any]:
    """The run as it is now; ``lock`` keeps out steps and roll backs until the transaction ends."""
    query = select(schema.run).where(schema.run.c.run_id == run.run_id, schema.run.c.uuid == run.uuid)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise StoreError(f"run {run.name!r} is no longer in {database.location}; look it up again with find_run")
    return row


def _parts(connection: Connection, run: RunRecord, first_kept: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of the steps to delete, each of about ``CHUNK`` rows."""
    steps = connection.execute(
        text(
            """SELECT step, prompts + coalesce(groups + skipped, 0) FROM dbb_step
               WHERE run_id = :run AND step < :first_kept AND step >=
                     (SELECT min(step) FROM (SELECT min(step) AS step FROM dbb_history WHERE run_id = :run
                      UNION ALL SELECT min(step) FROM dbb_usage WHERE run_id = :run
                      UNION ALL SELECT min(step) FROM dbb_rollout WHERE run_id = :run) o)
               ORDER BY step"""
        ),
        {"run": run.run_id, "first_kept": first_kept},
    )
    starts, rows = [], CHUNK
    for step, rows_of_step in steps:
        if rows >= CHUNK:
            starts.append(step)
            rows = 0
        rows += rows_of_step
    return list(itertools.pairwise([*starts, first_kept])) if starts else []


def _given_up(connection: Connection, run: Row[Any], first_kept: int, drop: bool) -> int:
    """The step before which checkpoints are given up.

    Raises:
        StoreError: a checkpoint that must be kept needs the history.
    """
    if run.status != "running":
        return 0
    checkpoint = schema.checkpoint.c
    query = select(checkpoint.step, checkpoint.tag).where(checkpoint.run_id == run.run_id)
    known = [(row.step, f"checkpoint {row.tag!r} of step {row.step}") for row in connection.execute(query)]
    known = sorted(known) or [(0, "no checkpoint, so it resumes from its start")]
    # If even the newest is in the way, say so; otherwise the oldest stands for all that are.
    step, which = known[-1] if known[-1][0] < first_kept - 1 else known[0]
    if step >= first_kept - 1:
        return 0
    if step == known[-1][0]:
        advice = "it is the newest one, so keep more"
    elif drop:
        return first_kept - 1
    else:
        advice = "keep more, or give up such checkpoints (drop_checkpoints=True, or --drop-checkpoints)"
    raise StoreError(
        f"run {run.name!r} has {which}, which needs the history from step {step + 1} on, but the prune would keep it "
        f"from step {first_kept} on; {advice}"
    )


_OLD = "WHERE run_id = :run AND step < :end"
_DELETED = {
    "history_rows": f"FROM dbb_history {_OLD}",
    "probes": f"FROM dbb_probe {_OLD}",
    "usage_rows": f"FROM dbb_usage {_OLD}",
    "rollouts": f"FROM dbb_rollout {_OLD}",
    "groups": f"""FROM dbb_group
        WHERE run_id = :run AND ordinal < (SELECT max(ordinal) FROM dbb_group WHERE run_id = :run)
          AND (step < :end OR (fate = 'abandoned' AND ordinal < (SELECT max(ordinal) FROM dbb_group {_OLD})))""",
    "checkpoints": "FROM dbb_checkpoint WHERE run_id = :run AND step < :given_up",
}


def _delete(connection: Connection, run_id: int, start: int, end: int, given_up: int) -> dict[str, int]:
    """Delete the rows of steps before ``end``, and checkpoints before ``given_up``; how many of each."""
    counts = _count(connection, run_id, start, end, given_up)
    for rows in _DELETED.values():
        connection.execute(text(f"DELETE {rows}"), {"run": run_id, "end": end, "given_up": given_up})
    return counts


def _count(connection: Connection, run_id: int, start: int, end: int, given_up: int) -> dict[str, int]:
    """How many of each :func:`_delete` deletes."""
    counted = {name: f"SELECT count(*) {rows}" for name, rows in _DELETED.items()}
    counted["steps"] = f"SELECT count(*) FROM dbb_step {_OLD} AND step >= :start"
    counted["samples"] = f"SELECT coalesce(sum(samples), 0) FROM dbb_probe {_OLD}"
    key = {"run": run_id, "start": start, "end": end, "given_up": given_up}
    return {name: int(connection.scalar(text(counted[name]), key) or 0) for name in _COUNTED}


@retried
def _counted(
    database: Database, run: RunRecord, first_kept: int, parts: list[tuple[int, int]], drop_checkpoints: bool
) -> dict[str, int]:
    if not parts:
        return dict.fromkeys(_COUNTED, 0)
    with database.transaction() as connection:
        given_up = _given_up(connection, _stored(connection, database, run), first_kept, drop_checkpoints)
        return _count(connection, run.run_id, parts[0][0], first_kept, given_up)


def _write_note(connection: Connection, run: Row[Any], event_id: int | None, detail: dict[str, int]) -> int:
    """Record the prune as one event, updated with each part; its id."""
    if event_id is None:
        return record_event(connection, run.run_id, "prune", run.last_step, run.last_step, detail)
    update = schema.event.update().where(schema.event.c.event_id == event_id)
    connection.execute(update.values(detail=json.dumps(detail)))
    return event_id


def _is_noted(connection: Connection, note: _Note) -> bool:
    event, (event_id, detail) = schema.event.c, note
    stored = connection.scalar(select(event.detail).where(event.event_id == event_id, event.kind == "prune"))
    return stored == json.dumps(detail)


@retried
def _free_bytes(database: Database) -> int | None:
    """Unused space inside a SQLite file."""
    if not database.is_sqlite:
        return None
    with database.transaction() as connection:
        query = "SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size"
        return int(connection.scalar(text(query)) or 0)
