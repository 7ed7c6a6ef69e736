"""Trains the runs of a protocol in lanes side by side; finished runs are not trained again.

A lane is a process with a :class:`study.session.Session`. It gets one run at a time: a lane that fails loses one run,
and is restarted for the next.
"""

from __future__ import annotations

import contextlib
import json
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
from typing import Any

from openrlhf_dbb import storage
from openrlhf_dbb.errors import RunError, UsageError
from study import protocol, rows
from study.collect import TIMES
from study.protocol import PlannedRun, Protocol

ROOT = Path(__file__).parents[1]
"""The checkout: this package is not installed, and a lane runs in another folder."""
STORE, TASKS = "study.db", "tasks"
Waiting = SimpleQueue[tuple[PlannedRun, list[str]]]


def commit() -> str:
    """Return the commit of the checkout, with "-dirty" behind it if files differ; "" without git."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()


def store_url(folder: Path) -> str:
    """Return the URL of the study's one store."""
    return f"sqlite:///{folder.resolve() / STORE}"


def finished_runs(folder: Path) -> dict[str, storage.RunRecord]:
    """Return the finished runs in the study's store, by name."""
    with storage.open_store(store_url(folder), create=False) as store:
        return {record.name: record for record in store.runs() if record.status == "finished"}


def task_folder(folder: Path, start: str, seed: int) -> Path:
    """Return the folder of the task of a start and a seed."""
    return folder / TASKS / f"{start}-s{seed}"


def quiet_imports() -> None:
    """Silence a warning of torch, here and in lanes, about a package that OpenRLHF pins."""
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    os.environ["PYTHONWARNINGS"] = "ignore:The pynvml package is deprecated:FutureWarning"


def default_lanes() -> int:
    """Return one lane per core, or one with CUDA, where a run may take every GPU."""
    import torch

    return 1 if torch.cuda.is_available() else os.cpu_count() or 1


def train(
    chosen: Sequence[PlannedRun], plan: Protocol, folder: Path, *, lanes: int
) -> dict[str, str]:
    """Train the runs that are not finished, ``lanes`` side by side.

    A run is finished in the study's store, or by its rows in ``folder``, which another machine may have made.

    Returns:
        An error by the name of each run that failed.
    """
    from tqdm import tqdm

    folder.mkdir(parents=True, exist_ok=True)
    with storage.open_store(store_url(folder)) as store:
        status = {record.name: record.status for record in store.runs()}
    done = rows.finished(folder, forced=bool(plan.forced))
    done |= {name for name, of_run in status.items() if of_run == "finished"}
    left = [run for run in chosen if run.name not in done]
    print(f"{len(chosen)} runs, {len(chosen) - len(left)} of them finished", flush=True)
    if plan.forced:  # what was measured of an earlier, lost training of these runs
        rows.drop(folder / "forced.csv", [run.name for run in left])
    tasks = (
        prepare_tasks({(run.start, run.seed) for run in left}, folder, lanes) if plan.task else {}
    )
    waiting: Waiting = SimpleQueue()
    for run in left:
        task = tasks.get((run.start, run.seed), {})
        waiting.put(
            (run, protocol.argv(run, plan, store_url(folder), task, resume=run.name in status))
        )
    failed: dict[str, str] = {}
    with tqdm(total=len(left), unit="run", desc="training") as bar:
        threads = [
            threading.Thread(target=_lane, args=(number, waiting, folder, failed, bar), daemon=True)
            for number in range(min(lanes, len(left)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failed


def prepare_tasks(
    wanted: Collection[tuple[str, int]], folder: Path, lanes: int
) -> dict[tuple[str, int], dict[str, str]]:
    """Make the tasks that are missing, and return flags with model and data by start and seed."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn")) as pool:
        made = pool.map(_prepare, [(folder, *key) for key in wanted])
        return dict(zip(wanted, made, strict=True))


def _prepare(asked: tuple[Path, str, int]) -> dict[str, str]:
    from study import exact

    folder, start, seed = asked
    task = exact.prepare(task_folder(folder, start, seed), seed, start)
    return {
        "reward.remote_url": "exact_match",
        "actor.model_name_or_path": str(task.model.resolve()),
        "data.prompt_dataset": str(task.train.resolve()),
        "eval.dataset": str(task.heldout.resolve()),
    }


def _lane(number: int, waiting: Waiting, folder: Path, failed: dict[str, str], bar: Any) -> None:
    """Give the waiting runs to a lane's process, one at a time, until none is left."""
    log = folder / f"lane-{number}.log"
    code = commit()
    process: subprocess.Popen[str] | None = None
    while True:
        try:
            run, argv = waiting.get_nowait()
        except Empty:
            break
        process = process or _start_lane(folder, log)
        began = time.monotonic()
        error = _ask(process, argv)
        seconds = time.monotonic() - began
        if error is None:
            with (folder / TIMES).open("a") as file:
                line = {"run": run.name, "seconds": round(seconds, 1), "commit": code}
                file.write(json.dumps(line) + "\n")
        else:
            failed[run.name] = f"{error}; see {log}"
            _end_lane(process)
            process = None
        bar.write(f"{run.name}: {error or f'{seconds:.0f} s'}")
        bar.update(error is None)
    if process is not None:
        _end_lane(process)


def _start_lane(folder: Path, log: Path) -> subprocess.Popen[str]:
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "study", "lane"],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )


def _ask(process: subprocess.Popen[str], argv: list[str]) -> str | None:
    """Have a lane train a command line. Return the error in one line, or None."""
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
    """Run the process of a lane: read command lines as JSON, train each and answer in JSON, until the input ends.

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
