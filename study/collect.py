"""The study's numbers, from the posterior store and the runs' folders into CSV files.

An epoch is one of E equal parts of a run's steps, not a pass over the data: some methods take several passes.
Shares of rollouts, rewards and lengths are of all that were generated, those that were filtered out included.

Axes: T points of a curve, E epochs.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import storage
import storage.inspection
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import training_curves
from openrlhf_dbb.evaluation.training_curves import TrainingCurve
from openrlhf_dbb.lab import outcomes, recorded
from study.data import ARMS, EXPERIMENTS, Epoch, Error, Run

NAMES = ("pilot-n2", "pilot-n8", *EXPERIMENTS, "frozen-n2", "frozen-n4", "frozen-n8", "probe-n2", "probe-n8")
"""All experiments, in the order of the files."""

HELD_OUT, OOD = "heldout", "ood"
"""Data sources of the evaluation data; one that is alone is the held-out one, whatever its name."""

TIMES, EXACT = "times.jsonl", "exact.jsonl"
DISCOUNTS = tuple(round(0.05 * step, 2) for step in range(21))
"""Tried with the estimators of the probed runs, where they allow it; of laplace it is the smoothing."""

# What the store does not hold of a step.
_EVENTS = {
    "abs_advantage": "train/estimator/abs_advantage",
    "clip_fraction": "train/ppo_clip_ratio",
    "grad_norm": "train/actor_grad_norm",
    "entropy": training_curves.ENTROPY,
}
_NAME = re.compile(
    f"(?P<experiment>{'|'.join(NAMES)})-(?P<arm>{'|'.join(ARMS)})"
    r"(-lr(?P<rate>[0-9]+(\.[0-9]+)?(e-?[0-9]+)?))?-s(?P<seed>[0-9]+)"
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Name:
    """What a run's name says: ``EXPERIMENT-ARM-sSEED``, or ``EXPERIMENT-ARM-lrRATE-sSEED``.

    Attributes:
        learning_rate: None where the name has none.
    """

    experiment: str
    arm: str
    seed: int
    learning_rate: float | None

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """None if it is no name of the study.

        Example:
            >>> Name.parse("pilot-n2-grpo-lr0.0002-s101")
            Name(experiment='pilot-n2', arm='grpo', seed=101, learning_rate=0.0002)
        """
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        rate = found["rate"]
        return cls(found["experiment"], found["arm"], int(found["seed"]), None if rate is None else float(rate))

    @property
    def samples(self) -> int | None:
        """N, where the experiment's name tells."""
        found = re.search("n([0-9]+)$", self.experiment)
        return None if found is None else int(found[1])


@dataclass(frozen=True)
class StudyRun:
    """A finished run of the study.

    Attributes:
        samples: N, rollouts of a prompt in a step.
        learning_rate: of the policy.
    """

    record: storage.RunRecord
    name: Name
    samples: int
    learning_rate: float

    @classmethod
    def of(cls, record: storage.RunRecord, name: Name) -> StudyRun:
        """The run with what its configuration says.

        Raises:
            UsageError: its name says something else.
        """
        samples, rate = record.config["rollout.n_samples_per_prompt"], record.config["actor.adam.lr"]
        for what, said, value in (("N", name.samples, samples), ("learning rate", name.learning_rate, rate)):
            if said not in (None, value):
                raise UsageError(
                    f"run {record.name!r} was trained with {what} {value:g}, its name says {said:g}; "
                    "train it again, or collect from another store"
                )
        return cls(record, name, int(samples), float(rate))

    @property
    def key(self) -> tuple[int, int, int, float, str]:
        """Where it comes in the files."""
        return *_place(self.record.name), self.record.name

    @property
    def ends(self) -> list[int]:
        """The last step of each epoch, after a 0: (1 + E,)."""
        epochs = int(self.record.config["train.num_episodes"])
        return [round(epoch * self.record.last_step / epochs) for epoch in range(epochs + 1)]

    @property
    def discards(self) -> bool:
        """Whether it discards rollouts, so that nobody knew its number of steps and when to evaluate."""
        return bool(self.record.config["rollout.strategy"] != "plain")

    @property
    def row(self) -> Row:
        """The columns that several files have."""
        name = self.name
        first = {"run": self.record.name, "experiment": name.experiment, "arm": name.arm}
        return first | {"n": self.samples, "seed": name.seed, "learning_rate": self.learning_rate}


def _place(run: str) -> tuple[int, int, int, float]:
    """Where the rows of a run come in the files."""
    name = Name.parse(run)
    if name is None:
        raise UsageError(f"{run!r} is no name of a run of the study; remove its rows")
    return NAMES.index(name.experiment), list(ARMS).index(name.arm), name.seed, name.learning_rate or 0.0


def collect(store_url: str | None, folder: Path, output: Path) -> None:
    """Write ``runs.csv``, ``epochs.csv`` and ``mse.csv``, each whole or not at all, and say what was left out.

    Rows of runs that the store does not have stay as they are, so that parts of a study from several machines come
    together in one output. The same store, folder and output give the same bytes.

    Args:
        store_url: None for the default store.
        folder: the working directory of the trainings: their TensorBoard folders lie below it, and ``times.jsonl`` may,
            with a line ``{"run": NAME, "seconds": FLOAT}`` for each run, the last of which counts; so may
            ``exact.jsonl`` with exact and ends_at_once.
        output: where to write; made if need be.

    Raises:
        UsageError: no run of the study is finished, or a run, its evaluations, a file of lines or of rows are not as
            they must be.
        storage.StoreError: there is no such store.
    """
    seconds = read_lines(folder / TIMES, ("seconds",))
    exact = read_lines(folder / EXACT, ("exact", "ends_at_once"))
    with storage.open_store(store_url, create=False) as store:
        runs = _find(store)
        of_run, of_epoch = [], []
        for run in runs:
            epochs, last = _measures(store, run, folder)
            of_epoch += epochs
            of_run.append(last | seconds.get(run.record.name, {}) | exact.get(run.record.name, {}))
    _share_starts([run.record.config["actor.model_name_or_path"] for run in runs], of_run, of_epoch)
    errors = [row for run in runs if run.name.experiment.startswith("probe-") for row in _errors(store_url, run)]
    output.mkdir(parents=True, exist_ok=True)
    here = {run.record.name for run in runs}
    for file, header, rows in (
        ("runs", Run._fields, of_run),
        ("epochs", Epoch._fields, of_epoch),
        ("mse", Error._fields, errors),
    ):
        path = output / f"{file}.csv"
        kept = [row for row in read_rows(path, header) if row["run"] not in here]
        every = sorted([*kept, *rows], key=lambda row: (*_place(row["run"]), row["run"]))
        write(path, header, every)
        print(
            f"{path}: {len(every)} rows" + (f", {len(kept)} of them of runs that are not in the store" if kept else "")
        )


def read_rows(path: Path, header: Sequence[str]) -> list[Row]:
    """The rows of a file of :func:`write`; none if there is no such file.

    Raises:
        UsageError: it has other columns.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows: list[Row] = list(reader)
    if list(reader.fieldnames or []) != list(header):
        raise UsageError(f"{path} has other columns than this version writes; move it away")
    return rows


def merge(source: Path, into: Path, key: Sequence[str]) -> None:
    """Add the rows of a CSV file to another one, in place of those that are equal in some columns.

    Raises:
        UsageError: the two have other columns.
    """
    if not source.exists():
        return
    with source.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows: list[Row] = list(reader)
    header = list(reader.fieldnames or [])
    here = {tuple(row[name] for name in key) for row in rows}
    kept = [row for row in read_rows(into, header) if tuple(row[name] for name in key) not in here]
    write(into, header, [*kept, *rows])
    print(f"{into}: {len(kept) + len(rows)} rows")


def _share_starts(models: Sequence[str], of_run: Sequence[Row], of_epoch: Sequence[Row]) -> None:
    """Give every run the mean of what was found for its model before a training, so that its arms start at one point.

    Not every run is evaluated there, and two evaluations of a model differ by what is sampled.
    """
    starts: dict[Any, dict[str, float]] = {}
    for model in set(models):
        rows = [row for of, row in zip(models, of_run, strict=True) if of == model]
        starts[model] = {
            name: float(np.mean(values))
            if (values := [row[name] for row in rows if not math.isnan(row[name])])
            else math.nan
            for name in ("start_accuracy", "start_ood")
        }
    start = {}
    for model, row in zip(models, of_run, strict=True):
        row |= starts[model]
        start[row["run"]] = row
    for row in of_epoch:
        if row["epoch"] == 0:
            row |= {"accuracy": start[row["run"]]["start_accuracy"], "ood": start[row["run"]]["start_ood"]}


def read_lines(path: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The numbers of some names that JSON lines have for runs; none if there is no such file.

    Raises:
        UsageError: a line is not as it must be.
    """
    if not path.exists():
        return {}
    found: dict[str, dict[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            found[row["run"]] = {name: float(row[name]) for name in names}
        except (ValueError, TypeError, KeyError) as error:
            wanted = ", ".join(f'"{name}": FLOAT' for name in names)
            raise UsageError(
                f'{path}, line {number}: {line!r} is not {{"run": NAME, {wanted}}}; remove or correct it'
            ) from error
    return found


def write(path: Path, header: Sequence[str], rows: Iterable[Row]) -> None:
    """Write rows as CSV, real numbers with 6 significant digits, None and NaN as nothing; whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_shown(row.get(column)) for column in header] for row in rows)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text.getvalue(), encoding="utf-8")
    os.replace(part, path)


def _shown(value: Any) -> Any:
    if not isinstance(value, float):
        return "" if value is None else value
    return "" if math.isnan(value) else f"{value:.6g}"


def _find(store: storage.PosteriorStore) -> list[StudyRun]:
    """The finished runs of the study in the order of the files; the others are named."""
    runs = []
    for record in store.runs():
        name = Name.parse(record.name)
        if name is None:
            print(f"left out: {record.name}, which is no name of the study")
        elif record.status != "finished":
            print(f"left out: {record.name}, unfinished at step {record.last_step}")
        else:
            runs.append(StudyRun.of(record, name))
    if not runs:
        raise UsageError(f"{store.location} has no finished run of the study; train some, or name another store")
    return sorted(runs, key=lambda run: run.key)


def _measures(store: storage.PosteriorStore, run: StudyRun, folder: Path) -> tuple[list[Row], Row]:
    """The run's rows of ``epochs.csv``, and that of ``runs.csv`` without its seconds."""
    accuracy, best, ood = _evaluations(store, run.record)
    trained = training_curves.training(store, run.record)
    ledger = storage.inspection.usage_by_step(store, run.record)
    steps = ledger.step.astype(np.float64)
    means = {
        "reward": trained.reward,
        "zero_variance": TrainingCurve(steps, ledger.zero_variance / ledger.generated),
        "rescued": TrainingCurve(steps, ledger.rescued / ledger.generated),
        "length": trained.length,
        **_events(run.record, folder),
    }
    epochs: list[Row] = [run.row | {"epoch": 0, "rollouts": 0, "accuracy": _at(accuracy, 0), "ood": _at(ood, 0)}]
    for epoch, (before, end) in enumerate(itertools.pairwise(run.ends), 1):
        of_epoch: Row = {
            "epoch": epoch,
            "steps": end - before,
            "rollouts": int(_at(trained.rollouts, end)) if end else 0,
        }
        of_epoch |= {"accuracy": _at(accuracy, end, run.discards), "ood": _at(ood, end, run.discards)}
        epochs.append(run.row | of_epoch | {name: _mean(curve, before, end) for name, curve in means.items()})
    totals, last = storage.inspection.progress(store, run.record), run.record.last_step
    row = run.row | {
        "start_accuracy": _at(accuracy, 0),
        "accuracy": _at(accuracy, last),
        "best": _at(best, last),
        "start_ood": _at(ood, 0),
        "ood": _at(ood, last),
        "reward_last": epochs[-1]["reward"],
        "rollouts": totals["generated"] + totals["unused_rollouts"],
        "trained": totals["trained"],
        "steps": last,
    }
    return epochs, row


def _evaluations(store: storage.PosteriorStore, run: storage.RunRecord) -> tuple[TrainingCurve | None, ...]:
    """Acc@N and Best@N on the held-out prompts, Acc@N on those of another distribution; None where there are none."""
    found = training_curves.validation(store, run)
    if found is None:
        return None, None, None
    sources = sorted(found.accuracy)
    held_out = sources[0] if len(sources) == 1 else HELD_OUT
    if held_out not in sources:
        raise UsageError(
            f"run {run.name!r} was evaluated on {', '.join(sources)}; give its data the datasource {HELD_OUT} or {OOD}"
        )
    return found.accuracy[held_out], found.best[held_out], None if len(sources) == 1 else found.accuracy.get(OOD)


def _events(run: storage.RunRecord, folder: Path) -> dict[str, TrainingCurve]:
    """What the run logged to TensorBoard, over steps; what it did not log is missing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = folder / run.config["logger.tensorboard_dir"] / run.config["logger.wandb.run_name"]
    if not any(place.glob("events.out.tfevents.*")):
        print(f"{run.name}: no event files in {place}; its {', '.join(_EVENTS)} are left empty")
        return {}
    accumulator = EventAccumulator(str(place), size_guidance={"scalars": 0})  # 0: all of them
    accumulator.Reload()
    logged = {}
    for column, tag in _EVENTS.items():
        if tag not in accumulator.Tags()["scalars"]:
            print(f"{run.name}: {tag} was not logged; its {column} is left empty")
            continue
        # Steps that a resume has made again are there twice.
        values = {event.step: event.value for event in sorted(accumulator.Scalars(tag), key=lambda e: e.wall_time)}
        steps = sorted(step for step in values if step <= run.last_step)
        logged[column] = TrainingCurve(np.array(steps, dtype=np.float64), np.array([values[step] for step in steps]))
    return logged


def _at(curve: TrainingCurve | None, step: int, between: bool = False) -> float:
    """The value at a step, or else NaN; ``between``: interpolated where it lies between two others."""
    if curve is None or not (between or step in curve.x):
        return math.nan
    return float(np.interp(step, curve.x, curve.y, left=math.nan, right=math.nan))


def _mean(curve: TrainingCurve | None, before: int, end: int) -> float:
    """Mean over the steps after ``before``, to ``end``; NaN if there are none."""
    if curve is None:
        return math.nan
    inside = (curve.x > before) & (curve.x <= end)
    return float(curve.y[inside].mean()) if inside.any() else math.nan


def _errors(store_url: str | None, run: StudyRun) -> list[Row]:
    """Mean squared errors that the estimators would have had on the run's recorded groups, against its probes."""
    what = recorded.read(argparse.Namespace(store_url=store_url, run=str(run.record.run_id)))
    if what.probes is None:
        raise UsageError(f"run {run.record.name!r} has no probes; train it with --probe.fraction 0.2")
    candidates = recorded.sweep(recorded.ESTIMATORS, DISCOUNTS)
    found = [outcomes.evaluate(candidate, what.visits, what.probes) for candidate in candidates]
    point = next(outcome.mean("probes") for outcome in found if outcome.estimator.name == "point")
    return [
        run.row
        | {
            "estimator": outcome.estimator.name,
            "discount": outcome.value,
            "mse": outcome.mean("probes"),
            "mse_point": point,
        }
        for outcome in found
    ]
