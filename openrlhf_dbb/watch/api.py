"""Answer questions about the runs of a store, in texts that are safe to show."""

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Hashable
from datetime import datetime, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from openrlhf_dbb.inspect.compare_runs import ONE_PAIR, held_out_difference
from openrlhf_dbb.inspect.facts import facts, read_view
from openrlhf_dbb.inspect.numbers import overview
from openrlhf_dbb.inspect.status import method, seconds_since, state
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.storage import PosteriorStore, RunRecord, StoreError
from openrlhf_dbb.storage.decode import naming_damage
from openrlhf_dbb.terminal import readable, safe, shown, template_of
from openrlhf_dbb.watch import curves, history, prompts, queries
from openrlhf_dbb.watch.history import Pool

EVERY_S = 0.5  # the list of runs is read at most this often, however many clients ask
KEPT_ANSWERS = 1000


class NoSuchAnswer(StoreError):
    """Nothing has the path that was asked for; the text says so in one line."""


class Listed(NamedTuple):
    """A run as the list of runs shows it."""

    run_id: int
    uuid: str
    name: str
    record: RunRecord | None  # None if the run cannot be found
    version: str  # changes when anything of the run changes
    numbers: dict[str, Any]  # all that the list shows; "error" says why the run cannot be read


class Api:
    """Answers in any number of threads; an answer is made once however many of them ask for it.

    ``only``: ids of the runs that it knows; None: all runs of the store.
    """

    def __init__(self, store: PosteriorStore, only: Collection[int] | None = None) -> None:
        self._store = store
        self._only = only
        self._lock = threading.Lock()
        self._kept: dict[Hashable, SimpleNamespace] = {}  # least recently asked for first
        self.runs: list[Listed] = []  # newest first

    def _once(self, key: Hashable, version: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; the kept one if it is of this version."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None:
                kept = SimpleNamespace(lock=threading.Lock(), version=None, content=None)
            self._kept[key] = kept
            if len(self._kept) > KEPT_ANSWERS:  # a client may ask for any number of paths
                del self._kept[next(iter(self._kept))]
        # The lock of one answer: a slow answer does not hold up the others.
        with kept.lock:
            if kept.version != version:
                kept.content = make()
                kept.version = version
            return kept.content

    def refresh(self) -> None:
        """Read the list of runs, unless that was done a moment ago; raise StoreError if it cannot be read."""
        self.runs = self._once("runs", time.monotonic() // EVERY_S, self._listed)

    def _listed(self) -> list[Listed]:
        records = {run.run_id: run for run in self._store.runs()}
        formerly = {run.uuid: run for run in self.runs}
        runs = []
        for mark in queries.runs(self._store):
            if self._only is None or mark.run_id in self._only:
                runs.append(
                    self._listed_run(mark, records.get(mark.run_id), formerly.get(mark.uuid))
                )
        return runs

    def _listed_run(self, mark: Any, record: RunRecord | None, former: Listed | None) -> Listed:
        version = "-".join([str(mark.uuid)[:8], *map(str, mark[2:])])
        numbers: dict[str, Any] = {
            "id": mark.run_id,
            "uuid": shown(mark.uuid),
            "name": safe(str(mark.name)),
            "state": shown(mark.status),
            "step": mark.until,
            "template": ("", ""),
            "mean_name": _mean_name([]),
        }
        try:
            with naming_damage(f"run {mark.name!r}"):
                if record is None:  # begun since, or it cannot be read
                    record = self._store.find_run(mark.uuid)
                record.checked()
                age = round(max(seconds_since(record.heartbeat_at), 0), 1)
                now = {"state": state(record), "age_s": age}
                numbers |= now
                if former is None or former.version != version or "error" in former.numbers:
                    numbers |= _numbers(self._store, record)
                else:
                    numbers |= former.numbers | now
        except StoreError as error:
            numbers["error"] = shown(error, width=None)
        numbers |= {"version": version, "keeps_rollouts": mark.kept is not None}
        return Listed(mark.run_id, mark.uuid, mark.name, record, version, numbers)

    def ask(self, path: str) -> bytes:
        """Return an answer as JSON: the kept one if its runs have not changed.

        Raises as :meth:`answer`.
        """
        self.refresh()
        if path == "state":  # it tells the age of each run, so it is never the same twice
            return encoded(self.answer(path))
        version = tuple(run.version for run in self._runs_of(path))
        return bytes(self._once(path, version, lambda: encoded(self.answer(path))))

    def answer(self, path: str) -> dict[str, Any]:
        """Return the answer to a path such as ``runs/3/series``.

        Raises:
            NoSuchAnswer: nothing has this path, or its run was deleted meanwhile.
            StoreError: the store cannot be read, or holds a value of the run that cannot be read.
        """
        runs = self._runs_of(path)
        if not runs:
            return self._answer(path)
        try:
            with naming_damage(" or ".join(f"run {run.name!r}" for run in runs)):
                return self._answer(path)
        except NoSuchAnswer:
            raise
        except StoreError:
            for run in runs:
                self._check_still_there(run)
            raise

    def _answer(self, path: str) -> dict[str, Any]:
        # More digits than 18 may not fit into 64 bits.
        match [
            int(part) if re.fullmatch("0|[1-9][0-9]{0,17}", part) else part
            for part in path.split("/")
        ]:
            case ["state"]:
                return {
                    "store": shown(self._store.location, width=None),
                    "now": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "runs": [run.numbers for run in self.runs],
                }
            case ["runs", int(number), *parts]:
                run = self._run(number)
                answer = self._of_run(run, record_of(run), parts)
                if answer is not None:
                    return answer
        raise NoSuchAnswer(
            f"there is no answer {path[:80]!r}; there are: state, runs/3/series and the like"
        )

    def _of_run(self, run: Listed, record: RunRecord, parts: list[Any]) -> dict[str, Any] | None:
        """Return the answer of a run; None if there is none by this path."""
        store = self._store
        match parts:
            case ["series"]:
                return curves.series(store, record)
            case ["pool"]:
                visits, picture = self.visits(run)
                return {
                    "last": visits.last,
                    "unit": visits.unit,
                    "thresholds": history.THRESHOLDS,
                    **picture,
                }
            case ["prompts"]:
                return prompts.prompt_table(store, self.visits(run)[0])
            case ["prompts", int(prompt_id)]:
                return self._prompt(run, record, prompt_id)
            case ["rollouts", "latest"]:
                return prompts.latest_rollouts(store, record)
            case ["rollouts", int(step)]:
                return prompts.rollouts_of_step(store, record, step)
            case ["rollouts", int(step), int(prompt_id)]:
                return prompts.rollouts_of_step(store, record, step, prompt_id)
            case ["compare", int(other)]:
                difference = held_out_difference(store, record, record_of(self._run(other)))
                return {"difference": difference, "caution": ONE_PAIR}
            case ["about"]:
                return _about(store, record)
        return None

    def _runs_of(self, path: str) -> list[Listed]:
        """Return the runs that a path is about."""
        parts = path.split("/")
        numbers = parts[1:2] + (parts[3:4] if "compare" in parts else [])
        return [run for run in self.runs if str(run.run_id) in numbers]

    def _run(self, number: int) -> Listed:
        for run in self.runs:
            if run.run_id == number:
                return run
        raise NoSuchAnswer(f"there is no run {number} in {self._store.location}; state lists them")

    def _check_still_there(self, run: Listed) -> None:
        if not queries.is_there(self._store, run.uuid):
            raise NoSuchAnswer(f"run {run.name!r} was deleted; state lists the others")

    def visits(self, run: Listed) -> Pool:
        """Return the state of the prompts of a run, and their picture.

        Raise StoreError if the run cannot be read.
        """
        read = partial(history.read_visits, self._store, record_of(run))
        visits: Pool = self._once(("visits", run.uuid), run.version, read)
        return visits

    def _prompt(self, run: Listed, record: RunRecord, prompt_id: int) -> dict[str, Any]:
        look = partial(queries.has_unit_scores, self._store, record)
        unit = self._once(("unit", run.uuid), run.version, look)
        prompt = prompts.one_prompt(self._store, record, prompt_id, unit=unit)
        if prompt is None:
            raise NoSuchAnswer(f"run {run.name!r} has no prompt {prompt_id}")
        return prompt


def record_of(run: Listed) -> RunRecord:
    """Return the record of a run; raise StoreError if it cannot be read."""
    if run.record is None:
        raise StoreError(run.numbers["error"])
    return run.record.checked()


def _numbers(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return what the list shows of a run, but its state."""
    recent, sample = queries.listed(store, run)
    rollouts = sum(row.rollouts for row in recent)
    measured = [row for row in recent if row.metrics]
    logged = curves.metrics_of(run, measured[0]) if measured else {}
    numbers = {
        name: safe(value) if isinstance(value, str) else value
        for name, value in overview(store, run).items()
    }
    return numbers | {
        "method": safe(method(run)),
        "planned": logged.get("plan/steps"),
        "reward": sum(row.successes for row in recent) / rollouts if rollouts else None,
        "mean_name": _mean_name(run.state_fields),
        "template": template_of([readable(prompt) for prompt in sample]),
    }


def _mean_name(state_fields: Collection[str]) -> str:
    if {"alpha", "beta"} <= set(state_fields):
        return "posterior mean"
    return "estimated mean" if state_fields else "group mean"


def _about(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Return facts, configuration and events (claims, take-overs, roll backs, ...) of a run."""
    return {
        "facts": [[name, text] for name, text in facts(read_view(store, run)).items()],
        "config": [
            [
                safe(key),
                shown(json.dumps(without_secrets(value, key), ensure_ascii=False), width=None),
            ]
            for key, value in sorted(run.config.items())
        ],
        "events": queries.events(store, run),
    }


def encoded(answer: Any) -> bytes:
    """Return an answer as JSON in UTF-8.

    Fractions have six significant digits. NaN and infinite numbers, which JSON does not have, become null.

    Example:
        >>> encoded({"mean": [0.123456789, 1234567.0, float("nan")]})
        b'{"mean":[0.123457,1234567,null]}'
    """
    # A text may be read with any rule for its numbers.
    written = json.dumps(answer, default=_plain)
    plain = json.loads(written, parse_float=_short, parse_constant=lambda _: None)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """Return numpy's arrays and numbers as Python's, and bytes in the place of a text as a text."""
    return value.tolist() if hasattr(value, "tolist") else readable(value)


def _short(digits: str) -> float:
    # A count that went through an array of floats stays exact.
    return int(float(digits)) if float(digits).is_integer() else float(f"{float(digits):.6g}")
