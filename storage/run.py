"""A run as its owner sees it: the owner is the one process that may write the run's posteriors."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, text

from openrlhf_dbb.storage import decode, records, schema, write
from openrlhf_dbb.storage.damage import check_rows
from openrlhf_dbb.storage.engine import Database, table
from openrlhf_dbb.storage.errors import StoreError, retried
from openrlhf_dbb.storage.owner import NOBODY, Owner
from openrlhf_dbb.storage.records import (
    EvaluationRows,
    PosteriorTable,
    Replayed,
    RunRecord,
    StepRows,
    WarmStart,
)

# Fence, order check, row lock and heartbeat in one statement: it changes the row only for the owner
# and the next step.
_ADVANCE = text("""UPDATE dbb_run SET last_step = :step, heartbeat_at = :now
    WHERE run_id = :run AND writer_token = :token AND status = 'running'
    AND last_step = :step - 1""")

_HOLD = text("""UPDATE dbb_run SET heartbeat_at = :now
    WHERE run_id = :run AND writer_token = :token AND status = 'running'""")

_CHECKPOINT = text("""INSERT INTO dbb_checkpoint (run_id, step, tag) VALUES (:run, :step, :tag)
    ON CONFLICT (run_id, step, tag) DO NOTHING""")

_HASH = ("hash", "S16")  # as of prompt_hash

# A step without run-wide state leaves it unchanged.
_SHARED = """
    SELECT coalesce((SELECT shared FROM dbb_step WHERE run_id = :run AND shared IS NOT NULL
                     ORDER BY step DESC LIMIT 1), shared_start)
    FROM dbb_run WHERE run_id = :run"""


class Run:
    """The owner's side of a run, from ``PosteriorStore.create_run`` or ``claim_run``.

    Every method is one transaction: all of it happens or nothing. Every method raises StoreError if
    another process has claimed the run since. Every writing method also raises StoreError if the
    run is finished, or for a step that is not recorded.

    Attributes:
        record: the run as of this owner's last call.
    """

    def __init__(self, database: Database, record: RunRecord, token: str) -> None:
        self.record = record
        self._database = database
        self._token = token

    @retried
    def load(self, prompt_ids: NDArray[np.int64]) -> PosteriorTable:
        """Return the current posteriors of (P,) prompts, one row each, in the order given."""
        layout = records.StateLayout(self.record.state_fields)
        kind = [("prompt_id", "<i8"), ("step", "<i8"), *layout.columns]
        # All posteriors of the run: nearly all of them are asked for, and choosing costs more than
        # reading.
        query = f"""SELECT {", ".join(name for name, _ in kind)} FROM dbb_posterior
                    WHERE run_id = :run ORDER BY prompt_id"""
        check_rows(self._database, self.record, "dbb_posterior")
        with self._database.transaction() as connection:
            stored = table(connection, kind, query, {"run": self.record.run_id})
            # After reading: nobody else can have written what was read.
            self._check_not_taken(connection)
        wanted = np.asarray(prompt_ids)
        stored_ids = np.ascontiguousarray(stored["prompt_id"])  # a copy is searched faster
        is_stored = np.isin(wanted, stored_ids)
        rows = stored[np.searchsorted(stored_ids, wanted[is_stored])]
        state = np.full((len(wanted), len(layout.fields)), np.nan)
        state[is_stored] = layout.from_columns(rows, self.record.name)
        steps = np.full(len(wanted), -1)
        steps[is_stored] = rows["step"]
        return PosteriorTable(state, steps)

    @retried
    def load_shared(self) -> records.SharedState:
        """Return the estimator's run-wide vectors by name, as of the last step or warm start."""
        with self._database.transaction() as connection:
            shared = newest_shared(connection, self.record)
            self._check_not_taken(connection)
        return shared

    @retried
    def record_step(self, step: int, rows: StepRows) -> None:
        """Store what step ``step`` of the training changed; ``rows`` may be empty.

        The step is one more than the last recorded one. Recording a step again with the same
        content changes nothing. A caller that does not know whether its last call succeeded may
        therefore repeat the call.

        Raises:
            StoreError: the step is not the next one, it is recorded with other content, the rows do
                not start from the stored posteriors, or a value is not finite.
        """
        rows = rows.checked()
        digest = rows.digest(step)
        key = {"step": step, **self._key()}
        with self._database.transaction(write=True) as connection:
            if connection.execute(_ADVANCE, key).rowcount == 1:
                write.step(connection, self.record, step, rows, digest)
                last_step = step
            else:
                last_step = self._accept_repeat(connection, step, digest)
        self.record = replace(self.record, last_step=last_step)

    def _accept_repeat(self, connection: Connection, step: int, digest: bytes) -> int:
        last_step = self._hold(connection)
        name = self.record.name
        if not 1 <= step <= last_step:
            raise StoreError(
                f"run {name!r} is at step {last_step}; the next step is {last_step + 1}, not {step}"
            )
        key = {"run": self.record.run_id, "step": step}
        query = text("SELECT digest FROM dbb_step WHERE run_id = :run AND step = :step")
        stored = connection.scalar(query, key)
        if bytes(stored or b"") != digest:
            raise StoreError(
                f"step {step} of run {name!r} is already recorded with different content (the run "
                f"is at step {last_step}); to record it again, roll back to step {step - 1} first"
            )
        return last_step

    @retried
    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store what the trainer logged of a recorded step, in its row.

        Repeating the call is harmless. Numbers are stored with 7 significant digits, NULL where not
        finite. Other values are left out.

        Raises:
            StoreError: the step is not recorded, or the run is finished or another process's.
        """
        update = text("UPDATE dbb_step SET metrics = :metrics WHERE run_id = :run AND step = :step")
        short = {}
        for name, value in sorted(metrics.items()):
            if isinstance(value, Real):
                short[name] = float(f"{float(value):.7g}") if math.isfinite(value) else None
        key = {"run": self.record.run_id, "step": step, "metrics": json.dumps(short)}
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            if not connection.execute(update, key).rowcount:
                raise StoreError(
                    f"metrics are of step {step}, run {self.record.name!r} is at step {last_step}; "
                    "record the step first"
                )

    @retried
    def record_checkpoint(self, step: int, tag: str) -> None:
        """Make every step up to ``step`` durable.

        To be called before a model checkpoint counts as saved. After that, not even a power loss
        leaves the posteriors behind the model. Repeating the call is harmless.
        """
        with self._database.transaction(write=True, durable=True) as connection:
            if not self._database.is_sqlite:
                connection.execute(text("SET LOCAL synchronous_commit TO on"))
            last_step = self._hold(connection)
            check_reached(self.record, last_step, step, f"record checkpoint {tag!r} of")
            key = {"run": self.record.run_id, "step": step, "tag": records.storable(tag)}
            connection.execute(_CHECKPOINT, key)

    @retried
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
        """Store an evaluation of the model after ``step``.

        One of the same step and name is replaced. ``generated_total`` is the number of training
        rollouts by then; None if unknown. Other args and the result are those of
        :meth:`openrlhf_dbb.storage.PosteriorStore.record_evaluation`.
        """
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            check_reached(self.record, last_step, step, f"store evaluation {name!r} of")
            return write.evaluation(
                connection,
                self.record.run_id,
                step,
                name,
                rows,
                model,
                config,
                generated_total,
            )

    @retried
    def roll_back(self, step: int) -> int:
        """Undo every step after ``step``, bit for bit, to continue from a model checkpoint.

        Return the number of posterior changes undone (rows of history deleted).
        """
        with self._database.transaction(write=True) as connection:
            last_step = self._hold(connection)
            check_reached(self.record, last_step, step, "go back to")
            undone = 0
            if step < last_step:
                undone = write.undo(connection, self.record.run_id, last_step, step)
        self.record = replace(self.record, last_step=step)
        return undone

    def warm_start(
        self,
        source_store: Any,  # a PosteriorStore, which imports this module
        source: RunRecord,
        prompt_ids: NDArray[np.int64],
        *,
        weight: float = 1.0,
        replayed: Replayed | None = None,
    ) -> WarmStart:
        """Begin with the current posteriors and run-wide state of another run.

        Args:
            source_store: the store of the other run, which may be another one than this run's.
            source: the other run.
            prompt_ids: (P,) prompts of this run.
            weight: factor in (0, 1] on alpha and beta: how much the source's rollouts still count.
            replayed: posteriors to begin with in place of a copy, for a source of another
                estimator.

        Raises:
            StoreError: this run already has posteriors or steps, the estimators' states differ, the
                weight does not apply, or no prompt has a posterior in the source.
        """
        own = self.record
        _check_warm_start(own, source, weight, copied=replayed is None)
        # Read first: the source may be in the same database, which has one connection.
        source, known, hashes = _known(source_store.database, source, replayed)
        ids = np.unique(prompt_ids)
        parent = {
            "name": source.name,
            "uuid": source.uuid,
            "step": source.last_step,
            "weight": float(weight),
            "database": source_store.location,
        }
        columns = {f"parent_{name}": value for name, value in parent.items()}
        with self._database.transaction(write=True) as connection:
            own = replace(own, last_step=self._hold(connection))
            prompts = _hashes(connection, self._database, ids)
            _, at, theirs = np.intersect1d(
                prompts["hash"],
                hashes,
                assume_unique=True,
                return_indices=True,
            )
            if not len(at):
                raise StoreError(
                    f"none of the {len(ids)} prompts of run {own.name!r} (data set "
                    f"{own.dataset!r}) has a posterior in run {source.name!r} (data set "
                    f"{source.dataset!r}, step {source.last_step}); name another run"
                )
            order = np.argsort(at)  # ascending as in the key of the table
            matched = prompts["prompt_id"][at[order]]
            # The weight is other than 1 only for alpha and beta.
            state = known.state[theirs[order]] * float(weight)
            _fill(connection, own, Replayed(matched, state, known.shared), columns)
            counts = {"matched": len(matched), "unmatched": len(ids) - len(matched)}
            write.event(connection, own.run_id, "warm_start", 0, 0, parent | counts)
        self.record = replace(self.record, parent=parent)
        return WarmStart(**counts, source=source)

    def begin_with(self, known: Replayed) -> None:
        """Begin with posteriors of prompts in this store that were measured before.

        Raises:
            StoreError: this run already has posteriors or steps.
        """
        with self._database.transaction(write=True) as connection:
            own = replace(self.record, last_step=self._hold(connection))
            _fill(connection, own, known, {})
            counts = {"prompts": len(known.prompt_ids)}
            write.event(connection, own.run_id, "known_rates", 0, 0, counts)

    def release(self) -> None:
        """Give up the run unfinished: any process may claim it; this one cannot write it."""
        with self._database.transaction(write=True) as connection:
            self._hold(connection)
            mine = schema.run.update().where(schema.run.c.run_id == self.record.run_id)
            connection.execute(mine.values(ownership(NOBODY) | {"status": "stale"}))

    @retried
    def finish(self, unused_rollouts: int = 0) -> None:
        """Mark the run as finished: nothing can be written to it any more.

        Repeating the call is harmless. ``unused_rollouts`` were generated after the last step and
        belong to no step (an incomplete last batch).

        Raises:
            StoreError: recorded steps are missing, the file is damaged, or the run is another
                process's.
        """
        unused = {"unused_rollouts": unused_rollouts} if unused_rollouts else {}
        key = {"run": self.record.run_id}
        with self._database.transaction(write=True) as connection:
            self._database.check_content()
            stored = self._lock(connection)
            count = text("SELECT count(*) FROM dbb_step WHERE run_id = :run")
            steps = connection.scalar(count, key)
            if steps != self.record.last_step:
                raise StoreError(
                    f"run {self.record.name!r} has {steps} of {self.record.last_step} recorded "
                    f"steps in {self._database.location}; was an older copy put there? Restore a "
                    "newer one, or resume from there"
                )
            if stored.status == "running":
                update = text("UPDATE dbb_run SET status = 'finished' WHERE run_id = :run")
                connection.execute(update, key)
                step = stored.last_step
                write.event(connection, stored.run_id, "finish", step, step, unused)
        self.record = replace(self.record, status="finished")

    def _hold(self, connection: Connection) -> int:
        """Lock the run for the transaction, renew its heartbeat, and return its last step."""
        stored = self._lock(connection)
        if stored.status != "running":
            raise StoreError(finished_text(self.record.name, stored.last_step))
        return int(stored.last_step)

    def _lock(self, connection: Connection) -> Row[Any]:
        """Lock the run and renew its heartbeat unless it is finished; return its row.

        It is this owner's.
        """
        connection.execute(_HOLD, self._key())
        return self._check_not_taken(connection)

    def _key(self) -> dict[str, Any]:
        """Return the parameters of a statement that changes the run's row for this owner alone."""
        return {"run": self.record.run_id, "token": self._token, "now": write.utc_now()}

    def _check_not_taken(self, connection: Connection) -> Row[Any]:
        row = schema.run.select().where(schema.run.c.run_id == self.record.run_id)
        stored = connection.execute(row).one_or_none()
        name = self.record.name
        if stored is None:
            raise StoreError(
                f"run {name!r} is no longer in {self._database.location}; "
                "was the database replaced?"
            )
        if stored.writer_token != self._token:
            owner = Owner.of(stored)
            if not owner.host:
                raise StoreError(f"run {name!r} was released; claim it again to write to it")
            raise StoreError(
                f"run {name!r} was taken over by {owner} (at step {stored.last_step}); nothing was "
                "written, end this process"
            )
        return stored


def newest_shared(connection: Connection, run: RunRecord) -> records.SharedState:
    """Return a run's run-wide state: that of its last step with one, else of its start."""
    stored = connection.scalar(text(_SHARED), {"run": run.run_id})
    what = f"run-wide state of run {run.name!r} (the last shared, or shared_start)"
    shared = decode.vectors(stored, what)
    shared.pop(records.UNVERIFIED, None)  # ids of prompts, no state
    return shared


def check_reached(run: RunRecord, last_step: int, step: int, action: str) -> None:
    """Check that a run that is at step ``last_step`` has had a step.

    Raises:
        StoreError: it has not; the message says that the run cannot do the ``action``.
    """
    if not 0 <= step <= last_step:
        raise StoreError(
            f"run {run.name!r} is at step {last_step} and cannot {action} step {step}; "
            f"choose step 0 to {last_step}"
        )


def ownership(owner: Owner) -> dict[str, Any]:
    """Return the columns of ``dbb_run`` that say who may write.

    Their token is new, so that a former owner has another one.
    """
    columns = {f"owner_{name}": value for name, value in vars(owner).items()}
    columns["writer_token"] = secrets.token_hex(16)
    return columns


def finished_text(name: str, last_step: int) -> str:
    """Return why nothing can be written to a run, and what to do."""
    return (
        f"run {name!r} finished at step {last_step}; "
        "start a new run, which may begin from its posteriors"
    )


def _check_warm_start(own: RunRecord, source: RunRecord, weight: float, copied: bool) -> None:
    """Raise StoreError if run ``own`` cannot begin with this weight, or a copy of ``source``."""
    fields = list(own.state_fields)
    theirs = list(source.state_fields)
    if not isinstance(weight, Real) or not 0 < weight <= 1:
        raise StoreError(f"the warm start's weight is {weight!r}; it must be in (0, 1]")
    if weight != 1 and set(fields) != {"alpha", "beta"}:
        raise StoreError(
            f"the warm start's weight is {weight!r}, but estimator {own.estimator!r} keeps "
            f"{fields} and only alpha and beta can be weighted; use weight 1"
        )
    version = source.estimator_version
    is_older = source.estimator == own.estimator and version != own.estimator_version
    if copied and (theirs != fields or is_older):
        raise StoreError(
            f"run {source.name!r} keeps {theirs} per prompt (estimator {source.estimator!r}, "
            f"version {version}), run {own.name!r} needs {fields} ({own.estimator!r}, "
            f"version {own.estimator_version}); name a run with the same fields and version"
        )


def _known(
    database: Database,
    source: RunRecord,
    replayed: Replayed | None,
) -> tuple[RunRecord, Replayed, NDArray[np.bytes_]]:
    """Return a run, which may be training meanwhile, and what begins from it.

    That is what was replayed, or what the run knows now. The third value has the hash of each
    prompt (P,).
    """
    layout = records.StateLayout(source.state_fields)
    key = {"run": source.run_id}
    check_rows(database, source, "dbb_posterior")
    with database.transaction() as connection:
        if replayed is not None:
            prompts = _hashes(connection, database, replayed.prompt_ids)
            return source, replayed, prompts["hash"]
        step = connection.scalar(text("SELECT last_step FROM dbb_run WHERE run_id = :run"), key)
        if step is None:
            raise StoreError(
                f"run {source.name!r} is no longer in {database.location}; "
                "look it up again with find_run"
            )
        kind = [("prompt_id", "<i8"), _HASH, *layout.columns]
        query = f"""SELECT {", ".join(name for name, _ in kind)}
                    FROM dbb_posterior JOIN dbb_prompt USING (prompt_id) WHERE run_id = :run"""
        shared = newest_shared(connection, source)
        stored = table(connection, kind, query, key)
    known = Replayed(stored["prompt_id"], layout.from_columns(stored, source.name), shared)
    return replace(source, last_step=int(step)), known, stored["hash"]


def _hashes(connection: Connection, database: Database, ids: NDArray[np.int64]) -> NDArray[np.void]:
    """Return id and hash of the prompts that are stored, ascending by id."""
    chosen = database.one_of("prompt_id")
    query = f"SELECT prompt_id, hash FROM dbb_prompt WHERE {chosen} ORDER BY prompt_id"
    return table(connection, [("prompt_id", "<i8"), _HASH], query, {"ids": database.ids(ids)})


def _fill(
    connection: Connection,
    own: RunRecord,
    known: Replayed,
    columns: Mapping[str, Any],
) -> None:
    """Store what run ``own`` begins with, and these columns of its row.

    Raise StoreError if it has posteriors already.
    """
    filled = "SELECT 1 FROM dbb_posterior WHERE run_id = :run LIMIT 1"
    if own.last_step or connection.scalar(text(filled), {"run": own.run_id}):
        raise StoreError(
            f"run {own.name!r} has posteriors (step {own.last_step}); "
            "only a new run can be warm-started"
        )
    key = {"run_id": own.run_id, "prompt_id": known.prompt_ids, "visits": 0, "step": 0}
    state = records.StateLayout(own.state_fields).to_columns(known.state)
    write.insert(connection, "dbb_posterior", key | state)
    mine = schema.run.update().where(schema.run.c.run_id == own.run_id)
    shared = records.shared_to_text(known.shared)
    connection.execute(mine.values({**columns, "shared_start": shared}))
