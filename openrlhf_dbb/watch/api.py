import json
import re
import threading
import time
from collections.abc import Callable, Hashable
from datetime import datetime, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from openrlhf_dbb.inspect.compare_runs import ONE_PAIR, held_out_difference
from openrlhf_dbb.inspect.show import method, overview, seconds_since, state
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError
from openrlhf_dbb.storage.read import prompt_texts
from openrlhf_dbb.terminal import readable, safe, shown, template_of
from openrlhf_dbb.watch import details, page, visits
from openrlhf_dbb.watch.series import series
from openrlhf_dbb.watch.visits import Visits

EVERY_S = 0.5
"""The list of runs is read at most this often, however many clients ask."""

# A history of millions of visits takes seconds to read. The server spends a fifth of its time on it at most.
_REST = 4.0
_MOST_ANSWERS = 100
_TEXT = 500  # characters of a prompt in the table
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


class NoSuchAnswer(StoreError):
    """Nothing has the path that was asked for; the text says so in one line."""


class Listed(NamedTuple):
    record: RunRecord
    version: str  # changes when anything of the run changes
    numbers: dict[str, Any]  # everything the list shows, ready for JSON


class Cache:
    """Keeps the last answers with their versions; makes an answer once however many threads ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, SimpleNamespace] = {}

    def get(self, key: Hashable, version: Hashable, make: Callable[[], Any], *, rest: float = 0.0) -> Any:
        """Return the answer of this version: the kept one, or a new one that ``make`` returns.

        An answer of an older version is still returned until ``rest`` times its making time has passed.
        """
        with self._lock:
            new = SimpleNamespace(lock=threading.Lock(), version=None, content=None, rests_until=0.0)
            self._kept[key] = kept = self._kept.pop(key, new)  # last in the order, so that the oldest is dropped
            while len(self._kept) > _MOST_ANSWERS:
                del self._kept[next(iter(self._kept))]
        # The lock of one answer: a slow answer does not hold up the others.
        with kept.lock:
            if kept.version != version and time.monotonic() >= kept.rests_until:
                began = time.monotonic()
                kept.content, kept.version = make(), version
                kept.rests_until = time.monotonic() + rest * (time.monotonic() - began)
            return kept.content


class Api:
    """Answers questions about the runs of a store, in any number of threads."""

    def __init__(self, store: PosteriorStore) -> None:
        self._store = store
        self._cache = Cache()
        self.runs: list[Listed] = []  # newest first

    def refresh(self) -> None:
        """Read the list of runs, unless that was done a moment ago; raise StoreError if it cannot be read."""
        self.runs = self._cache.get("runs", time.monotonic() // EVERY_S, self._listed)

    def _listed(self) -> list[Listed]:
        """Return all runs, newest first; only runs that changed are described anew."""
        store = self._store
        marks = {row.run_id: row for row in store.query(_MARKS)}
        runs = []
        for run in store.runs()[::-1]:
            if run.run_id not in marks:  # begun since
                continue
            version = "-".join([run.uuid[:8], *map(str, marks[run.run_id])])
            numbers = self._cache.get(("run", run.uuid), version, partial(_describe, store, run))
            written = {
                "state": state(run),
                "last_write": run.heartbeat_at,
                "age_s": round(max(seconds_since(run.heartbeat_at), 0), 1),
                "version": version,
                "keeps_rollouts": marks[run.run_id].kept is not None,
            }
            runs.append(Listed(run, version, numbers | written))
        return runs

    def ask(self, path: str, prompt: str | None = None) -> bytes:
        """Return an answer as JSON: the kept one if its run has not changed. Raises as :meth:`answer`."""
        self.refresh()
        if path == "state":  # it tells the age of each run, so it is never the same twice
            return page.encoded(self.answer(path))
        _, *ids = path.split("/")
        compared = ids[2:3] if ids[1:2] == ["compare"] else []
        version: tuple[Any, ...] = tuple(self._run(name).version for name in (*ids[:1], *compared))
        if ids[1:] in (["pool"], ["prompts"]):
            # The state of the prompts may be older than the run: an answer made from it must not outlive it.
            version += (self.visits(self._run(ids[0])).last,)
        return bytes(self._cache.get((path, prompt), version, lambda: page.encoded(self.answer(path, prompt))))

    def answer(self, path: str, prompt: str | None = None) -> dict[str, Any]:
        """Return the answer to a path such as ``runs/3/series``; ``prompt``: id of one, for its rollouts in a step.

        Raise NoSuchAnswer if nothing has this path, StoreError if the store cannot be read.
        """
        match path.split("/"):
            case ["state"]:
                return {
                    "store": shown(self._store.location, width=None),
                    "now": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
                    "runs": [listed_run.numbers for listed_run in self.runs],
                }
            case ["runs", run, "series"]:
                return series(self._store, self._run(run).record)
            case ["runs", run, "pool"]:
                of_run = self.visits(self._run(run))
                return {
                    "last": of_run.last,
                    "unit": of_run.unit,
                    "thresholds": visits.THRESHOLDS,
                    "state_counts": np.bincount(of_run.state, minlength=len(visits.STATES)),
                    **of_run.picture,
                }
            case ["runs", run, "prompts"]:
                of_run = self.visits(self._run(run))
                texts = list(prompt_texts(self._store, of_run.prompt_id, length=_TEXT))
                return {
                    "last": of_run.last,
                    "columns": {
                        "id": of_run.prompt_id,
                        "state": of_run.state,
                        "mean": of_run.mean,
                        "change": of_run.mean - of_run.first,
                        "visits": of_run.visits,
                        "text": [readable(text) for _, text, _, _ in texts],
                        "label": [readable(label) for _, _, label, _ in texts],
                    },
                }
            case ["runs", run, "prompts", name]:
                described = details.prompt(self._store, self._run(run).record, _integer(name))
                if described is None:
                    raise NoSuchAnswer(f"run {self._run(run).record.name!r} has no prompt {name[:80]!r}")
                return described
            case ["runs", run, "rollouts", step]:
                last = None if step == "latest" else _integer(step)
                return details.rollouts(
                    self._store, self._run(run).record, last, None if prompt is None else _integer(prompt)
                )
            case ["runs", run, "compare", other]:
                first, second = self._run(run).record, self._run(other).record
                return {"difference": held_out_difference(self._store, first, second), "caution": ONE_PAIR}
            case ["runs", run, "about"]:
                return details.about(self._store, self._run(run).record)
        raise NoSuchAnswer(f"there is no answer {path[:80]!r}; there are: state, runs/3/series and the like")

    def _run(self, name: str) -> Listed:
        for run in self.runs:
            if str(run.record.run_id) == name:
                return run
        raise NoSuchAnswer(f"there is no run {name[:80]!r} in {self._store.location}; state lists them")

    def visits(self, run: Listed) -> Visits:
        """Return the state of the prompts of a run; of a large run, the state of a few steps ago."""
        key, version = ("visits", run.record.uuid), run.version
        states: Visits = self._cache.get(key, version, lambda: visits.read_visits(self._store, run.record), rest=_REST)
        return states


def _integer(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):  # more digits than 18 may not fit into 64 bits
        raise NoSuchAnswer(f"{text[:80]!r} is no step and no prompt id; give a number")
    return int(text)


def _describe(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    recent = store.query(_LAST_STEPS, run=run.run_id)
    rollouts = sum(row.rollouts for row in recent[:_RECENT])
    logged = next((row.metrics for row in recent if row.metrics), "{}")
    planned = json.loads(logged).get("plan/steps")
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
