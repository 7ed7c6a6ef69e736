"""Trains the runs of a protocol in lanes side by side; finished runs are not trained again.

A lane is a process with a :class:`study.session.Session`. It gets one run at a time: a lane that fails
loses one run, and is restarted for the next.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import storage
from openrlhf_dbb.errors import RunError, UsageError
from study import protocol
from study.collect import TIMES
from study.protocol import PlannedRun, Protocol

ROOT = Path(__file__).parents[1]
"""The checkout: this package is not installed, and a lane runs in another folder."""

STORE, TASKS = "study.db", "tasks"


def store_url(folder: Path) -> str:
    """The study's one store."""
    return f"sqlite:///{folder.resolve() / STORE}"


def finished_runs(folder: Path) -> dict[str, storage.RunRecord]:
    """Finished runs in the study's store, by name."""
    with storage.open_store(store_url(folder), create=False) as store:
        return {record.name: record for record in store.runs() if record.status == "finished"}


def task_folder(folder: Path, start: str, seed: int) -> Path:
    """The folder of the task of a start and a seed."""
    return folder / TASKS / f"{start}-s{seed}"


def quiet_imports() -> None:
    """Say nothing, here and in lanes, when torch imports a package that OpenRLHF pins: users can change nothing."""
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    os.environ["PYTHONWARNINGS"] = "ignore:The pynvml package is deprecated:FutureWarning"


def default_lanes() -> int:
    """One per core; one with CUDA, where a run may take every GPU."""
    import torch

    return 1 if torch.cuda.is_available() else os.cpu_count() or 1


def refuse_early(chosen: Sequence[PlannedRun], of: Protocol, folder: Path) -> None:
    """Make all checks that a training makes before it starts, for the first run of each experiment.

    Raises:
        UsageError, storage.StoreError: what is missing, such as a model or a data set, and what to do.
    """
    from openrlhf_dbb.driver import arguments, preflight

    def stop(_: object) -> None:
        raise _AllChecked

    for run in {run.experiment: run for run in reversed(chosen)}.values():
        settings = arguments.parse(protocol.argv(run, of, store_url(folder), {}, resume=False))
        with contextlib.suppress(_AllChecked):
            preflight.prepare(settings, preflight.check(settings), before_the_run=stop)


class _AllChecked(Exception):
    """Nothing is wrong; the run is not to be made yet."""


def train(
    chosen: Sequence[PlannedRun],
    of: Protocol,
    folder: Path,
    *,
    lanes: int,
    separate: bool = False,
    until: float = math.inf,
) -> dict[str, str]:
    """Train the runs that are not finished.

    Args:
        folder: of the study; holds the store, the tasks, ``runs/``, the lanes' logs and ``times.jsonl``.
        lanes: runs trained side by side.
        separate: restart Ray and the engines for every run.
        until: ``time.monotonic()`` after which no run is started.

    Returns:
        What went wrong, by the names of the runs that failed.

    Raises:
        storage.StoreError: the store cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with storage.open_store(store_url(folder)) as store:
        status = {record.name: record.status for record in store.runs()}
    left = [run for run in chosen if status.get(run.name) != "finished"]
    print(f"{len(chosen)} runs, {len(chosen) - len(left)} of them finished", flush=True)
    tasks = prepare_tasks({(run.start, run.seed) for run in left}, folder, lanes) if of.task else {}
    waiting: SimpleQueue[tuple[PlannedRun, list[str]]] = SimpleQueue()
    for run in left:
        task = tasks.get((run.start, run.seed), {})
        waiting.put((run, protocol.argv(run, of, store_url(folder), task, resume=run.name in status)))
    failed: dict[str, str] = {}
    with _Progress(len(left)) as progress:
        threads = [
            threading.Thread(
                target=_lane, args=(number, waiting, folder, separate, until, failed, progress), daemon=True
            )
            for number in range(min(lanes, len(left)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not waiting.empty():
        print(f"out of time: {waiting.qsize()} runs are left; the same command continues", flush=True)
    return failed


def prepare_tasks(
    wanted: Collection[tuple[str, int]], folder: Path, lanes: int
) -> dict[tuple[str, int], dict[str, str]]:
    """The flags that a task asks for, with its model and data, by start and seed; missing tasks are made."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn")) as pool:
        made = pool.map(_prepare, [(folder, *key) for key in wanted])
        return dict(zip(wanted, made, strict=True))


def _prepare(asked: tuple[Path, str, int]) -> dict[str, str]:
    from study import tasks

    folder, start, seed = asked
    task = tasks.prepare(task_folder(folder, start, seed), seed, start)
    return tasks.kind(start).flags | {
        "actor.model_name_or_path": str(task.model.resolve()),
        "data.prompt_dataset": str(task.train.resolve()),
        "eval.dataset": str(task.evaluation.resolve()),
    }


def _lane(
    number: int,
    waiting: SimpleQueue[tuple[PlannedRun, list[str]]],
    folder: Path,
    separate: bool,
    until: float,
    failed: dict[str, str],
    progress: _Progress,
) -> None:
    """Give the waiting runs to a lane's process, one at a time, until none is left."""
    log = folder / f"lane-{number}.log"
    process: subprocess.Popen[str] | None = None
    while time.monotonic() < until:
        try:
            run, argv = waiting.get_nowait()
        except Empty:
            break
        if process is None:
            process = _start_lane(folder, log)
        began = time.monotonic()
        error = _ask(process, argv)
        seconds = time.monotonic() - began
        if error is None:
            with (folder / TIMES).open("a") as file:
                file.write(json.dumps({"run": run.name, "seconds": round(seconds, 1)}) + "\n")
        else:
            failed[run.name] = f"{error}; see {log}"
        if error is not None or separate:
            _end_lane(process)
            process = None
        progress.done(run.name, seconds, error)
    if process is not None:
        _end_lane(process)


def _start_lane(folder: Path, log: Path) -> subprocess.Popen[str]:
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "study", "lane"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )


def _ask(process: subprocess.Popen[str], argv: list[str]) -> str | None:
    """Have a lane train a command line; what went wrong, in one line, or None."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(argv) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        return f"the lane ended with exit status {process.wait()}"
    error: str | None = json.loads(answer)["error"]
    return error


def _end_lane(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        process.stdin.close()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()


def lane() -> None:
    """The process of a lane: reads command lines as JSON, trains each and answers in JSON, until its input ends.

    After an error that an actor may be left with, the next command line gets new actors.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to the log
    from openrlhf_dbb.platform import cpu

    if cpu.active():
        cpu.prepare_driver()
    from study.session import Session

    session = Session()
    for line in sys.stdin:
        error = None
        try:
            session.train(json.loads(line))
        except (UsageError, RunError, storage.StoreError) as refused:
            error = str(refused)
        except Exception as failed:
            traceback.print_exc()
            error = (str(failed).strip() or repr(failed)).splitlines()[-1]
            session.close()
        print(json.dumps({"error": error}), file=answers, flush=True)
    session.close()


class _Progress:
    """A bar on a terminal; one line per run where output goes to a file."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="run", desc="training", disable=None)
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def done(self, name: str, seconds: float, error: str | None) -> None:
        with self._lock:
            self._done += 1
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            text = f"{name}: {error or f'{seconds:.0f} s'}"
            if self._bar.disable:
                print(f"[{self._done}/{self._total}] {text}, {left / 60:.0f} min left", flush=True)
            else:
                self._bar.update()
                self._bar.set_postfix_str(text)
                if error:
                    self._bar.write(text)
