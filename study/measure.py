"""What is measured at the policies of finished runs, and the control beside them; nothing is measured twice.

Files of the study's folder: ``exact.jsonl``, ``gradients.csv``, ``control.csv``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from study.collect import EXACT
from study.data import Control
from study.protocol import Run
from study.run import finished_runs, prepare_tasks, store_url, task_folder

GRADIENTS, CONTROL = "gradients.csv", "control.csv"
KEYS = {GRADIENTS: ("seed", "n"), CONTROL: ("experiment", "arm", "seed", "shortest")}
"""By what rows that were measured together are known."""


def measure_models(runs: Sequence[Run], folder: Path) -> None:
    """Add the exact held-out accuracy of each finished run's policy to ``exact.jsonl``, where it is not there yet."""
    from tqdm import tqdm

    from study import exact

    path = folder / EXACT
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {json.loads(line)["run"] for line in lines}
    finished = finished_runs(folder)
    left = [run for run in runs if run.name in finished and run.name not in done]
    tasks = {key: exact.read(task_folder(folder, *key)) for key in {(run.start, run.seed) for run in left}}
    with path.open("a") as file:
        for run in tqdm(left, desc="exact accuracy", unit="model", disable=None):
            task = tasks[run.start, run.seed]
            policy = task.policy(folder / finished[run.name].config["ckpt.output_dir"])
            found = {"exact": task.accuracy(policy), "ends_at_once": task.ends_at_once(policy)}
            file.write(json.dumps({"run": run.name, **found}) + "\n")


def measure_gradients(runs: Sequence[Run], folder: Path, lanes: int) -> None:
    """Measure gradient quality at the policies of the ``frozen-`` experiments, where it has not been done.

    Raises:
        UsageError: a run cannot be used.
    """
    from study import gradients

    path = folder / GRADIENTS
    finished = finished_runs(folder)
    frozen = [run for run in runs if run.experiment.startswith("frozen-") and run.name in finished]
    done = {(row.seed, row.n) for row in gradients.read(path)}
    left = [run for run in frozen if (run.seed, run.n) not in done]
    jobs: list[Job] = [
        (
            gradients.measure,
            (store_url(folder), run.name, folder / finished[run.name].config["ckpt.output_dir"]),
            {"seed": run.seed},
        )
        for run in left
    ]
    for rows in _side_by_side(jobs, lanes, "gradients"):
        gradients.append(rows, path)


def measure_control(runs: Sequence[Run], folder: Path, lanes: int, seeds: int, shortest: int) -> None:
    """Repeat experiments without the pipeline, see :mod:`study.control`, on the first ``seeds`` seeds."""
    from study import control

    path = folder / CONTROL
    columns = list(Control._fields)
    done = set()
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            done = {tuple(row[name] for name in KEYS[CONTROL]) for row in csv.DictReader(file)}
    kinds = {(run.experiment, run.arm): run for run in runs if run.arm in control.ARMS}
    left = [
        (run, seed)
        for seed in range(1, seeds + 1)
        for run in kinds.values()
        if (run.experiment, run.arm, str(seed), str(shortest)) not in done
    ]
    prepare_tasks(sorted({(run.start, seed) for run, seed in left}), folder, lanes)
    jobs: list[Job] = [
        (control.measure, (task_folder(folder, run.start, seed), run, seed, shortest), {}) for run, seed in left
    ]
    for row in _side_by_side(jobs, lanes, "control"):
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(columns)
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])


Job = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function of a module, and its arguments."""


def _side_by_side(jobs: Sequence[Job], lanes: int, title: str) -> Iterator[Any]:
    """The results of jobs in processes of their own, as they come."""
    from tqdm import tqdm

    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(function, *arguments, **named) for function, arguments, named in jobs]
        for job in tqdm(as_completed(waiting), total=len(waiting), desc=title, unit="run", disable=None):
            yield job.result()
