"""A posterior store: its prompts, its runs, and who may write each run."""

import itertools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Column, Connection, Row, text

from openrlhf_dbb.storage import decode, schema, write
from openrlhf_dbb.storage.address import check_sqlite_path, parse_url
from openrlhf_dbb.storage.engine import CHUNK, Database
from openrlhf_dbb.storage.errors import StoreError, retried
from openrlhf_dbb.storage.files import is_writable
from openrlhf_dbb.storage.owner import Owner
from openrlhf_dbb.storage.records import EvaluationRows, RunRecord, storable
from openrlhf_dbb.storage.run import Run, check_reached, finished_text, ownership


def open_store(
    url: str | None = None,
    *,
    create: bool = True,
    read_only: bool = False,
) -> "PosteriorStore":
    """Open a store, creating its tables if there are none.

    Args:
        url: file.db, sqlite:///file.db or postgresql://user:password@host:port/database. None: the
            environment variable OPENRLHF_DBB_STORE_URL, else sqlite:///openrlhf_dbb.db in the
            working directory.
        create: False: a missing file or missing tables are an error, and a file that this process
            may not write is opened read-only.
        read_only: nothing can be written through it, nothing is created, and several threads read
            at once.

    Raises:
        StoreError: something is wrong with the URL, the file, the server, the driver or the tables'
            version.
    """
    create = create and not read_only
    address = parse_url(url)
    if address.path:
        check_sqlite_path(address.path, create=create)
        read_only = read_only or not (create or is_writable(address.path))
    database = Database(address, read_only=read_only)
    try:
        schema.prepare(database, create=create)
    except BaseException:
        database.engine.dispose()
        raise
    return PosteriorStore(database, address.text)


class PosteriorStore(AbstractContextManager["PosteriorStore"]):
    """Posteriors of any number of runs in one database; from ``open_store``.

    It is to be closed after use. It belongs to the process that opened it. Threads may share it;
    they take turns.

    Attributes:
        location: for people, never with a password: an absolute path, or
            postgresql://host:port/database.
        url: for opening the same store in another process; contains the password, so it must not be
            shown.
        database: the connections; for modules of this package.
    """

    def __init__(self, database: Database, url: str) -> None:
        self.database = database
        self.location = database.location
        self.url = url

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Runs stay as they are and can be claimed again."""
        self.database.engine.dispose()

    @retried
    def query(self, sql: str, **parameters: Any) -> list[Row[Any]]:
        """Return all rows of a SELECT from the views; ``:name`` stands for a parameter."""
        with self.database.transaction() as connection:
            return list(connection.execute(text(sql), parameters))

    @retried
    def register_prompts(self, prompts: Sequence[str], labels: Sequence[str]) -> NDArray[np.int64]:
        """Return the (P,) ids of prompts with their labels, in the order given.

        New prompts are stored. The same prompt and label have the same id in every run of this
        database.
        """
        pairs = list(zip(prompts, labels, strict=True))
        hashes = [write.prompt_hash(prompt, label) for prompt, label in pairs]
        texts = dict(zip(hashes, pairs, strict=True))
        # Sorted, so that two processes that register at once take their locks in the same order.
        digests = sorted(texts)
        ids: dict[bytes, int] = {}
        for start in range(0, len(digests), CHUNK):
            part = digests[start : start + CHUNK]
            with self.database.transaction(write=True) as connection:
                ids.update(write.find_prompts(connection, part, len(digests)))
                new = [digest for digest in part if digest not in ids]
                if new:
                    rows = []
                    for digest in new:
                        prompt, label = texts[digest]
                        rows.append((digest, storable(prompt), storable(label)))
                    write.new_prompts(connection, rows)
                    ids.update(write.find_prompts(connection, new, len(digests)))
        return np.array([ids[digest] for digest in hashes], dtype=np.int64)

    @retried
    def record_evaluation(
        self,
        name: str,
        rows: Sequence[EvaluationRows],
        *,
        model: str,
        config: Mapping[str, Any],
        run: RunRecord,
        step: int | None = None,
    ) -> int:
        """Store an evaluation of the model that a run has trained, and return its id.

        One of the same run, step and name is replaced. During training the owner calls
        :meth:`openrlhf_dbb.storage.Run.record_evaluation` instead, which refuses former owners.

        Args:
            rows: one for each benchmark, at least one; their prompts must be registered.
            config: how it was evaluated; must not contain secrets.
            step: the training step after which it was evaluated, 0 to the run's last one; None if
                unknown.

        Raises:
            StoreError: there is no such run, or it has not reached the step.
        """
        with self.database.transaction(write=True) as connection:
            last_step = self._locked(connection, run).last_step
            check_reached(run, last_step, step or 0, f"store evaluation {name!r} of")
            return write.evaluation(connection, run.run_id, step, name, rows, model, config, None)

    def delete_run(self, run: RunRecord) -> None:
        """Delete a run with all that belongs to it; its name is free again. Prompts stay.

        Raises:
            StoreError: there is no such run, or another process may be writing it.
        """
        with self.database.transaction(write=True) as connection:
            stored = self._locked(connection, run)
            if stored.status != "finished":
                refusal = _refusal(stored)
                if refusal is not None:
                    raise refusal
            write.delete_run(connection, run.run_id)

    def _locked(self, connection: Connection, run: RunRecord) -> Row[Any]:
        column = schema.run.c
        row = schema.run.select().where(column.run_id == run.run_id, column.uuid == run.uuid)
        stored = connection.execute(row.with_for_update()).one_or_none()
        if stored is None:
            raise StoreError(
                f"run {run.name!r} is no longer in {self.location}; look it up again with find_run"
            )
        return stored

    def create_run(
        self,
        name: str,
        *,
        estimator: str,
        estimator_version: int,
        parameters: Mapping[str, Any],
        state_fields: Sequence[str],
        model: str,
        dataset: str,
        dataset_digest: str,
        reward: str,
        config: Mapping[str, Any],
        method: str = "",
    ) -> Run:
        """Start a run, owned by this process.

        A run of the name that never trained and has no owner is deleted. The arguments are stored
        and shown as given, in the columns of ``dbb_run`` of their names: they must not contain
        secrets. ``state_fields`` are the values that the estimator keeps of a prompt.

        Raises:
            StoreError: the name is taken or not printable.
        """
        if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
            raise StoreError(
                f"the run's name {name!r} is empty, not printable or has spaces around it; "
                "choose another"
            )
        now = write.utc_now()
        values = {
            "uuid": uuid.uuid4().hex,
            "name": name,
            "status": "running",
            "last_step": 0,
            "estimator": estimator,
            "estimator_version": estimator_version,
            "parameters": json.dumps(dict(parameters), allow_nan=False),
            "state_fields": json.dumps(list(state_fields)),
            "model": storable(model),
            "dataset": storable(dataset),
            "dataset_digest": storable(dataset_digest),
            "reward": storable(reward),
            "config": json.dumps(dict(config), allow_nan=False),
            "method": storable(method) or None,
            "created_at": now,
            "heartbeat_at": now,
            **ownership(Owner.of_this_process()),
        }
        by_name = schema.run.select().where(schema.run.c.name == name)
        with self.database.transaction(write=True) as connection:
            former = connection.execute(by_name.with_for_update()).one_or_none()
            if former is not None:
                if not _never_trained(connection, former):
                    raise StoreError(
                        f"there is a run named {name!r} in {self.location}; "
                        "resume it or choose another"
                    )
                write.delete_run(connection, former.run_id)
            connection.execute(schema.run.insert().values(values))
            row = connection.execute(by_name).one()
        return Run(self.database, _record(row), row.writer_token)

    @retried
    def is_taken(self, name: str) -> bool:
        """Return whether a run has this name, other than one that ended before its first step."""
        by_name = schema.run.select().where(schema.run.c.name == name)
        with self.database.transaction() as connection:
            former = connection.execute(by_name).one_or_none()
            return former is not None and not _never_trained(connection, former)

    @retried
    def runs(self) -> list[RunRecord]:
        """Return all runs, oldest first.

        One that cannot be read as a whole says so in its ``damage``.
        """
        rows = schema.run.select().order_by(schema.run.c.run_id)
        with self.database.transaction() as connection:
            return list(map(_record, connection.execute(rows)))

    def find_run(self, ref: str) -> RunRecord:
        """Return the run of this name, else of this uuid, else of this id.

        Raises:
            StoreError: there is none, or a column of its row cannot be read.
        """
        runs = self.runs()
        for key, run in itertools.product(("name", "uuid", "run_id"), runs):
            if str(getattr(run, key)) == ref:
                return run.checked()
        newest = ", ".join(repr(run.name) for run in runs[:-6:-1]) or "none yet"
        raise StoreError(f"there is no run {ref!r} in {self.location}; the newest are: {newest}")

    def latest_run(self, *, unfinished: bool = False) -> RunRecord | None:
        """Return the newest run, or the newest unfinished run; None if there is none.

        Raises as :meth:`find_run`.
        """
        runs = [run for run in self.runs() if run.status != "finished" or not unfinished]
        return runs[-1].checked() if runs else None

    def checkpoints(self, run: RunRecord) -> list[tuple[int, str]]:
        """Return step and tag of a run's checkpoints, ascending, without those rolled back."""
        query = "SELECT step, tag FROM dbb_checkpoint WHERE run_id = :run ORDER BY step, tag"
        return [(row.step, row.tag) for row in self.query(query, run=run.run_id)]

    def claim_run(self, run_id: int, *, wait_s: float = 15.0, take_over: bool = False) -> Run:
        """Become the owner of a run; the former owner can no longer write it.

        A run is claimed at once if its owner is this process, or a process of this host that has
        ended.

        Args:
            wait_s: how long to wait for an owner on this host to end, in seconds.
            take_over: claim the run even from an owner that is alive, or that is on another host,
                where it cannot be checked.

        Raises:
            StoreError: there is no such run, the run is finished, or its owner keeps it.
        """
        deadline = time.monotonic() + wait_s
        self.database.check_content()
        while True:
            row = self._claimable(run_id)
            refusal = _refusal(row)
            if refusal is None or take_over:
                run = self._claim(row, "claim" if refusal is None else "take_over")
                if run is not None:
                    return run
            elif not Owner.of(row).is_local or time.monotonic() >= deadline:
                raise refusal
            time.sleep(0.2)

    def check_claimable(self, run_id: int, *, take_over: bool = False) -> None:
        """Raise the StoreError that :meth:`claim_run` would raise now, without waiting."""
        refusal = _refusal(self._claimable(run_id))
        if refusal is not None and not take_over:
            raise refusal

    @retried
    def _claimable(self, run_id: int) -> Row[Any]:
        by_id = schema.run.select().where(schema.run.c.run_id == run_id)
        with self.database.transaction() as connection:
            row = connection.execute(by_id).one_or_none()
        if row is None:
            raise StoreError(
                f"there is no run with id {run_id} in {self.location}; "
                "look it up again with find_run"
            )
        _record(row).checked()
        if row.status == "finished":
            raise StoreError(finished_text(row.name, row.last_step))
        return row

    def _claim(self, row: Row[Any], kind: str) -> Run | None:
        """Take the run from the owner in ``row``; return None if another process was faster."""
        claimant = Owner.of_this_process()
        column = schema.run.c
        is_run = column.run_id == row.run_id
        is_unchanged = column.writer_token == row.writer_token
        update = schema.run.update().where(is_run, is_unchanged, column.status != "finished")
        detail = {
            "from": {"host": row.owner_host, "pid": row.owner_pid},
            "to": {"host": claimant.host, "pid": claimant.pid},
        }
        with self.database.transaction(write=True) as connection:
            values = ownership(claimant)
            values["status"] = "running"
            values["heartbeat_at"] = write.utc_now()
            if connection.execute(update.values(values)).rowcount != 1:
                return None
            now = connection.execute(schema.run.select().where(is_run)).one()
            write.event(connection, row.run_id, kind, now.last_step, now.last_step, detail)
        return Run(self.database, _record(now), now.writer_token)


def _never_trained(connection: Connection, row: Row[Any]) -> bool:
    evaluated = text("SELECT 1 FROM dbb_evaluation WHERE run_id = :run LIMIT 1")
    unused = row.status != "finished" and not row.last_step and Owner.of(row).is_gone
    return unused and connection.scalar(evaluated, {"run": row.run_id}) is None


def _refusal(row: Row[Any]) -> StoreError | None:
    """Return why this process may not claim a run; None if it may."""
    owner = Owner.of(row)
    if owner.is_gone or owner == Owner.of_this_process():
        return None
    if not owner.is_local:
        return StoreError(
            f"run {row.name!r} is owned by {owner}, last heard of at {row.heartbeat_at}, which "
            "cannot be checked from here (another host, boot or container); if that process has "
            "ended, take the run over (take_over)"
        )
    return StoreError(
        f"run {row.name!r} is still being written by {owner} (step {row.last_step}, last heard of "
        f"at {row.heartbeat_at}); end that process first, or choose another run"
    )


def _record(row: Row[Any]) -> RunRecord:
    """Return the run in a row of ``dbb_run``; what cannot be read of it is named in ``damage``."""
    values: dict[str, Any] = {}
    damages = []
    for column in schema.run.columns:
        name = column.name
        kind = column.type.python_type
        what = f"{name} of run {row.name!r} (number {row.run_id})"
        try:
            values[name] = _decoded(column, decode.typed(row._mapping[name], kind, what), what)
        except StoreError as error:
            values[name] = _STAND_INS.get(name, kind())
            damages.append(str(error))
    values["owner"] = Owner.of(SimpleNamespace(**values))
    values["method"] = values["method"] or ""
    values["parent"] = None
    if values["parent_uuid"]:
        parent = {name: values[f"parent_{name}"] for name in _PARENT}
        if None in parent.values():
            damage = decode.refusal(f"parent_* of run {row.name!r}", parent, "complete")
            damages.append(str(damage))
        else:
            values["parent"] = parent
    values["damage"] = damages[0] if damages else ""
    return RunRecord(**{field.name: values[field.name] for field in fields(RunRecord)})


_STATUSES = ("running", "stale", "finished")
_PARENT = ("name", "uuid", "step", "weight", "database")  # what a run tells of its warm start


_STAND_INS: dict[str, Any] = {
    "parameters": {},
    "config": {},
    "state_fields": (),
    "created_at": "1970-01-01T00:00:00.000Z",
    "heartbeat_at": "1970-01-01T00:00:00.000Z",
}


def _decoded(column: Column[Any], value: Any, what: str) -> Any:
    name = column.name
    if isinstance(value, (int, float)):
        least, most = schema.bounds(column)
        if not least <= value <= most:
            raise decode.refusal(what, value, f"a number from {least} to {most}")
    if name == "status" and value not in _STATUSES:
        raise decode.refusal(what, value, f"one of {', '.join(_STATUSES)}")
    if name in ("parameters", "config"):
        return decode.json_object(value, what)
    if name == "state_fields":
        return decode.names(value, what)
    if name in ("created_at", "heartbeat_at"):
        return decode.moment(value, what)
    return value
