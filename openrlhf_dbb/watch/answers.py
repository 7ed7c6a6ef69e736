"""Answer what the page asks for; a server and a file give the same answers. An answer is a dict, ready for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import numpy as np

from openrlhf_dbb.inspect.compare_runs import ONE_PAIR, held_out_difference
from openrlhf_dbb.terminal import readable, shown
from openrlhf_dbb.watch import details
from openrlhf_dbb.watch.about import about
from openrlhf_dbb.watch.cache import Cache
from openrlhf_dbb.watch.numbers import encoded, number, rounded
from openrlhf_dbb.watch.runs import Listed, Runs
from openrlhf_dbb.watch.series import MOST_POINTS, series
from openrlhf_dbb.watch.visits import (
    BINS,
    FORGOTTEN_BY,
    IMPOSSIBLE_TO,
    MASTERED_FROM,
    STATES,
    Visits,
    read_visits,
)
from storage import PosteriorStore, StoreError
from storage.inspection import prompt_texts
from storage.retry import impatient

POINTS = 1000

EVERY_S = 0.5
"""The list of runs is read at most this often, however many clients ask."""

# A history of millions of visits takes seconds to read: a server is to spend a fifth of its time on it at most.
_REST = 4.0

_ALL_TEXTS = 12_000_000  # characters of the prompts of a run together
_SHORTEST_TEXT, _LONGEST_TEXT = 80, 4_000
_MOVER_TEXT = 1_000
_LARGEST = 2**63 - 1

Query = Mapping[str, str]


class NoSuchAnswer(Exception):
    """There is nothing of this name; the text says so in one line."""


class BadRequest(Exception):
    """A parameter is wrong; the text names it, its value and what is allowed, in one line."""


class Answers:
    """Answers about the runs of a store, for any number of threads.

    Attributes:
        listed: the runs, newest first, as :meth:`refresh` read them last.
    """

    def __init__(self, store: PosteriorStore, *, live: bool) -> None:
        self._store = store
        self._live = live
        self._cache = Cache()
        self._runs = Runs(store)
        self.listed: list[Listed] = []
        self._error: str | None = None
        self._of_run: dict[str, Callable[[Listed, Query], dict[str, Any]]] = {
            "series": self._series,
            "posteriors": self._posteriors,
            "prompts": self._prompts,
            "about": self._about,
        }
        self._of_part = {"prompts": self._prompt, "rollouts": self._rollouts, "compare": self._compare}

    def refresh(self) -> None:
        """Read the list of runs, unless that was done a moment ago.

        Raises:
            StoreError: the store cannot be read.
        """

        def read() -> list[Listed]:
            with impatient():
                return self._runs.read()

        self.listed = self._cache.get("runs", time.monotonic() // EVERY_S, read)

    def ask(self, path: str, query: Query) -> bytes:
        """Return an answer as JSON: a kept one, if its run has not changed; raise as :meth:`answer`.

        While the store is out of reach, the list of runs says so, and kept answers are still given.
        """
        try:
            self.refresh()
            self._error = None
        except StoreError as problem:
            if self._error is None:
                since = datetime.now().astimezone().strftime("%H:%M:%S")
                self._error = f"the store cannot be reached since {since} ({problem}), trying again"

        def make() -> bytes:
            with impatient():
                return encoded(self.answer(path, query))

        parts = path.split("/")
        if len(parts) < 3:
            return make()
        compared = [self._run(parts[3]).version] if parts[2:3] == ["compare"] and len(parts) == 4 else []
        version = (self._run(parts[1]).version, *compared)
        return bytes(self._cache.get((path, tuple(sorted(query.items()))), version, make))

    def answer(self, path: str, query: Query) -> dict[str, Any]:
        """Return the answer to a path, such as ``runs/3/series``.

        Raises:
            NoSuchAnswer: nothing has this path.
            BadRequest: a parameter is wrong.
            StoreError: the store cannot be read.
        """
        parts = path.split("/")
        if parts == ["state"]:
            return self._state()
        if len(parts) == 3 and parts[0] == "runs" and parts[2] in self._of_run:
            return self._of_run[parts[2]](self._run(parts[1]), query)
        if len(parts) == 4 and parts[0] == "runs" and parts[2] in self._of_part:
            return self._of_part[parts[2]](self._run(parts[1]), parts[3], query)
        raise NoSuchAnswer(f"there is no answer {path[:80]!r}; there are: state, runs/3/series and the like")

    def _run(self, name: str) -> Listed:
        for run in self.listed:
            if str(run.record.run_id) == name:
                return run
        raise NoSuchAnswer(f"there is no run {name[:80]!r} in {self._store.location}; state lists them")

    def _state(self) -> dict[str, Any]:
        return {
            "store": shown(self._store.location, width=None),
            "error": self._error,
            "live": self._live,
            "now": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "runs": [run.numbers for run in self.listed],
        }

    def _series(self, run: Listed, query: Query) -> dict[str, Any]:
        points = _integer(query, "points", 2, MOST_POINTS)
        after = _integer(query, "after", 0)
        curves = series(
            self._store,
            run.record,
            points=points or POINTS,
            after=after if query.get("tag", run.past) == run.past else None,
            width=_integer(query, "width", 1),
        )
        return curves | {"tag": run.past}

    def visits(self, run: Listed) -> Visits:
        """Return what became of the prompts of a run; of a large run, as of a few steps ago."""
        key = ("visits", run.record.uuid, run.past)
        visits: Visits = self._cache.get(key, run.version, lambda: read_visits(self._store, run.record), rest=_REST)
        return visits

    def _posteriors(self, run: Listed, query: Query) -> dict[str, Any]:
        visits = self.visits(run)
        improved, regressed = (self._movers(visits, rows) for rows in visits.movers())
        return {
            "last": visits.last,
            "unit": visits.unit,
            "states": STATES,
            "thresholds": {"mastered": MASTERED_FROM, "forgotten": FORGOTTEN_BY, "impossible": IMPOSSIBLE_TO},
            "state_counts": np.bincount(visits.state, minlength=len(STATES)).tolist(),
            "all_prompts": len(visits.prompt_id),
            "bins": BINS,
            "epochs": visits.epochs,
            "improved": improved,
            "regressed": regressed,
        }

    def _movers(self, visits: Visits, rows: Any) -> list[dict[str, Any]]:
        ids = visits.prompt_id[rows]
        texts = {
            prompt_id: readable(text) for prompt_id, text, _, _ in prompt_texts(self._store, ids, length=_MOVER_TEXT)
        }
        columns = zip(ids.tolist(), visits.first[rows].tolist(), visits.mean[rows].tolist(), strict=True)
        return [
            {"id": prompt_id, "first": number(first), "last": number(last), "text": texts[prompt_id]}
            for prompt_id, first, last in columns
        ]

    def _prompts(self, run: Listed, query: Query) -> dict[str, Any]:
        visits = self.visits(run)
        length = int(np.clip(_ALL_TEXTS // max(len(visits.prompt_id), 1), _SHORTEST_TEXT, _LONGEST_TEXT))
        texts = list(prompt_texts(self._store, visits.prompt_id, length=length))
        return {
            "last": visits.last,
            "columns": {
                "id": visits.prompt_id.tolist(),
                "state": visits.state.tolist(),
                "mean": rounded(visits.mean),
                "change": rounded(visits.mean - visits.first),
                "visits": visits.visits.tolist(),
                "text": [readable(text) for _, text, _, _ in texts],
                "label": [readable(label) for _, _, label, _ in texts],
            },
        }

    def _prompt(self, run: Listed, name: str, query: Query) -> dict[str, Any]:
        prompt_id = int(name) if name.isascii() and name.isdigit() and len(name) < 20 else _LARGEST + 1
        described = details.prompt(self._store, run.record, prompt_id) if prompt_id <= _LARGEST else None
        if described is None:
            raise NoSuchAnswer(f"run {run.record.name!r} has no prompt {name[:80]!r}")
        return described

    def _rollouts(self, run: Listed, name: str, query: Query) -> dict[str, Any]:
        step = None if name == "latest" else _integer({"step": name}, "step", 0)
        return details.rollouts(self._store, run.record, step, _integer(query, "prompt", 0))

    def _compare(self, run: Listed, name: str, query: Query) -> dict[str, Any]:
        difference = held_out_difference(self._store, run.record, self._run(name).record)
        if difference is None:
            return {"difference": None}
        numbers = {
            key: number(value) if isinstance(value, float) else value for key, value in asdict(difference).items()
        }
        return {"difference": numbers, "verdict": difference.verdict, "caution": ONE_PAIR}

    def _about(self, run: Listed, query: Query) -> dict[str, Any]:
        return about(self._store, run.record, [listed.record for listed in reversed(self.listed)])


def _integer(query: Query, name: str, least: int, most: int = _LARGEST) -> int | None:
    """Return a parameter, None if it is not given.

    Raises:
        BadRequest: it is no integer in [least, most].
    """
    value = query.get(name)
    if value is None:
        return None
    integer = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
    if not least <= integer <= most:
        raise BadRequest(f"{name} is {value[:80]!r}; it must be an integer of at least {least}")
    return integer
