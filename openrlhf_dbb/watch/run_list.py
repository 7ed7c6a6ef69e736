"""List the runs of a store in numbers; a run's version changes when anything of the run changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from openrlhf_dbb.inspect.overview import method, overview, seconds_since, state
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.read import number_in
from openrlhf_dbb.storage.url import BadRow
from openrlhf_dbb.terminal import readable, safe, template_of

_RECENT = 20  # steps, for the success rate and the time per step of the list
_LATE = 16  # steps whose metrics may be written a moment after them
_SAMPLED_PROMPTS = 200

# One row per run; only tables that are small or keyed by run and step are read.
_MARKS = f"""
    SELECT r.run_id, r.status, r.last_step AS until, e.event, v.evaluations, v.evaluated_at,
           (SELECT count(s.metrics) FROM dbb_step s
            WHERE s.run_id = r.run_id AND s.step > r.last_step - {_LATE}) AS measured,
           (SELECT max(x.step) FROM dbb_rollout x WHERE x.run_id = r.run_id) AS kept
    FROM dbb_run r
    LEFT JOIN (SELECT run_id, max(event_id) AS event FROM dbb_event GROUP BY run_id) e ON e.run_id = r.run_id
    LEFT JOIN (SELECT run_id, count(*) AS evaluations, max(created_at) AS evaluated_at
               FROM dbb_evaluation GROUP BY run_id) v ON v.run_id = r.run_id"""
_LAST_STEPS = f"""
    SELECT rollouts, successes, created_at, metrics FROM dbb_step
    WHERE run_id = :run ORDER BY step DESC LIMIT {_RECENT + 1}"""
_SAMPLE = f"""
    SELECT prompt FROM dbb_prompt WHERE prompt_id IN
    (SELECT prompt_id FROM dbb_posterior WHERE run_id = :run ORDER BY prompt_id LIMIT {_SAMPLED_PROMPTS})"""


class Listed(NamedTuple):
    """One run of the list."""

    record: RunRecord
    version: str  # changes when anything of the run changes
    numbers: dict[str, Any]  # everything the list shows, ready for JSON


def listed(store: PosteriorStore, cached: Callable[..., Any]) -> list[Listed]:
    """Return all runs, newest first; ``cached`` is ``Cache.get``, so that only runs that changed are read again."""
    records = store.runs()[::-1]
    marks = {row.run_id: row for row in store.query(_MARKS)}
    runs = []
    for run in records:
        if run.run_id not in marks:  # begun since
            continue
        version = "-".join([run.uuid[:8], *map(str, marks[run.run_id])])
        try:
            numbers = cached(("run", run.uuid), version, lambda run=run: _describe(store, run))
        except BadRow as error:
            store.report(error)
            continue
        written = {
            "state": state(run),
            "last_write": run.heartbeat_at,
            "age_s": round(max(seconds_since(run.heartbeat_at), 0), 1),
            "version": version,
            "keeps_rollouts": marks[run.run_id].kept is not None,
        }
        runs.append(Listed(run, version, numbers | written))
    return runs


def _describe(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    recent = store.query(_LAST_STEPS, run=run.run_id)
    rollouts = sum(row.rollouts for row in recent[:_RECENT])
    logged = next((row.metrics for row in recent if row.metrics), "{}")
    planned = number_in("dbb_step", run, "metrics", logged, "plan/steps")
    # The median leaves out the pause between two sessions of a training.
    ends = np.array([row.created_at.rstrip("Z") for row in recent[::-1]], dtype="datetime64[ms]")
    seconds = float(np.median(np.diff(ends).astype(float))) / 1000 if len(recent) > 1 else None
    numbers = {name: safe(value) if isinstance(value, str) else value for name, value in overview(store, run).items()}
    # Only some estimators have a posterior.
    mean_name = "estimated mean" if run.state_fields else "group mean"
    if {"alpha", "beta"} <= set(run.state_fields):
        mean_name = "posterior mean"
    return numbers | {
        "id": run.run_id,
        "method": safe(method(run)),
        "planned": planned,
        "reward": sum(row.successes for row in recent[:_RECENT]) / rollouts if rollouts else None,
        "seconds_per_step": seconds,
        "time_left_s": None if planned is None or seconds is None else max(planned - run.last_step, 0) * seconds,
        "mean_name": mean_name,
        "template": template_of([readable(row.prompt) for row in store.query(_SAMPLE, run=run.run_id)]),
    }
