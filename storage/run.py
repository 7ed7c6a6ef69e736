"""A run as its owner sees it, the one process that may write its posteriors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, text

from storage import evaluations, schema, shared, steps
from storage.checks import integers
from storage.engine import Database, chunks, execute
from storage.errors import StoreError
from storage.evaluations import EvaluationRows
from storage.events import record_event, utc_now
from storage.owner import NOBODY, Owner
from storage.records import PosteriorTable, RunRecord, StateLayout, StepRows, WarmStart
from storage.retry import retried
from storage.roll_back import undo
from storage.rollouts import metrics_text
from storage.warm_start import begin, check_source

# Fence, order check, row lock and heartbeat in one: it changes the row only for the owner and the next step.
_ADVANCE = """
    UPDATE dbb_run SET last_step = :step, heartbeat_at = :now
    WHERE run_id = :run AND writer_token = :token AND status = 'running' AND last_step = :step - 1"""

_HOLD = text(
    """UPDATE dbb_run SET heartbeat_at = :now
       WHERE run_id = :run AND writer_token = :token AND status = 'running'"""
)

_SET_METRICS = "UPDATE dbb_step SET metrics = :metrics WHERE run_id = :run AND step = :step"

_Result = TypeVar("_Result")


class HasDatabase(Protocol):
    """What a warm start needs of the :class:`storage.PosteriorStore` it reads."""

    @property
    def database(self) -> Database: ...


class Run:
    """The owner's side of a run, from ``PosteriorStore.create_run`` or ``claim_run``.

    Every method is one transaction: all of it happens or nothing. Every method raises StoreError if another process
    has claimed the run since; every writing method also if the run is finished.

    Attributes:
        record: the run as of this owner's last call.
    """

    def __init__(self, database: Database, record: RunRecord, token: str) -> None:
        self.record = record
        self._database = database
        self._layout = StateLayout(record.state_fields)
        self._token = token

    def __repr__(self) -> str:
        return f"Run({self.record.name!r}, step {self.record.last_step}, in {self._database.location})"

    @retried
    def load(self, prompt_ids: NDArray[np.int64]) -> PosteriorTable:
        """The current posteriors of (P,) prompts, one row each, in the order given.

        Raises:
            StoreError: the run is no longer this owner's.
        """
        # "at": the row of each prompt in arrays with one row per distinct prompt.
        ids, at = np.unique(integers("prompt_ids", prompt_ids), return_inverse=True)
        columns = [("prompt_id", "<i8"), ("visits", "<i8"), ("step", "<i8"), *self._layout.columns]
        among, parameters = self._database.among("prompt_id", ids, or_more=True)
        query = f"""SELECT {", ".join(name for name, _ in columns)} FROM dbb_posterior
                    WHERE run_id = :run AND {among} ORDER BY prompt_id"""
        state = np.full((len(ids), len(self.record.state_fields)), np.nan)
        visits, steps = np.zeros(len(ids), dtype=np.int64), np.full(len(ids), -1)
        with self._database.transaction() as connection:
            for rows in chunks(connection, query, {"run": self.record.run_id, **parameters}):
                part = np.array(rows, dtype=columns)
                found = np.searchsorted(ids, part["prompt_id"])
                asked = ids[found] == part["prompt_id"]
                found, part = found[asked], part[asked]
                state[found] = self._layout.from_columns(part)
                visits[found], steps[found] = part["visits"], part["step"]
            self._check_not_taken(connection)  # after reading: nobody else can have written what was read
        return PosteriorTable(state[at], visits[at], steps[at])

    @retried
    def load_shared(self) -> shared.SharedState | None:
        """The estimator's run-wide vectors by name, as of the last step or warm start; None if there are none.

        Raises:
            StoreError: the run is no longer this owner's.
        """
        with self._database.transaction() as connection:
            vectors = shared.from_text(shared.newest(connection, self.record.run_id))
            self._check_not_taken(connection)
        return vectors

    @retried
    def record_step(self, step: int, rows: StepRows) -> None:
        """Store what a training step changed, with its probes, usage and rollouts.

        Recording a step again with the same content changes nothing, so a caller that does not know whether its
        last call succeeded may repeat it.

        Args:
            step: one more than the last recorded step.
            rows: what changed; may be empty.

        Raises:
            StoreError: a gap, the same step with different content, rows that do not fit the stored
                posteriors, values that are not finite, or a run that is no longer this owner's.
        """
        rows = rows.checked(step, len(self.record.state_fields))
        digest = rows.digest(step)
        key = {"run": self.record.run_id, "step": step}
        now = utc_now()
        with self._database.transaction(write=True) as connection:
            if execute(connection, _ADVANCE, {**key, "token": self._token, "now": now}).rowcount != 1:
                last_step = self._accept_repeat(connection, step, digest)
                self.record = replace(self.record, last_step=last_step)
                return
            steps.write(connection, self.record, step, rows, digest, now)
        self.record = replace(self.record, last_step=step)

    @retried
    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store what the trainer logged of a recorded step, in its row; repeating the call is harmless.

        Args:
            step: 1 to the last recorded step.
            metrics: numbers by name, stored with 7 significant digits, NULL where not finite; what is no number is
                left out.

        Raises:
            StoreError: the step is not recorded, or the run is no longer this owner's.
        """
        key = {"run": self.record.run_id, "step": step, "metrics": metrics_text(metrics)}
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            if not execute(connection, _SET_METRICS, key).rowcount:
                raise StoreError(
                    f"metrics are of step {step}, run {self.record.name!r} is at step {last_step}; "
                    "record the step first"
                )

    def _accept_repeat(self, connection: Connection, step: int, digest: bytes) -> int:
        """The run's last step; raises StoreError unless ``step`` is recorded with this content."""
        last_step = self._check_owner(connection)
        name = self.record.name
        if not 1 <= step <= last_step:
            raise StoreError(f"run {name!r} is at step {last_step}; the next step is {last_step + 1}, not {step}")
        stored = connection.execute(
            schema.step.select().where(schema.step.c.run_id == self.record.run_id, schema.step.c.step == step)
        ).one()
        if bytes(stored.digest) != digest:
            raise StoreError(
                f"step {step} of run {name!r} is already recorded with different content "
                f"(the run is at step {last_step}); to record it again, roll back to step {step - 1} first"
            )
        return last_step

    @retried
    def record_checkpoint(self, step: int, tag: str) -> None:
        """Make every step up to ``step`` durable; to be called before a model checkpoint counts as saved.

        After that, not even a power loss leaves the posteriors behind the model. Repeating the call is harmless.

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

    def record_evaluation(
        self,
        step: int,
        name: str,
        rows: Sequence[EvaluationRows],
        *,
        model: str,
        config: Mapping[str, Any],
        generated_total: int | None = None,
    ) -> int:
        """Store an evaluation of the model after ``step``; one of the same step and name is replaced.

        Args and errors as in :meth:`storage.PosteriorStore.record_evaluation`, and:

        Raises:
            StoreError: the run is no longer this owner's.
        """
        values = evaluations.Description(self.record.run_id, step, name, model, config, generated_total).values()
        return self._record_evaluation(values, evaluations.checked(rows, name))

    @retried
    def _record_evaluation(self, values: dict[str, Any], rows: list[EvaluationRows]) -> int:
        with self._database.transaction(write=True) as connection:
            evaluations.check_step(values["step"], self._hold(connection), self.record.name)
            return evaluations.write(connection, values, rows)

    def roll_back(self, step: int) -> int:
        """Undo every step after ``step``, bit for bit, to continue from a model checkpoint of that step.

        Returns:
            Number of posterior changes undone (rows of history deleted).

        Raises:
            StoreError: the run has not reached the step, or it is no longer this owner's.
        """

        def go_back(connection: Connection) -> int:
            last_step = self._hold(connection)
            if not 0 <= step <= last_step:
                raise StoreError(
                    f"run {self.record.name!r} is at step {last_step} and cannot go back to step {step}; "
                    f"choose a model checkpoint of step 0 to {last_step}"
                )
            return undo(connection, self.record.run_id, last_step, step) if step < last_step else 0

        undone = self._write_once(go_back, "writer_token = :token AND last_step = :step", step=step)
        self.record = replace(self.record, last_step=step)
        return undone

    def warm_start(
        self,
        source_store: HasDatabase,
        source: RunRecord,
        prompt_ids: NDArray[np.int64],
        *,
        weight: float = 1.0,
    ) -> WarmStart:
        """Begin with the current posteriors and run-wide state of another run, in this or another store.

        Args:
            source_store: the store of the source; may be this run's own.
            source: the run to copy from; it is not changed.
            prompt_ids: (P,) prompts of this run.
            weight: factor in (0, 1] on alpha and beta: how much the source's rollouts still count.

        Raises:
            StoreError: this run already has posteriors or steps, the estimators' states differ, the
                weight does not apply, or no prompt has a posterior in the source.
        """
        check_source(self.record, source, weight)
        ids = np.unique(integers("prompt_ids", prompt_ids))

        def copy(connection: Connection) -> tuple[dict[str, Any], WarmStart]:
            last_step = self._hold(connection)
            source_database = source_store.database
            return begin(connection, self._database, self.record, last_step, source_database, source, ids, weight)

        parent, warm_start = self._write_once(copy, "writer_token = :token AND parent_uuid IS NOT NULL")
        self.record = replace(self.record, parent=parent)
        return warm_start

    def release(self) -> None:
        """Give up the run unfinished: any process may claim it at once; this one can no longer write it.

        Raises:
            StoreError: the run is no longer this owner's.
        """
        released = secrets.token_hex(16)

        def let_go(connection: Connection) -> None:
            self._hold(connection)
            mine = schema.run.update().where(schema.run.c.run_id == self.record.run_id)
            connection.execute(mine.values(ownership(released, NOBODY)))

        self._write_once(let_go, "writer_token = :released", released=released)

    def discard(self) -> None:
        """Delete the run, which must have no steps; its name is free again.

        Raises:
            StoreError: it has steps, or is no longer this owner's.
        """

        def delete(connection: Connection) -> None:
            last_step = self._hold(connection)
            if last_step:
                raise StoreError(
                    f"run {self.record.name!r} is at step {last_step}; only a run without steps can be deleted"
                )
            evaluations.delete(connection, self.record.run_id)
            for table in ("dbb_event", "dbb_checkpoint", "dbb_posterior", "dbb_run"):
                connection.execute(text(f"DELETE FROM {table} WHERE run_id = :run"), {"run": self.record.run_id})

        gone = text("SELECT count(*) = 0 FROM dbb_run WHERE run_id = :run")
        key = {"run": self.record.run_id}
        self._database.write_once(delete, lambda connection, _: bool(connection.scalar(gone, key)))

    @retried
    def finish(self, unused_rollouts: int = 0, unused_tokens: int = 0) -> None:
        """Mark the run as finished: nothing can be written to it any more. Repeating the call is harmless.

        Args:
            unused_rollouts, unused_tokens: >= 0, rollouts generated after the last step that belong to no step (an
                incomplete last batch), and their response tokens.

        Raises:
            StoreError: a negative count, tokens without rollouts, or the run is no longer this owner's.
        """
        if min(unused_rollouts, unused_tokens) < 0 or (unused_tokens and not unused_rollouts):
            raise StoreError(
                f"run {self.record.name!r} cannot finish with unused_rollouts {unused_rollouts} and unused_tokens "
                f"{unused_tokens}; both must be at least 0, and unused_tokens 0 without unused_rollouts"
            )
        if self.record.status == "finished":
            return
        detail = {"unused_rollouts": int(unused_rollouts), "unused_tokens": int(unused_tokens)}
        with self._database.transaction(write=True) as connection:
            mine = {"run": self.record.run_id, "token": self._token}
            finished = "SELECT 1 FROM dbb_run WHERE run_id = :run AND writer_token = :token AND status = 'finished'"
            if not connection.scalar(text(finished), mine):  # else already committed; the acknowledgement was lost
                last_step = self._hold(connection)
                connection.execute(text("UPDATE dbb_run SET status = 'finished' WHERE run_id = :run"), mine)
                record_event(
                    connection, self.record.run_id, "finish", last_step, last_step, detail if unused_rollouts else {}
                )
        self.record = replace(self.record, status="finished")

    def _write_once(self, work: Callable[[Connection], _Result], committed: str, **values: Any) -> _Result:
        """As :meth:`Database.write_once`, where ``committed`` is SQL that is true of the run's row after the commit."""
        query = text(f"SELECT count(*) FROM dbb_run WHERE run_id = :run AND {committed}")
        values |= {"run": self.record.run_id, "token": self._token}
        return self._database.write_once(work, lambda connection, _: bool(connection.scalar(query, values)))

    def _hold(self, connection: Connection) -> int:
        """Lock the run for the rest of the transaction and renew its heartbeat; its last step."""
        connection.execute(_HOLD, {"run": self.record.run_id, "token": self._token, "now": utc_now()})
        return self._check_owner(connection)

    def _check_owner(self, connection: Connection) -> int:
        """The run's last step; raises StoreError if this owner may not write it."""
        stored = self._check_not_taken(connection)
        if stored.status != "running":
            raise StoreError(finished_text(self.record.name, stored.last_step))
        return int(stored.last_step)

    def _check_not_taken(self, connection: Connection) -> Row[Any]:
        """The run's row, finished or not; raises StoreError if the run is no longer this owner's."""
        stored = connection.execute(schema.run.select().where(schema.run.c.run_id == self.record.run_id)).one_or_none()
        name = self.record.name
        if stored is None:
            raise StoreError(f"run {name!r} is no longer in {self._database.location}; was the database replaced?")
        if stored.writer_token != self._token:
            owner = Owner(stored.owner_host, stored.owner_pid, stored.owner_started)
            if owner == NOBODY:
                raise StoreError(f"run {name!r} was released; claim it again to write to it")
            raise StoreError(
                f"run {name!r} was taken over by {owner} (at step {stored.last_step}); nothing was written, "
                "end this process"
            )
        return stored


def ownership(token: str, owner: Owner) -> dict[str, Any]:
    """The columns of ``dbb_run`` that say who may write."""
    return {
        "writer_token": token,
        "owner_host": owner.host,
        "owner_pid": owner.pid,
        "owner_started": owner.started,
    }


def finished_text(name: str, last_step: int) -> str:
    """Why a finished run cannot be written."""
    return (
        f"run {name!r} finished at step {last_step}; start a new run, "
        f"with --warm_start {name} to begin from its posteriors"
    )
