"""Answer the questions of the page; a server and a file give the same answers.

An answer is a dict for ``page.encoded``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Hashable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import numpy as np

from openrlhf_dbb.inspect.compare_runs import ONE_PAIR, held_out_difference
from openrlhf_dbb.storage import PosteriorStore
from openrlhf_dbb.storage.read import prompt_texts
from openrlhf_dbb.terminal import readable, shown
from openrlhf_dbb.watch import details, page, visits
from openrlhf_dbb.watch.run_list import Listed, listed
from openrlhf_dbb.watch.series import series
from openrlhf_dbb.watch.visits import Visits

EVERY_S = 0.5
"""The list of runs is read at most this often, however many clients ask."""

# A history of millions of visits takes seconds to read. The server spends a fifth of its time on it at most.
_REST = 4.0
_MOST_ANSWERS = 100
_TEXT = 500  # characters of a prompt in the table


class NoSuchAnswer(Exception):
    """Nothing has the path that was asked for; the text says so in one line."""


class Cache:
    """Keeps the last answers with their versions; makes an answer once however many threads ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, SimpleNamespace] = {}

    def get(self, key: Hashable, version: Hashable, make: Callable[[], Any], *, rest: float = 0.0) -> Any:
        """Return the answer of this version: the kept one, or a new one that ``make`` returns.

        Args:
            rest: an answer of an older version is still returned until this multiple of its making time has passed.
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
    """Answers questions about the runs of a store, in any number of threads.

    Attributes:
        runs: newest first, as :meth:`refresh` read them last.
    """

    def __init__(self, store: PosteriorStore, *, live: bool) -> None:
        self._store = store
        self._live = live
        self._cache = Cache()
        self.runs: list[Listed] = []

    def refresh(self) -> None:
        """Read the list of runs, unless that was done a moment ago; raise StoreError if it cannot be read."""
        self.runs = self._cache.get("runs", time.monotonic() // EVERY_S, lambda: listed(self._store, self._cache.get))

    def ask(self, path: str, prompt: str | None = None) -> bytes:
        """Return an answer as JSON: the kept one if its run has not changed. Raises as :meth:`answer`."""
        self.refresh()

        def make() -> bytes:
            return page.encoded(self.answer(path, prompt))

        if path == "state":
            return make()  # it tells the age of each run, so it is never the same twice
        _, *ids = path.split("/")
        compared = ids[2:3] if ids[1:2] == ["compare"] else []
        version = tuple(self._run(name).version for name in (*ids[:1], *compared))
        return bytes(self._cache.get((path, prompt), version, make))

    def answer(self, path: str, prompt: str | None = None) -> dict[str, Any]:
        """Return the answer to a path, such as ``runs/3/series``.

        Args:
            prompt: id of the prompt, for its rollouts in a step.

        Raises:
            NoSuchAnswer: nothing has this path.
            StoreError: the store cannot be read.
        """
        match path.split("/"):
            case ["state"]:
                return {
                    "store": shown(self._store.location, width=None),
                    "live": self._live,
                    "now": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
                    "runs": [listed_run.numbers for listed_run in self.runs],
                }
            case ["runs", run, "series"]:
                return series(self._store, self._run(run).record)
            case ["runs", run, "posteriors"]:
                of_run = self.visits(self._run(run))
                return {
                    "last": of_run.last,
                    "unit": of_run.unit,
                    "thresholds": visits.THRESHOLDS,
                    "state_counts": np.bincount(of_run.state, minlength=len(visits.STATES)),
                    "epochs": of_run.epochs,
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
