"""What the page asks for, answered from a store: the same for a page that a server feeds and for one in a file.

An answer is a dict, ready for JSON.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from openrlhf_dbb.terminal import readable, shown
from openrlhf_dbb.watch import accuracy, details
from openrlhf_dbb.watch.about import about
from openrlhf_dbb.watch.numbers import number, rounded
from openrlhf_dbb.watch.runs import Followed, Runs, now_text
from openrlhf_dbb.watch.series import MOST_POINTS, Steps
from openrlhf_dbb.watch.visits import (
    BINS,
    FORGOTTEN_BY,
    IMPOSSIBLE_TO,
    MASTERED_FROM,
    STATES,
)
from storage import PosteriorStore, StoreError
from storage.inspection import prompt_texts

POINTS = 500

_AT_ONCE_S = 0.25
"""How long an answer waits for what has not been read of the history; the rest is read behind it."""

_ALL_TEXTS = 12_000_000  # characters of the prompts of a run together
_SHORTEST_TEXT, _LONGEST_TEXT = 80, 4_000
_MOVER_TEXT = 300
_SHORTEST_PREFIX = 16
_LARGEST = 2**63 - 1

Query = Mapping[str, str]


class NoSuchAnswer(Exception):
    """There is nothing of this name; the text says what and what there is instead, in one line."""


class BadRequest(Exception):
    """A parameter is wrong; the text names it, its value and what is allowed, in one line."""


class Answers:
    """Answers about the runs of a store.

    Any number of threads may ask; one polls.

    Attributes:
        runs: what is known of them; to be polled by the owner of this.
        error: why the store cannot be read, in one line; None while it can.
        live: whether the answers are of a server.
    """

    def __init__(self, store: PosteriorStore, *, live: bool) -> None:
        self._store = store
        self.runs = Runs(store)
        self.error: str | None = None
        self.live = live
        self._of_run: dict[str, Callable[[Followed, Query], dict[str, Any]]] = {
            "series": self._series,
            "posteriors": self._posteriors,
            "prompts": self._prompts,
            "about": self._about,
        }

    def answer(self, path: str, query: Query) -> dict[str, Any]:
        """The answer to a path, such as ``runs/3/series``.

        Raises:
            NoSuchAnswer, BadRequest: see there.
            StoreError: the store cannot be read, and the answer is not in memory.
        """
        parts = path.split("/")
        if parts == ["state"]:
            return self._state()
        if len(parts) == 3 and parts[0] == "runs" and parts[2] in self._of_run:
            return self._of_run[parts[2]](self._run(parts[1]), query)
        if len(parts) == 4 and parts[0] == "runs" and parts[2] in ("prompts", "rollouts"):
            return (self._prompt if parts[2] == "prompts" else self._rollouts)(self._run(parts[1]), parts[3], query)
        raise NoSuchAnswer(f"there is no answer {path[:80]!r}; there are: state, runs/3/series and the like")

    def version(self, path: str) -> str:
        """Text that changes when the answer to a path may have changed."""
        found = re.match(r"runs/(\d{1,18})/", path)
        run = self.runs.find(int(found[1])) if found else None
        return "" if run is None else f"{self.runs.version(run)}-{run.visits.restarts}-{run.visits.until}"

    def _run(self, number: str) -> Followed:
        run = self.runs.find(int(number)) if number.isascii() and number.isdigit() else None
        if run is None:
            self._reachable()
            raise NoSuchAnswer(f"there is no run {number[:80]!r} in {self._store.location}; state lists them")
        return run

    def _reachable(self) -> None:
        if self.error is not None:
            raise StoreError(self.error)

    def _state(self) -> dict[str, Any]:
        return {
            "store": shown(self._store.location, width=None),
            "error": self.error,
            "live": self.live,
            "now": now_text(),
            "runs": self.runs.listed(),
        }

    @property
    def location(self) -> str:
        """Of the store, for people."""
        return self._store.location

    # ---- over the steps

    def refresh_series(self, run: Followed) -> None:
        """Read the new steps of a run, unless that is done or the store is out of reach; its lock is held.

        Raises:
            StoreError: the store cannot be read, and nothing has been read before.
        """
        changes = run.changes
        if run.series_at == changes:
            return
        try:
            self._reachable()
            run.series.refresh(self._store)
            run.series_at = changes
        except StoreError:
            if run.series_at < 0:
                raise

    def _series(self, run: Followed, query: Query) -> dict[str, Any]:
        points = _integer(query, "points", 2, MOST_POINTS)
        ranges = {name: _integer(query, name, 0) for name in ("after", "from", "to")}
        width = _integer(query, "width", 1)
        evaluations = self.runs.accuracies.by_run.get(run.record.run_id, [])
        with run.series_lock:
            self.refresh_series(run)
            tag = f"{self.runs.boot}-{run.series.restarts}"
            found = run.series.curves(
                points=points or POINTS,
                after=ranges["after"] if query.get("tag", tag) == tag else None,
                width=width,
                first=ranges["from"],
                last=ranges["to"],
            )
            totals = run.series.totals(run.unused)
            held_out = accuracy.curve(evaluations, run.series.rollouts_until)
        with run.probes_lock:
            probes = run.probes.curves(found["width"])
        return found | {"tag": tag, "held_out": held_out, "probes": probes, "totals": totals}

    # ---- over the prompts

    def behind(self, run: Followed) -> bool:
        """Whether some of the history of a run has not been read."""
        steps = self._steps(run)
        with run.visits_lock:
            return run.visits_at != run.changes or run.visits.behind(steps)

    def read_history(self, run: Followed, seconds: float) -> bool:
        """Read on in the history of a run, for about so many seconds; whether all of it is read.

        Raises:
            StoreError: the store cannot be read.
        """
        until = time.monotonic() + seconds
        changes, steps = run.changes, self._steps(run)
        while True:
            with run.visits_lock:
                if run.visits_at == changes and not run.visits.behind(steps):
                    return True
                run.visits.read_part(self._store, steps)
                run.visits_at = changes
            if time.monotonic() > until:
                return not self.behind(run)

    def read_probes(self, run: Followed, seconds: float) -> bool:
        """Read on in the probes of a run, for about so many seconds; whether all of them are read."""
        until = time.monotonic() + seconds
        with run.series_lock:
            self.refresh_series(run)
            last, restarts = run.series.last, run.series.restarts
        while True:
            with run.probes_lock:
                if not run.probes.behind(last, restarts):
                    return True
                run.probes.read_part(self._store, last)
            if time.monotonic() > until:
                return False

    def _steps(self, run: Followed) -> Steps:
        with run.series_lock:
            self.refresh_series(run)
            return run.series.steps()

    def _read_at_once(self, run: Followed) -> Steps:
        try:
            self._reachable()
            self.read_history(run, _AT_ONCE_S)
        except StoreError:
            if not run.visits.opened:
                raise
        return self._steps(run)

    def _posteriors(self, run: Followed, query: Query) -> dict[str, Any]:
        steps = self._read_at_once(run)
        with run.visits_lock:
            visits = run.visits
            rows = visits.movers()
            movers = [
                list(zip(*(each[row].tolist() for each in (visits.prompt_id, visits.first, visits.mean)), strict=True))
                for row in rows
            ]
            found = {
                "read": visits.share(steps),
                "beta": {"alpha", "beta"} <= set(run.record.state_fields),
                "unit": visits.unit,
                "states": STATES,
                "thresholds": {"mastered": MASTERED_FROM, "forgotten": FORGOTTEN_BY, "impossible": IMPOSSIBLE_TO},
                "state_counts": visits.state_counts(),
                "all_prompts": len(visits.prompt_id),
                "bins": BINS,
                "epochs": visits.epochs(),
            }
        improved, regressed = (self._movers(each) for each in movers)
        return found | {"improved": improved, "regressed": regressed}

    def _movers(self, movers: list[tuple[int, float, float]]) -> list[dict[str, Any]]:
        ids = np.array([each for each, _, _ in movers], dtype=np.int64)
        texts = {each: readable(text) for each, text, _, _ in prompt_texts(self._store, ids, length=_MOVER_TEXT)}
        return [
            {"id": each, "first": number(first), "last": number(last), "text": texts[each]}
            for each, first, last in movers
        ]

    def _prompts(self, run: Followed, query: Query) -> dict[str, Any]:
        after = _integer(query, "after", 0)
        steps = self._read_at_once(run)
        with run.visits_lock:
            visits = run.visits
            tag = f"{self.runs.boot}-{visits.restarts}"
            full = after is None or query.get("tag", tag) != tag or after > visits.until
            rows = np.flatnonzero(visits.last_step > (-1 if full or after is None else after))
            ids = visits.prompt_id[rows]
            columns = {
                "id": ids.tolist(),
                "state": visits.state[rows].tolist(),
                "mean": rounded(visits.current[rows]),
                "change": rounded((visits.mean - visits.first)[rows]),
                "visits": visits.visits[rows].tolist(),
            }
            found = {"last": visits.until, "all": len(visits.prompt_id), "read": visits.share(steps)}
        length = int(np.clip(_ALL_TEXTS // max(found["all"], 1), _SHORTEST_TEXT, _LONGEST_TEXT))
        texts, labels, cut = [], [], []
        for _, text, label, size in prompt_texts(self._store, ids, length=length):
            texts.append(readable(text))
            labels.append(readable(label))
            cut.append(size if size > length else 0)
        columns |= {"text": texts, "cut": cut, "label": labels}
        if full:
            run.prefix = common_prefix(texts)
        return found | {"full": full, "tag": tag, "common_prefix": run.prefix, "columns": columns}

    def _prompt(self, run: Followed, number: str, query: Query) -> dict[str, Any]:
        self._reachable()
        found = None
        if number.isascii() and number.isdigit() and int(number) <= _LARGEST:
            found = details.prompt(self._store, run.record, int(number))
        if found is None:
            raise NoSuchAnswer(f"run {run.record.name!r} has no prompt {number[:80]!r}")
        return found

    # ---- the rest

    def _rollouts(self, run: Followed, number: str, query: Query) -> dict[str, Any]:
        self._reachable()
        step = None if number == "latest" else _integer({"step": number}, "step", 0)
        return details.rollouts(self._store, run.record, step, _integer(query, "prompt", 0))

    def _about(self, run: Followed, query: Query) -> dict[str, Any]:
        self._reachable()
        return about(self._store, run.record, [each.record for each in reversed(self.runs.in_order)])


def common_prefix(texts: list[str]) -> str:
    """What at least half of the texts begin with, up to the end of a word; "" if that is short."""
    if not texts:
        return ""
    ordered = sorted(texts)  # texts that begin differently end up at either end
    pairs = zip(ordered[len(texts) // 4], ordered[3 * len(texts) // 4], strict=False)
    alike = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = re.sub(r"\w+\Z", "", alike)
    return shared if len(texts) > 1 and len(shared) >= _SHORTEST_PREFIX else ""


def _integer(query: Query, name: str, least: int, most: int = _LARGEST) -> int | None:
    """A parameter, None if it is not given.

    Raises:
        BadRequest: it is no integer in [least, most].
    """
    given = query.get(name)
    if given is None:
        return None
    value = int(given) if given.isascii() and given.isdigit() and len(given) < 20 else -1
    if not least <= value <= most:
        raise BadRequest(f"{name} is {given[:80]!r}; it must be an integer of at least {least}")
    return value
