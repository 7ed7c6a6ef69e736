"""Measurements at the policies of finished runs, and the control without the pipeline; nothing is measured twice.

Written to the study's folder: ``exact.jsonl`` or ``sampled.jsonl``, ``points.csv``, ``gradients.csv``, ``control.csv``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import storage
from openrlhf_dbb.study import files
from openrlhf_dbb.study.collect import EXACT, SAMPLED, read_lines
from openrlhf_dbb.study.data import ControlRow, GradientRow, PointRow
from openrlhf_dbb.study.protocol import LEARNING_RATE, PlannedRun, Protocol
from openrlhf_dbb.study.run import finished_runs, prepare_tasks, store_url, task_folder

GRADIENTS, CONTROL, POINTS = "gradients.csv", "control.csv", "points.csv"
KEYS = {GRADIENTS: ("seed", "n"), CONTROL: ("experiment", "arm", "seed", "shortest"), POINTS: ("run", "step")}
"""Columns that identify the rows of one measurement."""


def measure_models(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Measure the held-out accuracy of each finished run's policy, unless that is done already.

    The exact one is added to ``exact.jsonl`` with the probability of an empty response; that of a task with steps,
    which is sampled, to ``sampled.jsonl`` with its standard error.
    """
    from tqdm import tqdm

    from openrlhf_dbb.study import exact, tasks
    from openrlhf_dbb.study.policy_gradient import one_thread

    names = {EXACT: ("exact", "ends_at_once"), SAMPLED: ("sampled", "standard_error")}
    done = {run for file, each in names.items() for run in read_lines(folder / file, each)}
    finished = finished_runs(folder)
    left = [run for run in runs if run.name in finished and run.name not in done]
    keys = {(run.start, run.seed) for run in left}
    of_key = {key: exact.read(task_folder(folder, *key), tasks.kind(key[0])) for key in keys}
    for run in tqdm(left, desc="accuracy", unit="model", disable=None):
        task = of_key[run.start, run.seed]
        policy = task.policy(folder / finished[run.name].config["ckpt.output_dir"])
        file = EXACT if task.mark is None else SAMPLED
        with one_thread():
            found = task.sampled(policy) if file == SAMPLED else (task.accuracy(policy), task.ends_at_once(policy))
        with (folder / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"run": run.name, **dict(zip(names[file], found, strict=True))}) + "\n")


def measure_points(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Add the accuracy of each policy that a finished run saved on its way to ``points.csv``, unless it is there.

    That are the models of ``--ckpt.save_hf``, one every ``--ckpt.save_steps``, and the one that it started from. The
    accuracy is exact, or sampled for a task with steps, as in :func:`measure_models`.
    """
    from tqdm import tqdm

    from openrlhf_dbb.study import exact, tasks

    path = folder / POINTS
    finished = finished_runs(folder)
    done = {(row.run, row.step) for row in files.read(path, PointRow)}
    saved: list[tuple[PlannedRun, int, Path | None]] = []
    for run in runs:
        if run.name in finished:
            models = sorted((folder / finished[run.name].config["ckpt.path"]).glob("global_step*_hf"))
            steps = [int(model.name.removeprefix("global_step").removesuffix("_hf")) for model in models]
            saved += [(run, step, model) for step, model in zip([0, *steps], [None, *models], strict=True) if models]
    left = [point for point in saved if (point[0].name, point[1]) not in done]
    keys = {(run.start, run.seed) for run, _, _ in left}
    of_key = {key: exact.read(task_folder(folder, *key), tasks.kind(key[0])) for key in keys}
    for run, step, model in tqdm(left, desc="accuracy on the way", unit="model", disable=None):
        record, task = finished[run.name], of_key[run.start, run.seed]
        rollouts = 0.0
        if step:
            with storage.open_store(store_url(folder), create=False) as store:
                ((rollouts,),) = store.query(
                    "SELECT generated_total FROM steps WHERE run_id = :run AND step = :step",
                    run=record.run_id,
                    step=step,
                )
        policy, rate = task.policy(model), float(record.config[LEARNING_RATE])
        accuracy = task.accuracy(policy) if task.mark is None else task.sampled(policy)[0]
        row = PointRow(run.name, run.experiment, run.arm, run.n, run.seed, rate, step, rollouts, accuracy)
        files.append(path, [row])


def evaluate(runs: Sequence[PlannedRun], of: Protocol, folder: Path, until: float) -> dict[str, str]:
    """Evaluate the model of each finished run, its best checkpoint where there is one, and store it with the run.

    A finished evaluation is not repeated, and a stopped one continues.

    Args:
        until: ``time.monotonic()`` after which no evaluation is started.

    Returns:
        What went wrong, by the names of the runs whose evaluation failed.
    """
    failed = {}
    finished = finished_runs(folder)
    for run in runs:
        if not of.evaluation or run.name not in finished or time.monotonic() > until:
            continue
        config = finished[run.name].config
        flags = {"max_new_tokens": config["rollout.max_new_tokens"]} | of.evaluation | {"name": run.name}
        flags |= {"model": Path(config["ckpt.output_dir"]).parent, "run": run.name, "store.url": store_url(folder)}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        ended = subprocess.run([sys.executable, "-m", "openrlhf_dbb", "evaluate", *words], cwd=folder, check=False)
        if ended.returncode:
            failed[run.name] = f"its evaluation ended with exit status {ended.returncode}; the same command continues"
    return failed


def measure_gradients(runs: Sequence[PlannedRun], folder: Path, lanes: int) -> None:
    """Measure gradient quality at the policies of the ``frozen-`` experiments, unless already done.

    Raises:
        UsageError: a run cannot be used.
    """
    from openrlhf_dbb.study import gradients

    path = folder / GRADIENTS
    finished = finished_runs(folder)
    frozen = [run for run in runs if run.experiment.startswith("frozen-") and run.name in finished]
    done = {(row.seed, row.n) for row in files.read(path, GradientRow)}
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
        files.append(path, rows)


def measure_control(runs: Sequence[PlannedRun], folder: Path, lanes: int, seeds: int, shortest: int) -> None:
    """Repeat experiments without the pipeline, see :mod:`openrlhf_dbb.study.control`, on ``seeds`` seeds.

    They are counted from the first one of each experiment. Written to ``control.csv`` and, of trainings whose responses
    may end at once, ``points.csv``.
    """
    from openrlhf_dbb.study import control

    path = folder / CONTROL
    done = {(row.experiment, row.arm, row.seed, row.shortest) for row in files.read(path, ControlRow)}
    kinds: dict[tuple[str, str], PlannedRun] = {}
    for run in runs:
        for name, arm in control.ARMS.items():
            if run.arm == (arm.like or name):
                kinds.setdefault((run.experiment, name), run)
    left = [
        (run, name, run.seed + later)
        for later in range(seeds)
        for (experiment, name), run in kinds.items()
        if (experiment, name, run.seed + later, shortest) not in done
    ]
    prepare_tasks(sorted({(run.start, seed) for run, _, seed in left}), folder, lanes)
    jobs: list[Job] = [
        (control.measure, (task_folder(folder, run.start, seed), run, name, seed, shortest), {})
        for run, name, seed in left
    ]
    for row, points in _side_by_side(jobs, lanes, "control"):
        if points:
            files.append(folder / POINTS, points)
        files.append(path, [row])


Job = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A module-level function and its arguments."""


def _side_by_side(jobs: Sequence[Job], lanes: int, title: str) -> Iterator[Any]:
    """The results of jobs that run in processes of their own, in order of completion."""
    from tqdm import tqdm

    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(function, *arguments, **named) for function, arguments, named in jobs]
        for job in tqdm(as_completed(waiting), total=len(waiting), desc=title, unit="run", disable=None):
            yield job.result()
