"""The curves of a run over its steps: each step is read from the database once, appended, and thinned on request.

Axes: T steps, K points of a curve, M curves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from openrlhf_dbb.inspect.costs import (
    mixed_groups,
    of_single_rollouts,
    rollouts_per_mixed_group,
    tokens_per_mixed_group,
)
from openrlhf_dbb.terminal import shown
from openrlhf_dbb.watch.numbers import number, rounded, whole
from storage import PosteriorStore
from storage.engine import chunks
from storage.usage import TOTALS

Floats = NDArray[np.float64]

LATE_STEPS = 16
"""The metrics of a step may be written a moment after it; so many of the last steps are read again for them."""

PAUSES = ("claim", "take_over", "roll_back")
"""Events between two sessions of a training; the time across one of them is no training."""

MOST_POINTS = 5_000

_METRIC = "m:"
_LONGEST_SHARED = 400  # characters; the run-wide vectors of one element are all that is drawn
_PART = 1_000  # steps whose metrics are parsed at a time, so that other threads have their turn

_COUNTS = ("prompts", "rollouts", "successes", *TOTALS)
_READ = f"""
    SELECT step, created_at, metrics, CASE WHEN length(shared) <= {_LONGEST_SHARED} THEN shared END,
           {", ".join(_COUNTS)}
    FROM dbb_step WHERE run_id = :run AND step > :after ORDER BY step"""
_CUMULATIVE = {"rollouts_until": "generated", "tokens_until": "generated_tokens", "seconds_until": "seconds"}


class Steps(NamedTuple):
    """The steps of a run, (T,) each: step, ascending, and prompts, the rows of the history in it."""

    step: Floats
    prompts: Floats


class Columns:
    """Columns of float64 that grow together; a value that is missing is NaN."""

    def __init__(self) -> None:
        self.size = 0
        self._room = 0
        self._columns: dict[str, Floats] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Floats:
        """(T,) a view; what grows later is not in it."""
        return self._columns[name][: self.size]

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def append(self, values: Mapping[str, Floats], size: int) -> None:
        """Append ``size`` rows; the columns that are not given get NaN."""
        if self.size + size > self._room:
            self._room = max(2 * self._room, self.size + size, 64)
            self._columns = {name: self._widened(column) for name, column in self._columns.items()}
        for name in values:
            if name not in self._columns:
                self._columns[name] = np.full(self._room, np.nan)
        for name, column in self._columns.items():
            column[self.size : self.size + size] = values.get(name, np.nan)
        self.size += size

    def cut(self, size: int) -> None:
        """Keep the first ``size`` rows."""
        self.size = size

    def _widened(self, column: Floats) -> Floats:
        wide = np.full(self._room, np.nan)
        wide[: self.size] = column[: self.size]
        return wide


class Series:
    """The steps of a run as columns.

    Not for several threads at once.

    Attributes:
        restarts: how often what had been read turned out to be no longer true, or a new metric appeared: an answer
            made before cannot be continued.
    """

    def __init__(self, run_id: int) -> None:
        self._run_id = run_id
        self.restarts = 0
        self._start_over()

    def _start_over(self) -> None:
        self.columns = Columns()
        self._digest: bytes | None = None  # of the last step
        self._pauses: list[tuple[str, int]] = []  # moment and id of the events across which no time is counted

    def steps(self) -> Steps:
        """A copy of what a reader of the history needs to know."""
        if not self.columns.size:
            return Steps(np.empty(0), np.empty(0))
        return Steps(self.columns["step"].copy(), self.columns["prompts"].copy())

    @property
    def last(self) -> int:
        """The last step, 0 before the first."""
        return int(self.columns["step"][-1]) if self.columns.size else 0

    def refresh(self, store: PosteriorStore) -> None:
        """Read the steps that are new, and late metrics; all of them if the run was rolled back.

        Raises:
            StoreError: the store cannot be read; nothing has changed then.
        """
        with store.database.transaction() as connection:
            pauses = self._read_pauses(connection)
            if not self._continues(connection, pauses):
                self._start_over()
                self.restarts += 1
            self._pauses = pauses
            kept = self._settled()
            after = int(self.columns["step"][kept - 1]) if kept else 0
            parts, key = [], {"run": self._run_id, "after": after}
            for rows in chunks(connection, _READ, key):
                parts += [_parsed(rows[start : start + _PART]) for start in range(0, len(rows), _PART)]
            last = parts[-1]["step"][-1] if parts else after
            digest = connection.scalar(
                text("SELECT digest FROM dbb_step WHERE run_id = :run AND step = :step"),
                {"run": self._run_id, "step": int(last)},
            )
        self._digest = None if digest is None else bytes(digest)
        known = set(self.columns.names)
        self.columns.cut(kept)
        for part in parts:
            self._append(part)
        if known and set(self.columns.names) != known:
            self.restarts += 1

    def _read_pauses(self, connection: Connection) -> list[tuple[str, int]]:
        kinds = ", ".join(f"'{kind}'" for kind in PAUSES)
        query = (
            f"SELECT created_at, event_id FROM dbb_event WHERE run_id = :run AND kind IN ({kinds}) ORDER BY event_id"
        )
        return [(row[0], row[1]) for row in connection.execute(text(query), {"run": self._run_id})]

    def _continues(self, connection: Connection, pauses: list[tuple[str, int]]) -> bool:
        """Whether what was read is still there, unchanged."""
        if not self.columns.size:
            return True
        if pauses[: len(self._pauses)] != self._pauses:
            return False
        query = text("SELECT digest FROM dbb_step WHERE run_id = :run AND step = :step")
        digest = connection.scalar(query, {"run": self._run_id, "step": self.last})
        return digest is not None and bytes(digest) == self._digest

    def _settled(self) -> int:
        """How many steps need not be read again: all, or until the first of the last ones without metrics."""
        size = self.columns.size
        first = max(size - LATE_STEPS, 0)
        if not size:
            return 0
        without = np.flatnonzero(self.columns["measured"][first:] == 0)
        return first + int(without[0]) if len(without) else size

    def _append(self, part: dict[str, Floats]) -> None:
        part["seconds"] = self._seconds(part["moment"])
        for name, of_step in _CUMULATIVE.items():
            before = self.columns[name][-1] if self.columns.size else 0.0
            part[name] = before + np.cumsum(part[of_step])
        self.columns.append(part, len(part["step"]))

    def _seconds(self, moment_T: Floats) -> Floats:
        """Training time of each step: since the end of the one before, 0 if the training paused in between."""
        before = self.columns["moment"][-1] if self.columns.size else moment_T[0]
        all_T = np.append(before, moment_T)
        pauses = np.sort(moments([moment for moment, _ in self._pauses]))
        passed = np.searchsorted(pauses, all_T, side="right")
        return np.where(np.diff(passed) > 0, 0.0, np.maximum(np.diff(all_T), 0))

    def settled_until(self) -> int:
        """The last step up to which no value will change any more."""
        settled = self._settled()
        return int(self.columns["step"][settled - 1]) if settled else 0

    def rollouts_until(self, step: int) -> int | None:
        """Rollouts generated until the end of a step; None if they were not counted."""
        at = int(np.searchsorted(self.columns["step"], step, side="right")) if self.columns.size else 0
        return 0 if not at else whole(self.columns["rollouts_until"][at - 1 : at])[0]

    def totals(self, noted: Mapping[str, int]) -> dict[str, Any] | None:
        """Sums over the steps whose usage was counted; None if there are none.

        Args:
            noted: unused_rollouts, unused_tokens: left over at the end, as the run noted them.
        """
        counted = ~np.isnan(self.columns["generated"]) if self.columns.size else np.zeros(0, dtype=bool)
        if not counted.any():
            return None
        sums = {name: int(self.columns[name][counted].sum()) for name in TOTALS}
        return {
            "steps": int(counted.sum()),
            "rollouts_generated": sums["generated"],
            "tokens": sums["generated_tokens"],
            "filtered": sums["generated"] - sums["trained"],
            **sums,
            "mixed_groups": number(mixed_groups(sums)),
            "rollouts_per_mixed_group": number(rollouts_per_mixed_group(sums)),
            "tokens_per_mixed_group": number(tokens_per_mixed_group(sums)),
            "single": of_single_rollouts(sums),
            **noted,
        }

    def curves(
        self,
        *,
        points: int = 500,
        after: int | None = None,
        width: int | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> dict[str, Any]:
        """The curves from step ``first`` to ``last``, in at most ``points`` points.

        Point k covers the steps ``k * width + 1`` to ``(k + 1) * width``, so that no point moves when steps are added.

        Args:
            after: leave out the points whose last step is not after this one; only if ``width`` still holds, and
                ``first`` and ``last`` are None.

        Returns:
            "width", "full", "first", "last", "settled", "curves": as the page expects them.
        """
        steps = self.columns["step"] if self.columns.size else np.empty(0)
        start = 0 if first is None else int(np.searchsorted(steps, first, side="left"))
        stop = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
        chosen = _width(steps[start:stop], points)
        full = after is None or width != chosen or first is not None or last is not None or after > self.last
        if after is not None and not full:
            new = int(np.searchsorted(steps, after, side="right"))
            if new < len(steps):  # from the beginning of its point
                new = int(np.searchsorted(steps, (steps[new] - 1) // chosen * chosen + 1, side="left"))
            start = new
        return {
            "width": chosen,
            "full": full,
            "first": int(steps[0]) if len(steps) else 0,
            "last": self.last,
            "settled": self._settled_point(chosen),
            "curves": self._thinned(start, max(stop, start), chosen),
        }

    def _settled_point(self, width: int) -> int:
        """The last step of the last point that will not change any more, 0 if there is none."""
        return self.settled_until() // width * width

    def _thinned(self, start: int, stop: int, width: int) -> dict[str, list[Any]]:
        names = [name for name in self.columns.names if name.startswith(_METRIC)]
        if stop == start:
            return {name: [] for name in (*_AXES, *_DRAWN, *names)}
        part = {name: self.columns[name][start:stop] for name in self.columns.names}
        point_T = (part["step"] - 1) // width
        starts = np.append(0, np.flatnonzero(np.diff(point_T)) + 1)
        ends = np.append(starts[1:], stop - start) - 1

        def sums(values: Floats) -> Floats:
            return np.asarray(np.add.reduceat(values, starts, axis=-1))

        found = {
            "step": whole(part["step"][ends]),
            "rollouts": whole(part["rollouts_until"][ends]),
            "tokens": whole(part["tokens_until"][ends]),
            "hours": rounded(part["seconds_until"][ends] / 3600),
        }
        counted = ~np.isnan(part["generated"])
        usage = {name: sums(np.where(counted, part[name], 0)) for name in TOTALS} | {"counted": sums(counted * 1.0)}
        drawn = _drawn(usage) | {"reward": (sums(part["successes"]), sums(part["rollouts"]))}
        with np.errstate(divide="ignore", invalid="ignore"):  # a point without any is a gap in the curve
            curves = [np.divide(*drawn[name]) for name in _DRAWN]
            if names:
                values_M_T = np.stack([part[name] for name in names])
                known = ~np.isnan(values_M_T)
                curves += list(sums(np.where(known, values_M_T, 0.0)) / sums(known * 1.0))
        return found | dict(zip((*_DRAWN, *names), rounded(np.stack(curves)), strict=True))


_AXES = ("step", "rollouts", "tokens", "hours")
_DRAWN = (
    "reward", "zero_variance", "rescued", "length", "mixed", "rescued_n", "no_advantage", "filtered", "replayed",
    "skipped",
)  # fmt: skip


def _drawn(usage: Mapping[str, Floats]) -> dict[str, tuple[Floats, Floats]]:
    """What is divided by what, of each curve of the rollout usage; each (K,)."""
    generated, steps = usage["generated"], usage["counted"]
    several = np.where(generated < 2 * usage["groups"], np.nan, generated)  # not defined at N = 1
    return {
        "zero_variance": (usage["zero_variance"], several),
        "rescued": (usage["rescued"], several),
        "length": (usage["generated_tokens"], generated),
        # Every generated rollout is in one of these four.
        "mixed": (usage["informative"] - usage["rescued"], steps),
        "rescued_n": (usage["rescued"], steps),
        "no_advantage": (usage["trained"] - usage["informative"], steps),
        "filtered": (generated - usage["trained"], steps),
        "replayed": (usage["replayed"], steps),
        "skipped": (usage["skipped"], steps),
    }


def _width(steps: Floats, points: int) -> int:
    """The smallest power of two such that at most ``points`` points cover the steps."""
    width = 1
    while len(steps) and (steps[-1] - 1) // width - (steps[0] - 1) // width + 1 > points:
        width *= 2
    return width


def thinned_sums(step: NDArray[Any], width: int, *values: Floats) -> tuple[NDArray[Any], list[Floats]]:
    """Sums of values over the points of ``width`` steps: the last step of each point that has any, and the sums.

    Args:
        step: ascending; values: each of the same shape.
    """
    starts = np.append(0, np.flatnonzero(np.diff((step - 1) // width)) + 1) if len(step) else np.empty(0, dtype=int)
    ends = np.append(starts[1:], len(step)) - 1 if len(step) else starts
    return step[ends], [np.add.reduceat(each, starts) if len(step) else each for each in values]


def _parsed(rows: Any) -> dict[str, Floats]:
    """Columns of some rows of ``_READ``, by name."""
    step, created_at, metrics, shared, *counts = zip(*rows, strict=True)
    found = {name: np.array(values, dtype=np.float64) for name, values in zip(_COUNTS, counts, strict=True)}
    found["step"] = np.array(step, dtype=np.float64)
    found["moment"] = moments(created_at)
    found["measured"] = np.array([each is not None for each in metrics], dtype=np.float64)
    logged = [{} if each is None else each for each in json.loads(f"[{','.join(each or 'null' for each in metrics)}]")]
    found |= {_METRIC + shown(name, width=None): values for name, values in _table(logged).items()}
    if any(shared):
        vectors = [json.loads(each) if each else {} for each in shared]
        for name in dict.fromkeys(name for each in vectors for name, values in each.items() if len(values) == 1):
            values = [each[name][0] if len(each.get(name, ())) == 1 else None for each in vectors]
            found[f"{_METRIC}shared/{shown(name, width=None)}"] = np.array(values, dtype=np.float64)
    return found


def _table(rows: list[dict[str, float | None]]) -> dict[str, Floats]:
    """The values by name, NaN where a row has none."""
    names = tuple(rows[0])
    if all(tuple(each) == names for each in rows):  # as a trainer writes them; five times as fast
        values = np.array([list(each.values()) for each in rows], dtype=np.float64)
        return dict(zip(names, values.T, strict=True))
    names = tuple(dict.fromkeys(name for each in rows for name in each))
    return {name: np.array([each.get(name) for each in rows], dtype=np.float64) for name in names}


def moments(texts: Iterable[str]) -> Floats:
    """Moments (UTC, ISO 8601) as seconds."""
    return np.array([each.rstrip("Z") for each in texts], dtype="datetime64[ms]").astype(np.int64) / 1000
