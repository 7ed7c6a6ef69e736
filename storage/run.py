"""A run as its owner sees it: the one process that may write its posteriors."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from storage import schema, shared
from storage.checks import whole_numbers
from storage.engine import Database, chunks
from storage.errors import StoreError
from storage.owner import NOBODY, Owner
from storage.records import (
    PosteriorTable,
    RunRecord,
    StateLayout,
    StepRows,
    WarmStart,
    history_rows,
    probe_rows,
)
from storage.warm_start import copy_posteriors

if TYPE_CHECKING:
    from storage.store import PosteriorStore

# Fence, order check, row lock and heartbeat in one: it changes a row only for the owner, at the right step.
_ADVANCE = text(
    """UPDATE dbb_run SET last_step = :step, heartbeat_at = :now
       WHERE run_id = :run AND writer_token = :token AND status = 'running' AND last_step = :step - 1"""
)

_HOLD = text(
    """UPDATE dbb_run SET heartbeat_at = :now
       WHERE run_id = :run AND writer_token = :token AND status = 'running'"""
)

_STALE = text(
    """SELECT h.prompt_id, h.prev_step, coalesce(q.step, -1)
       FROM dbb_history h LEFT JOIN dbb_posterior q ON q.run_id = h.run_id AND q.prompt_id = h.prompt_id
       WHERE h.run_id = :run AND h.step = :step AND h.prev_step <> coalesce(q.step, -1)
       LIMIT 1"""
)

# Values, never "alpha * discount" in SQL: a repeat must not count twice, nor differ in the last bit.
_APPLY = text(
    """INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
       SELECT run_id, prompt_id, alpha, beta, state, 1, step
       FROM dbb_history WHERE run_id = :run AND step = :step
       ON CONFLICT (run_id, prompt_id) DO UPDATE
       SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
           visits = dbb_posterior.visits + 1, step = excluded.step
       WHERE dbb_posterior.step < excluded.step"""
)

# Of each prompt touched after :step, the first such row knows the posterior to go back to.
_FIRST_UNDONE = """
    FROM dbb_history h
    JOIN (SELECT prompt_id, min(step) AS step, count(*) AS undone
          FROM dbb_history WHERE run_id = :run AND step > :step GROUP BY prompt_id) f
      ON f.prompt_id = h.prompt_id AND f.step = h.step
    WHERE h.run_id = :run"""

_UNDO_CHANGED = text(
    f"""INSERT INTO dbb_posterior (run_id, prompt_id, alpha, beta, state, visits, step)
        SELECT h.run_id, h.prompt_id, h.prev_alpha, h.prev_beta, h.prev_state, f.undone, h.prev_step
        {_FIRST_UNDONE} AND h.prev_step >= 0
        ON CONFLICT (run_id, prompt_id) DO UPDATE
        SET alpha = excluded.alpha, beta = excluded.beta, state = excluded.state,
            visits = dbb_posterior.visits - excluded.visits, step = excluded.step"""
)

_UNDO_NEW = text(
    f"""DELETE FROM dbb_posterior WHERE run_id = :run AND prompt_id IN
        (SELECT h.prompt_id {_FIRST_UNDONE} AND h.prev_step = -1)"""
)


class Run:
    """The owner's side of a run, from ``PosteriorStore.create_run`` or ``claim_run``.

    Every method is one transaction: it happens wholly or not at all. Every writing method raises
    StoreError when another process has claimed the run since, or when it is finished.

    Attributes:
        record: the run as this owner last knew it.
    """

    def __init__(self, database: Database, record: RunRecord, token: str) -> None:
        self.record = record
        self._database = database
        self._layout = StateLayout(record.state_fields)
        self._token = token

    def __repr__(self) -> str:
        return f"Run({self.record.name!r}, step {self.record.last_step}, in {self._database.location})"

    def load(self, prompt_ids: NDArray[np.int64]) -> PosteriorTable:
        """The current posteriors of (P,) prompts, a row for each in the order given."""
        ids = whole_numbers("prompt_ids", prompt_ids)
        query = f"""SELECT alpha, beta, state, prompt_id, visits, step FROM dbb_posterior
                    WHERE run_id = :run AND {self._database.one_of("prompt_id")} ORDER BY prompt_id"""
        found: list[NDArray[np.int64]] = [np.empty((0, 3), dtype=np.int64)]
        states = [np.empty((0, len(self.record.state_fields)))]
        with self._database.transaction() as connection:
            for rows in chunks(connection, query, {"run": self.record.run_id, "ids": self._database.ids(ids)}):
                found.append(np.array([row[3:] for row in rows], dtype=np.int64))
                states.append(self._layout.from_columns(rows))
        # One more row, at the end, for the prompts that have no posterior.
        known_ids, visits, steps = np.concatenate([*found, [[np.iinfo(np.int64).max, 0, -1]]]).T
        state = np.concatenate([*states, np.full((1, len(self.record.state_fields)), np.nan)])
        at = np.searchsorted(known_ids[:-1], ids)
        at[known_ids[at] != ids] = len(known_ids) - 1
        return PosteriorTable(state[at], visits[at], steps[at])

    def load_shared(self) -> shared.SharedState | None:
        """The estimator's run-wide vectors by name, as of the last step or the warm start; None if there are none."""
        with self._database.transaction() as connection:
            return shared.from_text(shared.newest(connection, self.record.run_id))

    def record_step(self, step: int, rows: StepRows) -> None:
        """Store the posteriors and the run-wide state that a training step changed, and its probes.

        The same step with the same content again changes nothing, so a caller that does not know
        whether its last call succeeded may repeat it.

        Args:
            step: one more than the last recorded step.
            rows: what changed; may be empty.

        Raises:
            StoreError: a gap, the same step with other content, rows that do not fit the stored
                posteriors, values that are not finite, or a run that is no longer this owner's.
        """
        rows = rows.checked(step, len(self.record.state_fields))
        digest = rows.digest(step)
        key = {"run": self.record.run_id, "step": step}
        with self._database.transaction(write=True) as connection:
            if connection.execute(_ADVANCE, {**key, "token": self._token, "now": utc_now()}).rowcount != 1:
                self._accept_repeat(connection, step, digest)
                return
            connection.execute(
                schema.step.insert().values(
                    run_id=self.record.run_id,
                    step=step,
                    prompts=len(rows.prompt_ids),
                    rollouts=int(rows.rollouts.sum()),
                    successes=float(rows.successes.sum()),
                    shared=shared.to_text(rows.shared),
                    digest=digest,
                    created_at=utc_now(),
                )
            )
            table = list(history_rows(self.record.run_id, step, rows, self._layout))
            self._database.insert_rows(connection, schema.history, table)
            self._database.insert_rows(connection, schema.probe, probe_rows(self.record.run_id, step, rows.probes))
            stale = connection.execute(_STALE, key).first()
            if stale is not None:
                raise StoreError(
                    f"step {step} of run {self.record.name!r}: previous_step of prompt {stale[0]} is "
                    f"{stale[1]}, its posterior is of step {stale[2]}; load the posteriors again"
                )
            written = connection.execute(_APPLY, key).rowcount
            assert written == len(table), f"{written} of {len(table)} posteriors written"
        self.record = replace(self.record, last_step=step)

    def _accept_repeat(self, connection: Connection, step: int, digest: bytes) -> None:
        last_step = self._check_owner(connection)
        name = self.record.name
        if not 1 <= step <= last_step:
            raise StoreError(f"run {name!r} is at step {last_step}; the next step is {last_step + 1}, not {step}")
        stored = connection.execute(
            schema.step.select().where(schema.step.c.run_id == self.record.run_id, schema.step.c.step == step)
        ).one()
        if bytes(stored.digest) != digest:
            raise StoreError(
                f"step {step} of run {name!r} is recorded with other content "
                f"(the run is at step {last_step}); to do it again, roll back to step {step - 1} first"
            )

    def record_checkpoint(self, step: int, tag: str) -> None:
        """Make every step up to ``step`` durable, to be called before a model checkpoint counts as saved.

        After it, not even a power loss leaves the posteriors behind the model. Repeating it is harmless.

        Raises:
            StoreError: the step is not recorded, or the run is no longer this owner's.
        """
        with self._database.transaction(write=True, durable=True) as connection:
            if not self._database.is_sqlite:
                connection.execute(text("SET LOCAL synchronous_commit TO on"))
            last_step = self._hold(connection)
            if not 0 <= step <= last_step:
                raise StoreError(
                    f"checkpoint {tag!r} is of step {step}, run {self.record.name!r} is at step {last_step}; "
                    "record the step first"
                )
            connection.execute(
                text(
                    """INSERT INTO dbb_checkpoint (run_id, step, tag, created_at)
                       VALUES (:run, :step, :tag, :now)
                       ON CONFLICT (run_id, step, tag) DO UPDATE SET created_at = excluded.created_at"""
                ),
                {"run": self.record.run_id, "step": step, "tag": tag, "now": utc_now()},
            )

    def roll_back(self, step: int) -> int:
        """Undo every step after ``step``, bit for bit, to continue from a model checkpoint of that step.

        Returns:
            Number of posterior changes undone (rows of history deleted).

        Raises:
            StoreError: the run has not got that far, or is no longer this owner's.
        """
        key = {"run": self.record.run_id, "step": step}
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            if not 0 <= step <= last_step:
                raise StoreError(
                    f"run {self.record.name!r} is at step {last_step}, it cannot go back to step {step}; "
                    f"choose a model checkpoint of step 0 to {last_step}"
                )
            undone = 0
            if step < last_step:
                connection.execute(_UNDO_NEW, key)
                connection.execute(_UNDO_CHANGED, key)
                # The run-wide state goes back with its steps.
                undone, steps, checkpoints, probes = (
                    connection.execute(text(f"DELETE FROM {table} WHERE run_id = :run AND step > :step"), key).rowcount
                    for table in ("dbb_history", "dbb_step", "dbb_checkpoint", "dbb_probe")
                )
                connection.execute(text("UPDATE dbb_run SET last_step = :step WHERE run_id = :run"), key)
                detail = {"history_rows": undone, "steps": steps, "checkpoints": checkpoints, "probes": probes}
                record_event(connection, self.record.run_id, "roll_back", last_step, step, detail)
        self.record = replace(self.record, last_step=step)
        return undone

    def warm_start(
        self,
        source_store: PosteriorStore,
        source: RunRecord,
        prompt_ids: NDArray[np.int64],
        *,
        weight: float = 1.0,
    ) -> WarmStart:
        """Begin with the posteriors and the run-wide state that another run, here or elsewhere, ended with.

        Args:
            source_store: where the source is; may be this run's own store.
            source: the run to copy from; it is not changed.
            prompt_ids: (P,) prompts of this run.
            weight: factor in (0, 1] on alpha and beta: how many of the source's rollouts still count.

        Raises:
            StoreError: this run has posteriors or steps already, the estimators' states differ, the
                weight does not apply, or no prompt has a posterior in the source.
        """
        self._check_source(source, weight)
        ids = np.unique(whole_numbers("prompt_ids", prompt_ids))
        own, target = self.record, self._database
        with target.transaction(write=True) as connection:
            last_step = self._hold(connection)
            filled = connection.execute(
                text("SELECT 1 FROM dbb_posterior WHERE run_id = :run LIMIT 1"), {"run": own.run_id}
            ).first()
            if last_step or filled:
                raise StoreError(
                    f"run {own.name!r} has posteriors of its own (step {last_step}); only a new run can be warm-started"
                )
            matched, source_step, source_shared = copy_posteriors(
                connection, target, own.run_id, source_store.database, source.run_id, ids, weight
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
                "database": source_store.location,
            }
            connection.execute(
                schema.run.update()
                .where(schema.run.c.run_id == own.run_id)
                .values({f"parent_{key}": value for key, value in parent.items()} | {"shared_start": source_shared})
            )
            detail = {**parent, "matched": matched, "unmatched": len(ids) - matched}
            record_event(connection, own.run_id, "warm_start", 0, 0, detail)
        self.record = replace(own, parent=parent)
        return WarmStart(matched, len(ids) - matched, replace(source, last_step=source_step))

    def _check_source(self, source: RunRecord, weight: float) -> None:
        own = self.record
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

    def release(self) -> None:
        """Give the run up unfinished, so that any process may claim it at once; this one can no longer write.

        Raises:
            StoreError: the run is no longer this owner's.
        """
        with self._database.transaction(write=True) as connection:
            self._hold(connection)
            connection.execute(
                schema.run.update()
                .where(schema.run.c.run_id == self.record.run_id)
                .values(
                    writer_token=secrets.token_hex(16),
                    owner_host=NOBODY.host,
                    owner_pid=NOBODY.pid,
                    owner_started=NOBODY.started,
                )
            )

    def discard(self) -> None:
        """Delete the run, which must have recorded no step, so that its name is free again.

        Raises:
            StoreError: it has steps, or is no longer this owner's.
        """
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            if last_step:
                raise StoreError(
                    f"run {self.record.name!r} is at step {last_step}; only a run without steps is deleted"
                )
            for table in ("dbb_event", "dbb_checkpoint", "dbb_posterior", "dbb_run"):
                connection.execute(text(f"DELETE FROM {table} WHERE run_id = :run"), {"run": self.record.run_id})

    def finish(self) -> None:
        """Mark the run as complete; nothing can be written to it any more. Repeating it is harmless."""
        if self.record.status == "finished":
            return
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            connection.execute(
                text("UPDATE dbb_run SET status = 'finished' WHERE run_id = :run"),
                {"run": self.record.run_id},
            )
            record_event(connection, self.record.run_id, "finish", last_step, last_step, {})
        self.record = replace(self.record, status="finished")

    def _hold(self, connection: Connection) -> int:
        """Lock the run for the rest of the transaction; its last step."""
        connection.execute(_HOLD, {"run": self.record.run_id, "token": self._token, "now": utc_now()})
        return self._check_owner(connection)

    def _check_owner(self, connection: Connection) -> int:
        """The run's last step; raises if it is not this owner's to write."""
        stored = connection.execute(schema.run.select().where(schema.run.c.run_id == self.record.run_id)).one_or_none()
        name = self.record.name
        if stored is None:
            raise StoreError(f"run {name!r} is no longer in {self._database.location}; was the database replaced?")
        if stored.status != "running":
            raise StoreError(finished_text(name, stored.last_step))
        if stored.writer_token != self._token:
            owner = Owner(stored.owner_host, stored.owner_pid, stored.owner_started)
            if owner == NOBODY:
                raise StoreError(f"run {name!r} has been released; claim it again to write to it")
            raise StoreError(
                f"run {name!r} was taken over by {owner} (at step {stored.last_step}); nothing was written, "
                "end this process"
            )
        return int(stored.last_step)


def finished_text(name: str, last_step: int) -> str:
    """Why a finished run cannot be written."""
    return (
        f"run {name!r} finished at step {last_step}; start a new run, "
        f"with --warm_start {name} to begin from its posteriors"
    )


def record_event(
    connection: Connection, run_id: int, kind: str, from_step: int, to_step: int, detail: dict[str, Any]
) -> None:
    """Note what happened to a run, for the people who ask later."""
    connection.execute(
        schema.event.insert().values(
            run_id=run_id,
            created_at=utc_now(),
            kind=kind,
            from_step=from_step,
            to_step=to_step,
            detail=json.dumps(detail),
        )
    )


def utc_now() -> str:
    """Now, UTC, ISO 8601 with milliseconds: sorts as text and reads the same in every database."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
