"""A posterior store: its prompts, its runs, and who may write each run."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row, text
from sqlalchemy.exc import IntegrityError

from storage import prompts as prompt_table
from storage import schema
from storage.engine import Database, check_sqlite_path
from storage.errors import StoreError
from storage.events import record_event, utc_now
from storage.owner import NOBODY, Owner
from storage.records import RunRecord
from storage.retry import retried
from storage.run import Run, finished_text, ownership
from storage.url import choose_url, mask_url, parse_url

_POLL_S = 0.2
_NEWEST_SHOWN = 5
_SHORTEST_PREFIX = 4


def open_store(url: str | None = None, *, create: bool = True) -> PosteriorStore:
    """Open a store, creating its tables if there are none.

    Args:
        url: sqlite:///file.db or postgresql://user:password@host:port/database. None: the environment
            variable OPENRLHF_DBB_STORE_URL, else sqlite:///openrlhf_dbb.db in the working directory.
        create: False to look only: a missing file or missing tables are then an error.

    Raises:
        StoreError: the URL, the file, the server, the driver or the tables' version; one line.
    """
    text_url = choose_url(url)
    address = parse_url(text_url)
    if address.kind == "sqlite":
        check_sqlite_path(address.path, create=create)
    database = Database(address)
    try:
        schema.prepare(database, create=create)
    except BaseException:
        database.close()
        raise
    url = f"sqlite:///{database.location}" if address.kind == "sqlite" else text_url
    return PosteriorStore(database, url)


class PosteriorStore:
    """Posteriors of any number of runs in one database; from ``open_store``, to be closed after use.

    Belongs to the process that opened it. Threads may share it; they take turns.

    Attributes:
        location: for people, never with a password: an absolute path, or postgresql://host:port/database.
        url: for opening the same store in another process; holds the password, so never to be shown.
        database: the connection below; for modules of this package.
    """

    def __init__(self, database: Database, url: str) -> None:
        self.database = database
        self.location = database.location
        self.url = url

    def __repr__(self) -> str:
        return f"PosteriorStore({mask_url(self.url)!r})"

    def __enter__(self) -> PosteriorStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Runs stay as they are, to be claimed again."""
        self.database.close()

    @retried
    def query(self, sql: str, **parameters: Any) -> list[Row[Any]]:
        """All rows of a SELECT over the views; ``:name`` in it stands for a parameter.

        Raises:
            StoreError: the database refuses it.
        """
        with self.database.transaction() as connection:
            return list(connection.execute(text(sql), parameters))

    @retried
    def register_prompts(self, prompts: Sequence[str], labels: Sequence[str]) -> NDArray[np.int64]:
        """Ids of P prompts with their labels, in the given order; those not known yet are stored.

        Returns:
            (P,) int64; equal prompt and label, equal id, in every run of this database.
        """
        return prompt_table.register(self.database, prompts, labels)

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
    ) -> Run:
        """Start a run, owned by this process.

        Args:
            name: unique in this database.
            estimator, estimator_version, parameters, state_fields: what computes the posteriors, and the
                names of the numbers it keeps per prompt; ``alpha`` and ``beta`` get columns of their own.
            model, dataset, dataset_digest, reward, config: what is trained. Kept and shown as given, so
                they must hold no secrets.

        Raises:
            StoreError: the name is taken or not printable, or a value cannot be kept as JSON.
        """
        if not name or not name.isprintable() or name != name.strip():
            raise StoreError(f"the run name {name!r} is empty, not printable or framed by blanks; choose another")
        if len(set(state_fields)) != len(state_fields):
            raise StoreError(f"the state fields {list(state_fields)} of estimator {estimator!r} are not distinct")
        token, owner, now = secrets.token_hex(16), Owner.of_this_process(), utc_now()
        values = {
            "uuid": uuid.uuid4().hex,
            "name": name,
            "status": "running",
            "last_step": 0,
            "estimator": estimator,
            "estimator_version": estimator_version,
            "parameters": _json("parameters", dict(parameters)),
            "state_fields": _json("state_fields", list(state_fields)),
            "model": prompt_table.storable(model),
            "dataset": prompt_table.storable(dataset),
            "dataset_digest": prompt_table.storable(dataset_digest),
            "reward": prompt_table.storable(reward),
            "config": _json("config", dict(config)),
            "created_at": now,
            "heartbeat_at": now,
            **ownership(token, owner),
        }
        return Run(self.database, _record(self._insert_run(values)), token)

    @retried
    def _insert_run(self, values: dict[str, Any]) -> Row[Any]:
        with self.database.transaction(write=True) as connection:
            try:
                with connection.begin_nested():
                    connection.execute(schema.run.insert().values(values))
            except IntegrityError:
                pass
            row = connection.execute(schema.run.select().where(schema.run.c.name == values["name"])).one()
            if row.uuid != values["uuid"]:  # else the insert is ours, by a try whose answer was lost
                raise StoreError(
                    f"there is a run named {row.name!r} in {self.location}; continue it or choose another name"
                )
            return row

    @retried
    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        with self.database.transaction() as connection:
            return [_record(row) for row in connection.execute(schema.run.select().order_by(schema.run.c.run_id))]

    def find_run(self, ref: str) -> RunRecord:
        """The run of this name, else of this uuid (or its first digits, at least four), else of this number.

        Raises:
            StoreError: there is none, or several.
        """
        runs = self.runs()
        named = [run for run in runs if run.name == ref]
        prefix = ref.replace("-", "").lower()
        if not named and len(prefix) >= _SHORTEST_PREFIX:
            named = [run for run in runs if run.uuid.startswith(prefix)]
        if not named:
            named = [run for run in runs if str(run.run_id) == ref]
        if len(named) == 1:
            return named[0]
        if named:
            several = ", ".join(f"{run.uuid} ({run.name})" for run in named[:_NEWEST_SHOWN])
            raise StoreError(f"{ref!r} is the start of several runs in {self.location}: {several}; give more digits")
        newest = ", ".join(repr(run.name) for run in runs[: -_NEWEST_SHOWN - 1 : -1]) or "none yet"
        raise StoreError(f"there is no run {ref!r} in {self.location}; the newest are: {newest}")

    @retried
    def latest_run(self, *, unfinished: bool = False) -> RunRecord | None:
        """The run created last (of those not finished); None if there is none."""
        query = schema.run.select().order_by(schema.run.c.run_id.desc()).limit(1)
        if unfinished:
            query = query.where(schema.run.c.status == "running")
        with self.database.transaction() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _record(row)

    def claim_run(self, run_id: int, *, wait_s: float = 15.0, take_over: bool = False) -> Run:
        """Become the owner of a run; whoever was it before can no longer write.

        A run whose owner has ended on this host, or is this very process, is claimed at once.

        Args:
            wait_s: how long an owner that still lives on this host is given to end, in seconds.
            take_over: claim it even from an owner that lives, or that is on another host, where it
                cannot be seen.

        Raises:
            StoreError: no such run, it is finished, or its owner keeps it.
        """
        deadline = time.monotonic() + wait_s
        claimant = Owner.of_this_process()
        while True:
            row = self._claimable(run_id)
            owner = Owner(row.owner_host, row.owner_pid, row.owner_started)
            held = owner not in (claimant, NOBODY) and (owner.is_alive() if owner.is_local else True)
            if not held or take_over:
                run = self._claim(row, claimant, "take_over" if held else "claim", secrets.token_hex(16))
                if run is not None:
                    return run
            elif not owner.is_local:
                raise StoreError(
                    f"run {row.name!r} is owned by {owner}, last heard of at {row.heartbeat_at}, which "
                    "cannot be seen from here; if that process has ended, take the run over "
                    "(take_over=True, or --store.take_over)"
                )
            elif time.monotonic() >= deadline:
                raise StoreError(
                    f"run {row.name!r} is still being written by {owner} (step {row.last_step}, last heard "
                    f"of at {row.heartbeat_at}); end that process first, or choose another run"
                )
            if held:
                time.sleep(_POLL_S)

    @retried
    def _claimable(self, run_id: int) -> Row[Any]:
        with self.database.transaction() as connection:
            row = connection.execute(schema.run.select().where(schema.run.c.run_id == run_id)).one_or_none()
        if row is None:
            raise StoreError(f"there is no run number {run_id} in {self.location}; look it up again with find_run")
        if row.status != "running":
            raise StoreError(finished_text(row.name, row.last_step))
        return row

    @retried
    def _claim(self, row: Row[Any], claimant: Owner, kind: str, token: str) -> Run | None:
        """Take the run from the owner seen in ``row``; None if another process was quicker."""
        with self.database.transaction(write=True) as connection:
            changed = connection.execute(
                schema.run.update()
                .where(schema.run.c.run_id == row.run_id, schema.run.c.writer_token == row.writer_token)
                .where(schema.run.c.status == "running")
                .values(heartbeat_at=utc_now(), **ownership(token, claimant))
            )
            now = connection.execute(schema.run.select().where(schema.run.c.run_id == row.run_id)).one()
            if changed.rowcount != 1:
                # With this token it is ours, by a try whose answer was lost.
                return Run(self.database, _record(now), token) if now.writer_token == token else None
            detail = {"from": {"host": row.owner_host, "pid": row.owner_pid}}
            detail["to"] = {"host": claimant.host, "pid": claimant.pid}
            record_event(connection, row.run_id, kind, now.last_step, now.last_step, detail)
        return Run(self.database, _record(now), token)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"the run's {name} cannot be kept as JSON: {error}; pass plain numbers and text") from None


def _record(row: Row[Any]) -> RunRecord:
    parent = None
    if row.parent_uuid is not None:
        parent = {key: getattr(row, f"parent_{key}") for key in ("name", "uuid", "step", "weight", "database")}
    return RunRecord(
        run_id=row.run_id,
        uuid=row.uuid,
        name=row.name,
        status=row.status,
        last_step=row.last_step,
        estimator=row.estimator,
        estimator_version=row.estimator_version,
        parameters=json.loads(row.parameters),
        state_fields=tuple(json.loads(row.state_fields)),
        model=row.model,
        dataset=row.dataset,
        dataset_digest=row.dataset_digest,
        reward=row.reward,
        config=json.loads(row.config),
        created_at=row.created_at,
        parent=parent,
    )
