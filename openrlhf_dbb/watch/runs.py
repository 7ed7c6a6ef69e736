"""List the runs of a store in numbers, each with a version that changes when anything of the run does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Row, text

from openrlhf_dbb.inspect.overview import held_out_numbers, method, seconds_since, state
from openrlhf_dbb.terminal import readable, shown, without_passwords
from openrlhf_dbb.watch.numbers import number
from openrlhf_dbb.watch.series import LATE_STEPS, PAUSES, moments, usage
from storage import PosteriorStore, RunRecord

RECENT = 20
"""The list shows the success rate and the time per step of so many last steps."""

_SHORTEST_TEMPLATE = 10
_SAMPLED_PROMPTS = 200

# One row per run; only tables that are small or keyed by run and step are read.
_MARKS = text(
    f"""SELECT r.run_id, r.status, r.last_step, e.event, e.past, v.evaluations, v.evaluated_at,
               (SELECT count(s.metrics) FROM dbb_step s
                WHERE s.run_id = r.run_id AND s.step > r.last_step - {LATE_STEPS}) AS measured,
               (SELECT max(x.step) FROM dbb_rollout x WHERE x.run_id = r.run_id) AS kept
        FROM dbb_run r
        LEFT JOIN (SELECT run_id, max(event_id) AS event,
                          max(CASE WHEN kind IN ('roll_back', 'warm_start') THEN event_id END) AS past
                   FROM dbb_event GROUP BY run_id) e ON e.run_id = r.run_id
        LEFT JOIN (SELECT run_id, count(*) AS evaluations, max(created_at) AS evaluated_at
                   FROM dbb_evaluation GROUP BY run_id) v ON v.run_id = r.run_id"""
)
_LAST_STEPS = text(
    f"""SELECT rollouts, successes, created_at, metrics FROM dbb_step
        WHERE run_id = :run ORDER BY step DESC LIMIT {RECENT + 1}"""
)
_SAMPLE = text(
    f"""SELECT prompt FROM dbb_prompt WHERE prompt_id IN
        (SELECT prompt_id FROM dbb_posterior WHERE run_id = :run ORDER BY prompt_id LIMIT {_SAMPLED_PROMPTS})"""
)


class Listed(NamedTuple):
    """One run of the list.

    Attributes:
        version: changes when anything of the run does.
        past: changes when steps that were there may have changed, after a roll back or a warm start.
        numbers: everything the list shows, ready for JSON.
    """

    record: RunRecord
    version: str
    past: str
    numbers: dict[str, Any]


class Runs:
    """Reads the list of runs, and reads again only the runs that have changed. One thread at a time."""

    def __init__(self, store: PosteriorStore) -> None:
        self._store = store
        self._described: dict[str, tuple[str, dict[str, Any]]] = {}  # by uuid: version and numbers

    def read(self) -> list[Listed]:
        """Return all runs, newest first.

        Raises:
            StoreError: the store cannot be read.
        """
        records = self._store.runs()[::-1]
        with self._store.database.transaction() as connection:
            marks = {row.run_id: row for row in connection.execute(_MARKS)}
        return [self._listed(record, marks[record.run_id]) for record in records if record.run_id in marks]

    def _listed(self, run: RunRecord, marks: Row[Any]) -> Listed:
        version = "-".join([run.uuid[:8], *("" if mark is None else str(mark) for mark in marks)])
        kept = self._described.get(run.uuid)
        numbers = kept[1] if kept is not None and kept[0] == version else self._describe(run, marks)
        self._described[run.uuid] = (version, numbers)
        written = {
            "state": state(run),
            "last_write": run.heartbeat_at,
            "age_s": round(max(seconds_since(run.heartbeat_at), 0), 1),
            "version": version,
        }
        return Listed(run, version, f"{run.uuid[:8]}-{marks.past or 0}", numbers | written)

    def _describe(self, run: RunRecord, marks: Row[Any]) -> dict[str, Any]:
        with self._store.database.transaction() as connection:
            recent = connection.execute(_LAST_STEPS, {"run": run.run_id}).all()
            totals = usage(connection, run.run_id)
            seconds = number(_seconds_per_step(connection, run, recent))
            prompts = [readable(row.prompt) for row in connection.execute(_SAMPLE, {"run": run.run_id})]
        held_out = held_out_numbers(self._store, run)
        rollouts = sum(row.rollouts for row in recent[:RECENT])
        planned = _planned(recent)
        left = None if planned is None or seconds is None else number(max(planned - run.last_step, 0) * seconds)
        return {
            "id": run.run_id,
            "name": _safe(run.name),
            "uuid": run.uuid,
            "method": _safe(method(run)),
            "estimator": _safe(run.estimator),
            "model": _safe(run.model),
            "dataset": _safe(run.dataset),
            "started": run.created_at,
            "step": run.last_step,
            "planned": planned,
            "rollouts": totals["generated"],
            "tokens": totals["generated_tokens"],
            "reward": number(sum(row.successes for row in recent[:RECENT]) / rollouts) if rollouts else None,
            "seconds_per_step": seconds,
            "time_left_s": left,
            "held_out": None if held_out is None else {name: number(value) for name, value in held_out.items()},
            "keeps_rollouts": marks.kept is not None,
            "mean_name": mean_name(run),
            "template": template_of(prompts),
        }


def mean_name(run: RunRecord) -> str:
    """Return the name of the run's estimate of a prompt: only some estimators have a posterior."""
    if {"alpha", "beta"} <= set(run.state_fields):
        return "posterior mean"
    return "estimated mean" if run.state_fields else "group mean"


def template_of(texts: Sequence[str]) -> tuple[str, str]:
    """Return what texts begin and end with up to a mark, such as a chat template; "" for a part that is short.

    Example:
        >>> template_of([f"<|im_start|>user\\nAdd {n}.<|im_end|>\\n" for n in ("one", "two", "three")])
        ('<|im_start|>user\\n', '<|im_end|>\\n')
    """
    if len(texts) < 3:
        return "", ""
    # Not in the middle of a line: its first words belong to the question even if all questions share them.
    start = re.sub(r"[^>\n]*\Z", "", _common_start(texts))
    end = re.sub(r"\A[^<\n]*", "", _common_start([text[len(start) :][::-1] for text in texts])[::-1])
    return (start if len(start) >= _SHORTEST_TEMPLATE else "", end if len(end) >= _SHORTEST_TEMPLATE else "")


def _common_start(texts: Sequence[str]) -> str:
    # Whatever the first and the last in alphabetical order share, all between them share as well.
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _safe(value: str) -> str:
    return shown(without_passwords(value), width=None)


def _planned(newest_first: Sequence[Row[Any]]) -> int | None:
    """Return the number of planned steps, which a trainer logs with its metrics."""
    for row in newest_first:
        if row.metrics:
            value = json.loads(row.metrics).get("plan/steps")
            return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    return None


def _seconds_per_step(connection: Connection, run: RunRecord, newest_first: Sequence[Row[Any]]) -> float | None:
    """Return the median time from one step to the next, without those between which the training paused."""
    kinds = ", ".join(f"'{kind}'" for kind in PAUSES)
    query = f"SELECT created_at FROM dbb_event WHERE run_id = :run AND kind IN ({kinds}) ORDER BY event_id"
    pauses = moments(row.created_at for row in connection.execute(text(query), {"run": run.run_id}))
    ends = moments(row.created_at for row in newest_first[::-1])
    pauses_before = np.searchsorted(np.sort(pauses), ends, side="right")
    seconds = np.diff(ends)[np.diff(pauses_before) == 0]
    return float(np.median(seconds)) if len(seconds) else None
