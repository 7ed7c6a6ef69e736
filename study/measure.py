"""Measurements at the policies of finished runs, and the control without the pipeline; nothing is measured twice.

Written to the study's folder: ``exact.jsonl``, ``points.csv``, ``control.csv``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from openrlhf_dbb import storage
from study import rows as csv
from study.collect import EXACT, read_lines
from study.protocol import LEARNING_RATE, PlannedRun, Protocol
from study.run import finished_runs, prepare_tasks, store_url, task_folder

CONTROL, POINTS, FORCED = "control.csv", "points.csv", "forced.csv"
KEYS = {
    CONTROL: ("experiment", "arm", "seed"),
    POINTS: ("run", "step"),
    FORCED: ("run", "step"),
}
"""Columns that identify the rows of one measurement."""


def _done(path: Path) -> set[tuple[Any, ...]]:
    """Return the keys of the measurements that a file has."""
    key = list(KEYS[path.name])
    return set(csv.read(path, key)[key].itertuples(index=False, name=None))


def measure_models(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Add the exact held-out accuracy of each finished run and its share of empty responses to ``exact.jsonl``."""
    import torch
    from tqdm import tqdm

    from study import exact

    torch.set_num_threads(1)  # with a model this small a second thread mostly waits
    done, finished = set(read_lines(folder / EXACT).index), finished_runs(folder)
    left = [run for run in runs if run.name in finished and run.name not in done]
    keys = {(run.start, run.seed) for run in left}
    of_key = {key: exact.read(task_folder(folder, *key)) for key in keys}
    for run in tqdm(left, desc="accuracy", unit="model", disable=None):
        task = of_key[run.start, run.seed]
        policy = task.policy(folder / finished[run.name].config["ckpt.output_dir"])
        line = {
            "run": run.name,
            "exact": task.accuracy(policy),
            "ends_at_once": task.ends_at_once(policy),
        }
        with (folder / EXACT).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


def measure_points(runs: Sequence[PlannedRun], folder: Path, lanes: int) -> None:
    """Add the accuracy of each model that a finished run saved (``--ckpt.save_hf``) and its start to ``points.csv``."""
    path, finished = folder / POINTS, finished_runs(folder)
    done = _done(path)
    jobs = []
    for run in runs:
        if run.name not in finished:
            continue
        record = finished[run.name]
        points = _saved(record, folder)
        left = [
            point
            for point in [(0, 0.0, None), *points]
            if points and (run.name, point[0]) not in done
        ]
        if left:
            jobs.append((folder, run, float(record.config[LEARNING_RATE]), left))
    for rows in _side_by_side(_points, jobs, lanes, "accuracy on the way"):
        csv.append(path, csv.COLUMNS["points"], rows)


def _saved(
    record: storage.RunRecord, folder: Path, *, last: bool = False
) -> list[tuple[int, float, Path]]:
    """Return step, rollouts so far and folder of each model that a run saved on the way, by step.

    With ``last`` the policy at the end of the run is one of them.
    """
    models = {
        int(model.name.removeprefix("global_step").removesuffix("_hf")): model
        for model in (folder / record.config["ckpt.path"]).glob("global_step*_hf")
    }
    if last:
        models[record.last_step] = folder / record.config["ckpt.output_dir"]
    with storage.open_store(store_url(folder), create=False) as store:
        steps = store.query(
            "SELECT step, generated_total FROM steps WHERE run_id = :run", run=record.run_id
        )
    return [
        (step, float(total), models[step])
        for step, total in sorted(map(tuple, steps))
        if step in models
    ]


def measure_forced(
    runs: Sequence[PlannedRun], specs: Mapping[str, str], folder: Path, lanes: int
) -> None:
    """Add the probability of right answers of the models that finished runs saved, and of the start, to ``forced.csv``.

    The last policy counts as a model on the way. ``specs`` holds the tasks, by their columns of the file.
    """
    path = folder / FORCED
    finished = finished_runs(folder)
    done = _done(path)
    jobs = []
    starts: dict[tuple[Path, str], list[tuple[Any, ...]]] = {}  # rows by model and template
    for run in runs:
        if run.name not in finished:
            continue
        record = finished[run.name]
        rate = float(record.config[LEARNING_RATE])
        key = (run.name, run.experiment, run.arm, run.n, run.seed, rate)
        template = run.flags["data.input_template"]
        trained = run.flags["data.prompt_dataset"]
        if (run.name, 0) not in done:
            start = Path(record.config["actor.model_name_or_path"])
            rows = starts.setdefault((start, template), [])
            if not rows:  # runs that begin with one model share its measurement
                jobs.append((rows, start, specs, template, trained))
            rows.append((*key, 0, 0.0))
        for step, rollouts, model in _saved(record, folder, last=True):
            if (run.name, step) not in done:
                jobs.append(([(*key, step, rollouts)], model, specs, template, trained))
    for measured in _side_by_side(_forced, jobs, lanes, "probability of right answers"):
        csv.append(path, csv.COLUMNS["forced"], measured)


def _forced(
    rows: Sequence[tuple[Any, ...]],
    model: Path,
    specs: Mapping[str, str],
    template: str,
    trained: str,
) -> list[tuple[Any, ...]]:
    """Return rows that begin with ``rows``, for a model that their runs saved or began with."""
    import torch

    from study import forced

    torch.set_num_threads(1)
    means = forced.measure(model, specs, template, without=trained)
    return [(*row, means["heldout"], means["pool"]) for row in rows]


def _points(
    folder: Path, run: PlannedRun, rate: float, left: Sequence[tuple[int, float, Path | None]]
) -> list[tuple[Any, ...]]:
    """Rows of one run, from steps, rollouts and models (None: the one that it started from)."""
    import torch

    from study import exact

    torch.set_num_threads(1)
    task = exact.read(task_folder(folder, run.start, run.seed))
    key = (run.name, run.experiment, run.arm, run.n, run.seed, rate)
    return [
        (*key, step, rollouts, task.accuracy(task.policy(model))) for step, rollouts, model in left
    ]


def evaluate(runs: Sequence[PlannedRun], of: Protocol, folder: Path) -> dict[str, str]:
    """Evaluate the model of each finished run, its best checkpoint where there is one, and store it with the run.

    A finished evaluation is not repeated, and a stopped one continues.

    Returns:
        An error by the name of each run whose evaluation failed.
    """
    failed = {}
    finished = finished_runs(folder)
    for run in runs:
        if not of.evaluation or run.name not in finished:
            continue
        config = finished[run.name].config
        flags = (
            {"max_new_tokens": config["rollout.max_new_tokens"]}
            | of.evaluation
            | {"name": run.name}
        )
        flags |= {
            "model": Path(config["ckpt.output_dir"]).parent,
            "run": run.name,
            "store.url": store_url(folder),
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        ended = subprocess.run(
            [sys.executable, "-m", "openrlhf_dbb", "evaluate", *words], cwd=folder, check=False
        )
        if ended.returncode:
            failed[run.name] = (
                f"its evaluation ended with exit status {ended.returncode}; the same command continues"
            )
    return failed


def measure_control(runs: Sequence[PlannedRun], folder: Path, lanes: int, seeds: int) -> None:
    """Repeat experiments without the pipeline, see :mod:`study.control`, on ``seeds`` seeds.

    They are counted from the first one of each experiment. Written to ``control.csv`` and ``points.csv``.
    """
    from study import control

    path = folder / CONTROL
    done = _done(path)
    kinds: dict[tuple[str, str], PlannedRun] = {}
    for run in runs:
        for name, arm in control.ARMS.items():
            if run.arm == (arm.like or name):
                kinds.setdefault((run.experiment, name), run)
    left = [
        (run, name, run.seed + later)
        for later in range(seeds)
        for (experiment, name), run in kinds.items()
        if (experiment, name, run.seed + later) not in done
    ]
    prepare_tasks(sorted({(run.start, seed) for run, _, seed in left}), folder, lanes)
    jobs = [(task_folder(folder, run.start, seed), run, name, seed) for run, name, seed in left]
    for row, points in _side_by_side(control.measure, jobs, lanes, "control"):
        csv.append(folder / POINTS, csv.COLUMNS["points"], points)
        csv.append(path, csv.COLUMNS["control"], [row])


def _side_by_side(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], lanes: int, title: str
) -> Iterator[Any]:
    """Call a module-level function with each job's arguments, in processes; yield results in the order of the jobs.

    So the last row of a run is written after its other rows.
    """
    from tqdm import tqdm

    if not jobs:
        return
    with ProcessPoolExecutor(lanes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(function, *arguments) for arguments in jobs]
        for job in tqdm(waiting, desc=title, unit="run", disable=None):
            yield job.result()
