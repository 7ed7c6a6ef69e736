"""Answer questions about the runs of a store, in texts that are safe to show."""

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
from openrlhf_dbb.inspect.show import facts, method, overview, seconds_since, state
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError, decode
from openrlhf_dbb.storage.read import ADVANTAGE, prompt_history, prompt_texts, whole_prompts
from openrlhf_dbb.terminal import readable, safe, shown, template_of
from openrlhf_dbb.watch import history
from openrlhf_dbb.watch.history import Visits

EVERY_S = 0.5  # the list of runs is read at most this often, however many clients ask
_TEXT = 500  # characters of a prompt in the table
_KEPT_ANSWERS = 1000
_RECENT = 20  # steps, for the success rate in the list
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
    SELECT CAST(rollouts AS BIGINT) AS rollouts, CAST(successes AS DOUBLE PRECISION) AS successes,
           metrics FROM dbb_step
    WHERE run_id = :run ORDER BY step DESC LIMIT {_RECENT}"""
_SAMPLE = f"""
    SELECT prompt FROM dbb_prompt WHERE prompt_id IN
    (SELECT prompt_id FROM dbb_posterior WHERE run_id = :run ORDER BY prompt_id LIMIT {_SAMPLED_PROMPTS})"""
_VISIT = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance", "lag")
_KEPT = """
    SELECT step, count(*) AS kept FROM dbb_rollout
    WHERE run_id = :run AND prompt_id = :prompt AND {of_steps} GROUP BY step"""
_EVENTS = "SELECT created_at, kind, from_step, to_step FROM dbb_event WHERE run_id = :run ORDER BY event_id"
_LATEST = "SELECT max(step) AS step FROM dbb_rollout WHERE run_id = :run"
_ROLLOUTS = f"""
    SELECT prompt_id, sample, reward, score, {ADVANTAGE}, length, truncated, missing, log_prob, lag, read, text
    FROM rollouts r JOIN dbb_step s USING (run_id, step)
    WHERE run_id = :run AND step = :step AND prompt_id = coalesce(:prompt, prompt_id)
    ORDER BY prompt_id, sample"""


class NoSuchAnswer(StoreError):
    """Nothing has the path that was asked for; the text says so in one line."""


class Listed(NamedTuple):
    record: RunRecord
    version: str  # changes when anything of the run changes
    numbers: dict[str, Any]  # all that the list shows


class Api:
    """Answers in any number of threads; an answer is made once however many of them ask for it."""

    def __init__(self, store: PosteriorStore) -> None:
        self._store = store
        self._kept: dict[Hashable, SimpleNamespace] = {}
        self.runs: list[Listed] = []  # newest first

    def _once(self, key: Hashable, version: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; the kept one if it is of this version."""
        if len(self._kept) > _KEPT_ANSWERS:  # a client may ask for any number of paths
            self._kept.clear()
        kept = self._kept.setdefault(key, SimpleNamespace(lock=threading.Lock(), version=None, content=None))
        # The lock of one answer: a slow answer does not hold up the others.
        with kept.lock:
            if kept.version != version:
                kept.content, kept.version = make(), version
            return kept.content

    def refresh(self) -> None:
        """Read the list of runs, unless that was done a moment ago; raise StoreError if it cannot be read."""
        self.runs = self._once("runs", time.monotonic() // EVERY_S, self._listed)

    def _listed(self) -> list[Listed]:
        store = self._store
        marks = {row.run_id: row for row in store.query(_MARKS)}
        runs = []
        for run in store.runs()[::-1]:
            if run.run_id not in marks:  # begun since
                continue
            version = "-".join([run.uuid[:8], *map(str, marks[run.run_id])])
            numbers = self._once(("run", run.uuid), version, partial(_describe, store, run))
            now = {
                "state": state(run),
                "age_s": round(max(seconds_since(run.heartbeat_at), 0), 1),
                "version": version,
                "keeps_rollouts": marks[run.run_id].kept is not None,
            }
            runs.append(Listed(run, version, numbers | now))
        return runs

    def ask(self, path: str) -> bytes:
        """Return an answer as JSON: the kept one if no run has changed. Raises as :meth:`answer`."""
        self.refresh()
        if path == "state":  # it tells the age of each run, so it is never the same twice
            return encoded(self.answer(path))
        version = tuple(run.version for run in self.runs)
        return bytes(self._once(path, version, lambda: encoded(self.answer(path))))

    def answer(self, path: str) -> dict[str, Any]:
        """Return the answer to a path such as ``runs/3/series``.

        Raise NoSuchAnswer if nothing has this path, StoreError if the store cannot be read.
        """
        store = self._store
        # More digits than 18 may not fit into 64 bits.
        match [int(part) if re.fullmatch("[0-9]{1,18}", part) else part for part in path.split("/")]:
            case ["state"]:
                return {
                    "store": shown(store.location, width=None),
                    "now": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "runs": [run.numbers for run in self.runs],
                }
            case ["runs", int(run), "series"]:
                return history.series(store, self._run(run).record)
            case ["runs", int(run), "pool"]:
                visits, picture = self.visits(self._run(run))
                return {"last": visits.last, "unit": visits.unit, "thresholds": history.THRESHOLDS, **picture}
            case ["runs", int(run), "prompts"]:
                return _table(store, self.visits(self._run(run))[0])
            case ["runs", int(run), "prompts", int(prompt_id)]:
                return _prompt(store, self._run(run).record, prompt_id)
            case ["runs", int(run), "rollouts", "latest"]:
                return _rollouts(store, self._run(run).record)
            case ["runs", int(run), "rollouts", int(step)]:
                return _rollouts(store, self._run(run).record, step)
            case ["runs", int(run), "rollouts", int(step), int(prompt_id)]:
                return _rollouts(store, self._run(run).record, step, prompt_id)
            case ["runs", int(run), "compare", int(other)]:
                first, second = self._run(run).record, self._run(other).record
                return {"difference": held_out_difference(store, first, second), "caution": ONE_PAIR}
            case ["runs", int(run), "about"]:
                return _about(store, self._run(run).record)
        raise NoSuchAnswer(f"there is no answer {path[:80]!r}; there are: state, runs/3/series and the like")

    def _run(self, number: int) -> Listed:
        for run in self.runs:
            if run.record.run_id == number:
                run.record.checked()
                return run
        raise NoSuchAnswer(f"there is no run {number} in {self._store.location}; state lists them")

    def visits(self, run: Listed) -> tuple[Visits, dict[str, Any]]:
        """Return the state of the prompts of a run, and their picture."""
        read = partial(history.read_visits, self._store, run.record)
        found: tuple[Visits, dict[str, Any]] = self._once(("visits", run.record.uuid), run.version, read)
        return found


def _describe(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    recent = store.query(_LAST_STEPS, run=run.run_id)
    rollouts = sum(row.rollouts for row in recent)
    logged = next((row.metrics for row in recent if row.metrics), None)
    try:
        planned = decode.numbers(logged, "metrics").get("plan/steps")
    except StoreError:  # told where the metrics are asked for; the list has other runs
        planned = None
    numbers = {name: safe(value) if isinstance(value, str) else value for name, value in overview(store, run).items()}
    has_posterior = {"alpha", "beta"} <= set(run.state_fields)
    return numbers | {
        "id": run.run_id,
        "method": safe(method(run)),
        "planned": planned,
        "reward": sum(row.successes for row in recent) / rollouts if rollouts else None,
        "mean_name": "posterior mean" if has_posterior else "estimated mean" if run.state_fields else "group mean",
        "template": template_of([readable(row.prompt) for row in store.query(_SAMPLE, run=run.run_id)]),
    }


def _table(store: PosteriorStore, visits: Visits) -> dict[str, Any]:
    texts = list(prompt_texts(store, visits.prompt_id, length=_TEXT))
    columns = {
        "id": visits.prompt_id,
        "state": visits.state,
        "mean": visits.mean,
        "change": visits.mean - visits.first,
        "visits": visits.visits,
        "text": [readable(text) for _, text, _, _ in texts],
        "label": [readable(label) for _, _, label, _ in texts],
    }
    return {"last": visits.last, "columns": columns}


def _prompt(store: PosteriorStore, run: RunRecord, prompt_id: int) -> dict[str, Any]:
    """Return one prompt of a run with every visit; raise NoSuchAnswer if the run has no posterior of it.

    "low" and "high" are the central 90 % credible interval after each visit; without alpha and beta, a normal one.
    """
    from scipy.special import betaincinv  # here: a server starts without it

    key = {"run": run.run_id, "prompt": prompt_id}
    posterior = store.query("SELECT mean FROM posteriors WHERE run_id = :run AND prompt_id = :prompt", **key)
    if not posterior:
        raise NoSuchAnswer(f"run {run.name!r} has no prompt {prompt_id}")
    rows = prompt_history(store, run, prompt_id)
    visits = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _VISIT}
    # By step, since the table is keyed by it: otherwise all kept rollouts of the run would be read.
    steps = store.database.ids(visits["step"].astype(np.int64))
    query = _KEPT.format(of_steps=store.database.one_of("step"))
    kept = {row.step: row.kept for row in store.query(query, ids=steps, **key)}
    alpha, beta = visits["alpha"], visits["beta"]
    has_beta = ~np.isnan(alpha + beta)
    half = 1.645 * np.sqrt(visits["variance"] / visits["rollouts"])
    low, high = visits["mean"] - half, visits["mean"] + half
    low[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], 0.05)
    high[has_beta] = betaincinv(alpha[has_beta], beta[has_beta], 0.95)
    columns = (visits["step"], np.full(len(rows), prompt_id), visits["rollouts"], visits["successes"], visits["mean"])
    now = history.summed(np.array([prompt_id]), np.array([posterior[0].mean], dtype=np.float64), np.stack(columns, 1))
    ((text, label),) = whole_prompts(store, np.array([prompt_id]))
    return {
        "text": readable(text),
        "label": readable(label),
        "state": now.state[0],
        "mean": now.mean[0],
        "visits": visits | {"low": low, "high": high, "kept": [kept.get(row["step"], 0) for row in rows]},
    }


def _rollouts(
    store: PosteriorStore, run: RunRecord, step: int | None = None, prompt_id: int | None = None
) -> dict[str, Any]:
    """Return the kept rollouts of a step (None: the last that has any), or of one prompt in it, with their prompts."""
    if step is None:
        step = store.query(_LATEST, run=run.run_id)[0].step
    rows = [row._asdict() for row in store.query(_ROLLOUTS, run=run.run_id, step=step, prompt=prompt_id)]
    ids = np.unique(np.array([row["prompt_id"] for row in rows], dtype=np.int64))
    prompts = zip(ids.tolist(), whole_prompts(store, ids), strict=True)
    return {
        "step": step,
        "rollouts": [row | {name: readable(row[name] or "") for name in ("text", "read")} for row in rows],
        "prompts": {number: {"text": readable(text), "label": readable(label)} for number, (text, label) in prompts},
    }


def _about(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return facts, configuration and events (claims, take-overs, roll backs, ...) of a run."""
    return {
        "facts": [[name, str(value)] for name, value in facts(store, run).items()],
        "config": [
            [safe(key), shown(json.dumps(without_secrets(value, key), ensure_ascii=False), width=None)]
            for key, value in sorted(run.config.items())
        ],
        "events": [list(row) for row in store.query(_EVENTS, run=run.run_id)],
    }


def encoded(answer: Any) -> bytes:
    """Return an answer as JSON in UTF-8.

    Fractions have six significant digits. NaN and infinite numbers, which JSON does not have, become null.

    Example:
        >>> encoded({"mean": np.array([0.123456789, 1234567.0, np.nan])})
        b'{"mean":[0.123457,1234567,null]}'
    """
    # json writes numpy's arrays and integers as lists and ints, and a text may be read with any rule for its numbers.
    written = json.dumps(answer, default=lambda value: value.tolist())
    plain = json.loads(written, parse_float=_short, parse_constant=lambda _: None)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def _short(digits: str) -> float:
    # A count that went through an array of floats stays exact.
    return int(float(digits)) if float(digits).is_integer() else float(f"{float(digits):.6g}")
