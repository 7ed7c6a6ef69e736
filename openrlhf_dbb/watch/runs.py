"""The runs of a store in numbers, as the list of runs shows them; what has changed is found by a few cheap queries."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, text

from openrlhf_dbb.inspect.overview import method, seconds_since, state
from openrlhf_dbb.terminal import shown, without_passwords
from openrlhf_dbb.watch import accuracy
from openrlhf_dbb.watch.accuracy import Accuracies
from openrlhf_dbb.watch.numbers import number
from openrlhf_dbb.watch.probe_errors import ProbeErrors
from openrlhf_dbb.watch.series import LATE_STEPS, PAUSES, Series, moments
from openrlhf_dbb.watch.visits import Visits
from storage import PosteriorStore, RunRecord
from storage.owner import Owner

RECENT = 20
"""Steps whose success rate and time are shown as those of now."""

UNUSED = ("unused_rollouts", "unused_tokens")

PLANNED = "plan/steps"
"""The metric that says which step is the last one planned."""

_SECONDS = 0.3  # of one poll, for what is read of many runs

_POLL = text(
    f"""SELECT r.run_id, r.uuid, r.status, r.last_step, r.heartbeat_at, r.owner_host, r.owner_pid, r.owner_started,
               (SELECT count(s.metrics) FROM dbb_step s
                WHERE s.run_id = r.run_id AND s.step > r.last_step - {LATE_STEPS}) AS measured,
               (SELECT max(x.step) FROM dbb_rollout x WHERE x.run_id = r.run_id) AS kept
        FROM dbb_run r ORDER BY r.run_id DESC"""
)
_EVENTS = text("""SELECT run_id, event_id FROM dbb_event WHERE event_id > :known ORDER BY event_id""")
_TOTALS = text(
    """SELECT count(*) AS steps, count(generated) AS counted, CAST(sum(generated) AS BIGINT) AS rollouts,
              CAST(sum(generated_tokens) AS BIGINT) AS tokens
       FROM dbb_step WHERE run_id = :run AND step > :after AND step <= :last"""
)
_LAST = text(
    f"""SELECT step, rollouts, successes, created_at, metrics, digest FROM dbb_step
        WHERE run_id = :run ORDER BY step DESC LIMIT {RECENT + 1}"""
)


class Followed:
    """One run: what the list of runs says of it, and what has been read of its steps and its history.

    Attributes:
        record: the run as last read.
        unused: rollouts and tokens that were left over at its end.
        prefix: what most of its prompts begin with.
        kept: the last step with kept rollouts, None if there is none.
        changes: grows whenever anything of the run has changed.
        series, visits, probes: see there; read only if they are asked for, each with its lock held.
        series_at, visits_at: ``changes`` when the series, the history was last read, -1 before.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.kept: int | None = None
        self.changes = 0
        self.series_lock, self.visits_lock, self.probes_lock = (threading.Lock() for _ in range(3))
        self.series_at = self.visits_at = -1
        self.series = Series(record.run_id)
        self.probes = ProbeErrors(record.run_id)
        self.visits = Visits(record)
        self.marks: Any = None  # what a poll found; when it differs, something has changed
        self.unused = dict.fromkeys(UNUSED, 0)
        self.prefix = ""
        self._pauses: Sequence[str] = ()
        self._summed = 0  # the last step that is in the totals
        self._digest: bytes | None = None  # its digest
        self._sums = {"steps": 0, "counted": 0, "rollouts": 0, "tokens": 0}
        self._numbers: dict[str, Any] = {}
        self._described = -1  # ``changes`` when the numbers were made

    @property
    def outdated(self) -> bool:
        """Whether the run has changed since :meth:`describe`."""
        return self._described != self.changes

    def describe(self, connection: Connection) -> None:
        """Read what the list of runs says of the steps; of the steps that are summed already, nothing is read again."""
        changes, key = self.changes, {"run": self.record.run_id}
        recent = connection.execute(_LAST, key).all()
        last = recent[0].step if recent else 0
        summed = connection.scalar(
            text("SELECT digest FROM dbb_step WHERE run_id = :run AND step = :step"), key | {"step": self._summed}
        )
        if self._summed and (summed is None or bytes(summed) != self._digest):  # rolled back
            self._summed, self._sums = 0, dict.fromkeys(self._sums, 0)
        new = connection.execute(_TOTALS, key | {"after": self._summed, "last": last}).one()
        self._sums = {name: value + (getattr(new, name) or 0) for name, value in self._sums.items()}
        self._summed, self._digest = last, bytes(recent[0].digest) if recent else None
        query = text(
            "SELECT created_at, kind, CASE WHEN kind = 'finish' THEN detail END AS detail FROM dbb_event "
            "WHERE run_id = :run"
        )
        events = connection.execute(query, key).all()
        self._pauses = [row.created_at for row in events if row.kind in PAUSES]
        noted = [json.loads(row.detail) for row in events if row.detail]
        self.unused = {name: sum(each.get(name, 0) for each in noted) for name in UNUSED}
        self._numbers = self._of_steps(recent[::-1])
        self._described = changes

    def _of_steps(self, recent: Sequence[Row[Any]]) -> dict[str, Any]:
        rollouts = sum(row.rollouts for row in recent[-RECENT:])
        counted = bool(self._sums["counted"])
        return {
            "planned": _planned(recent[::-1]),
            "rollouts": self._sums["rollouts"] if counted else None,
            "tokens": self._sums["tokens"] if counted else None,
            "reward": number(sum(row.successes for row in recent[-RECENT:]) / rollouts) if rollouts else None,
            "seconds_per_step": number(_seconds_per_step([row.created_at for row in recent], self._pauses)),
        }

    def numbers(self, held_out: dict[str, Any] | None, version: str) -> dict[str, Any]:
        """The run in the list of runs."""
        run = self.record
        of_steps = dict.fromkeys(("planned", "rollouts", "tokens", "reward", "seconds_per_step")) | self._numbers
        return {
            "id": run.run_id,
            "name": _safe(run.name),
            "uuid": run.uuid,
            "state": state(run),
            "last_write": run.heartbeat_at,
            "age_s": round(max(seconds_since(run.heartbeat_at), 0), 1),
            "method": _safe(method(run)),
            "estimator": _safe(run.estimator),
            "model": _safe(run.model),
            "dataset": _safe(run.dataset),
            "started": run.created_at,
            "step": run.last_step,
            **of_steps,
            "held_out": held_out,
            "time_left_s": _time_left(run, of_steps),
            "keeps_rollouts": self.kept is not None,
            "version": version,
        }


class Runs:
    """All runs of a store. One thread polls; others read.

    Attributes:
        boot: in every version, so that those of another server are others.
        accuracies: held-out accuracy of all runs.
        in_order: all runs, newest first.
    """

    def __init__(self, store: PosteriorStore) -> None:
        self._store = store
        self._followed: dict[str, Followed] = {}  # by uuid
        self._newest_event = 0
        self._newest_of: dict[int, int] = {}  # event, by run
        self.boot = f"{time.time_ns():x}"
        self.accuracies = Accuracies()
        self.in_order: list[Followed] = []

    def poll(self, *, seconds: float = _SECONDS) -> bool:
        """Find what has changed.

        Args:
            seconds: about how long the totals of many runs may take to read, once each; the rest is read next time.

        Returns:
            Whether all of it is read.

        Raises:
            StoreError: the store cannot be read.
        """
        until = time.monotonic() + seconds
        with self._store.database.transaction() as connection:
            rows = connection.execute(_POLL).all()
            events = connection.execute(_EVENTS, {"known": self._newest_event}).all()
            complete = self.accuracies.refresh(connection, seconds)
        new = any(row.uuid not in self._followed for row in rows)
        self._take(rows, events, {record.uuid: record for record in self._store.runs()} if new else {})
        with self._store.database.transaction() as connection:
            for run in self.in_order:
                if run.outdated:
                    run.describe(connection)
                    if time.monotonic() > until:
                        return False
        return complete

    def _take(self, rows: Sequence[Row[Any]], events: Sequence[Row[Any]], records: dict[str, RunRecord]) -> None:
        for row in events:
            self._newest_event = max(self._newest_event, row.event_id)
            self._newest_of[row.run_id] = max(self._newest_of.get(row.run_id, 0), row.event_id)
        found: dict[str, Followed] = {}
        for row in rows:
            run = self._followed.get(row.uuid)
            if run is None:
                if row.uuid not in records:
                    continue
                run = Followed(records[row.uuid])
            owner = Owner(row.owner_host, row.owner_pid, row.owner_started)
            changed = {"status": row.status, "last_step": row.last_step, "heartbeat_at": row.heartbeat_at}
            run.record, run.kept = replace(run.record, owner=owner, **changed), row.kept
            marks = (
                row.status, row.last_step, row.measured, row.kept, owner, self._newest_of.get(row.run_id),
                tuple(self.accuracies.by_run.get(row.run_id, ())),
            )  # fmt: skip
            if marks != run.marks:
                run.marks, run.changes = marks, run.changes + 1
            found[row.uuid] = run
        self._followed, self.in_order = found, list(found.values())

    def find(self, run_id: int) -> Followed | None:
        """The run with this number."""
        return next((run for run in self.in_order if run.record.run_id == run_id), None)

    def version(self, run: Followed) -> str:
        """Text that changes when anything of the run does."""
        return f"{self.boot}-{run.record.run_id}-{run.changes}-{run.probes.steps}"

    def listed(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        return [
            run.numbers(accuracy.summary(self.accuracies.by_run.get(run.record.run_id, [])), self.version(run))
            for run in self.in_order
        ]


def now_text() -> str:
    """Now in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def _safe(value: str) -> str:
    return shown(without_passwords(value), width=None)


def _planned(newest_first: Sequence[Row[Any]]) -> int | None:
    for row in newest_first:
        if row.metrics:
            value = json.loads(row.metrics).get(PLANNED)
            return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    return None


def _seconds_per_step(created_at: Sequence[str], pauses: Sequence[str]) -> float | None:
    """Median time from one step to the next, oldest first, without those between which the training paused."""
    if len(created_at) < 2:
        return None
    ends, stops = moments(created_at), np.sort(moments(pauses))
    passed = np.searchsorted(stops, ends, side="right")
    took = np.diff(ends)[np.diff(passed) == 0]
    return float(np.median(took)) if len(took) else None


def _time_left(run: RunRecord, of_steps: dict[str, Any]) -> float | None:
    planned, seconds = of_steps["planned"], of_steps["seconds_per_step"]
    if state(run) != "running" or planned is None or seconds is None:
        return None
    return number(max(planned - run.last_step, 0) * seconds)
