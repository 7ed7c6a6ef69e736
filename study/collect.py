"""Collects the study's numbers from the posterior store and the runs' folders into CSV files.

An epoch is one of E equal parts of a run's steps, not a pass over the data: some methods take several passes.
Shares of rollouts, rewards and lengths are over all generated rollouts, including those that were filtered out.

Axes: T points of a curve, E epochs.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import storage
import storage.inspection
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks
from openrlhf_dbb.lab import recorded, replay, scores, specs
from study import files, training_curves
from study.data import EVERY_ARM, EXPERIMENTS, EpochRow, ErrorRow, PriorRow, RunRow
from study.training_curves import TrainingCurve

NAMES = (
    "pilot-n2", "pilot-n8", *EXPERIMENTS, "frozen-n2", "frozen-n4", "frozen-n8", "probe-n2", "probe-n8",
    "sweep-n2", "pilot-small-n2", "small-n2", "sweep-n8", "gpu-0.6b", "gpu-1.7b", "gpu-8b",
    *(
        f"{kind}-{size}"
        for kind in ("pilot-few", "few", "pilot-chain", "chain")
        for size in ("n8", "n8-steps", "n2", "n1")
    ),
)  # fmt: skip
"""All experiments, in the order of the files."""

HELD_OUT, OOD = "heldout", "ood"
"""Data sources of the evaluation data; a single one is the held-out one, whatever its name."""

TIMES, EXACT = "times.jsonl", "exact.jsonl"
DISCOUNTS = tuple(round(0.05 * step, 2) for step in range(21))
"""Tried with each estimator that has a discount, on the runs with probes; for laplace this is the smoothing."""

_METRICS = {
    "abs_advantage": "estimator/abs_advantage",
    "clip_fraction": "ppo_clip_ratio",
    "grad_norm": "actor_grad_norm",
    "entropy": "entropy_loss",
    "loss": "policy_loss",
}
"""Columns of ``epochs.csv`` that the trainer logs, and its names for them."""
_NAME = re.compile(
    f"(?P<experiment>{'|'.join(map(re.escape, NAMES))})-(?P<arm>{'|'.join(map(re.escape, EVERY_ARM))})"
    r"(-lr(?P<rate>[0-9]+(\.[0-9]+)?(e-?[0-9]+)?))?-s(?P<seed>[0-9]+)"
)
MASSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Prior pseudo-counts tried, in rollouts."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Name:
    """A run's name in parts: ``EXPERIMENT-ARM-sSEED``, or ``EXPERIMENT-ARM-lrRATE-sSEED``.

    Attributes:
        learning_rate: None if the name has none.
    """

    experiment: str
    arm: str
    seed: int
    learning_rate: float | None

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """None if it is not the name of a run of the study.

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
        """N, if the experiment's name has it."""
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
        """The run with N and learning rate from its configuration.

        Raises:
            UsageError: its name says something else.
        """
        samples, rate = record.config["rollout.n_samples_per_prompt"], record.config["actor.adam.lr"]
        for what, said, value in (("N", name.samples, samples), ("learning rate", name.learning_rate, rate)):
            if said not in (None, value):
                raise UsageError(
                    f"run {record.name!r} was trained with {what} {value:g}, but its name says {said:g}; "
                    "train it again, or collect from another store"
                )
        return cls(record, name, int(samples), float(rate))

    @property
    def key(self) -> tuple[int, int, int, float, str]:
        """Its place in the order of the files."""
        return *_place(self.record.name), self.record.name

    @property
    def ends(self) -> list[int]:
        """0, then the last step of each epoch: (1 + E,)."""
        epochs = int(self.record.config["train.num_episodes"])
        return [round(epoch * self.record.last_step / epochs) for epoch in range(epochs + 1)]

    @property
    def discards(self) -> bool:
        """Whether it discards rollouts, so that its number of steps, and when to evaluate, was not known in advance."""
        return bool(self.record.config["rollout.strategy"] != "plain")

    @property
    def has_errors(self) -> bool:
        """Whether estimators are replayed on it: a run of GRPO with probes."""
        probed = self.name.experiment.startswith("probe-") or self.record.config.get("probe.fraction", 0)
        return bool(probed) and self.name.arm == "grpo"

    @property
    def row(self) -> Row:
        """The columns shared by several files."""
        name = self.name
        first = {"run": self.record.name, "experiment": name.experiment, "arm": name.arm}
        return first | {"n": self.samples, "seed": name.seed, "learning_rate": self.learning_rate}


def _place(run: str) -> tuple[int, int, int, float]:
    """The place of a run's rows in the order of the files."""
    name = Name.parse(run)
    if name is None:
        raise UsageError(f"{run!r} is not the name of a run of the study; remove its rows")
    return NAMES.index(name.experiment), EVERY_ARM.index(name.arm), name.seed, name.learning_rate or 0.0


def collect(store_url: str | None, folder: Path, output: Path) -> None:
    """Write ``runs.csv``, ``epochs.csv``, ``mse.csv`` and ``priors.csv``, each whole or not at all, and print what was
    left out.

    Rows of runs that are not in the store are kept, so that parts of a study from several machines can be collected
    into one output; so are a run's errors, which do not change. The same store, folder and output give the same bytes.

    Args:
        store_url: None for the default store.
        folder: the working directory of the trainings. Optional in it: ``times.jsonl``
            with a line ``{"run": NAME, "seconds": FLOAT}`` for each run (the last line of a run counts), and
            ``exact.jsonl`` with exact and ends_at_once.
        output: where to write; created if needed.

    Raises:
        UsageError: no run of the study is finished, or a run, its evaluations or an existing file cannot be used.
        storage.StoreError: there is no such store.
    """
    seconds = read_lines(folder / TIMES, ("seconds",))
    exact = read_lines(folder / EXACT, ("exact", "ends_at_once"))
    with storage.open_store(store_url, create=False) as store:
        runs = _find(store)
        of_run, of_epoch = [], []
        for run in runs:
            epochs, last = _measures(store, run)
            of_epoch += epochs
            of_run.append(last | seconds.get(run.record.name, {}) | exact.get(run.record.name, {}))
    _share_starts([run.record.config["actor.model_name_or_path"] for run in runs], of_run, of_epoch)
    errors: list[Row] = []
    priors: list[Row] = []
    measured = {row["run"] for row in files.read_texts(output / "priors.csv", PriorRow._fields)}
    for run in runs:
        if run.has_errors and run.record.name not in measured:  # which takes 10 s
            what = _recorded(store_url, run)
            errors += _errors(run, what)
            priors += _priors(run, what)
    output.mkdir(parents=True, exist_ok=True)
    for file, header, rows in (
        ("runs", RunRow._fields, of_run),
        ("epochs", EpochRow._fields, of_epoch),
        ("mse", ErrorRow._fields, errors),
        ("priors", PriorRow._fields, priors),
    ):
        path = output / f"{file}.csv"
        here = {row["run"] for row in rows}
        kept = [row for row in files.read_texts(path, header) if row["run"] not in here]
        every = sorted([*kept, *rows], key=lambda row: (*_place(row["run"]), row["run"]))
        files.write(path, header, every)
        others = f", {len(kept)} of them from earlier" if kept else ""
        print(f"{path}: {len(every)} rows{others}")


def _share_starts(models: Sequence[str], of_run: Sequence[Row], of_epoch: Sequence[Row]) -> None:
    """Set every run's start to the mean over the evaluations of its model before training, so that all arms share it.

    Not every run is evaluated before training, and two evaluations of a model differ by sampling.
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
    """Numbers by run and name from a file of JSON lines, the last line of a run; none if the file does not exist.

    Raises:
        UsageError: a line has no run or lacks one of the numbers.
    """
    if not path.exists():
        return {}
    found: dict[str, dict[str, float]] = {}
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            found[row["run"]] = {name: float(row[name]) for name in names}
        except (ValueError, TypeError, KeyError) as error:
            wanted = ", ".join(f'"{name}": FLOAT' for name in names)
            raise UsageError(
                f'{path}, line {place}: {line!r} is not {{"run": NAME, {wanted}}}; remove or correct it'
            ) from error
    return found


def _find(store: storage.PosteriorStore) -> list[StudyRun]:
    """The finished runs of the study in the order of the files; other runs are printed as left out."""
    runs = []
    for record in store.runs():
        name = Name.parse(record.name)
        if name is None:
            print(f"left out: {record.name}, not the name of a run of the study")
        elif record.status != "finished":
            print(f"left out: {record.name}, unfinished at step {record.last_step}")
        else:
            runs.append(StudyRun.of(record, name))
    if not runs:
        raise UsageError(f"{store.location} has no finished run of the study; train some, or name another store")
    return sorted(runs, key=lambda run: run.key)


def _measures(store: storage.PosteriorStore, run: StudyRun) -> tuple[list[Row], Row]:
    """The run's rows of ``epochs.csv``, and its row of ``runs.csv`` without seconds."""
    accuracy, best, ood = _evaluations(store, run.record)
    trained = training_curves.training(store, run.record)
    used = storage.read_usage(store, run.record)
    steps = used.step.astype(np.float64)
    means = {
        "reward": trained.reward,
        "zero_variance": TrainingCurve(steps, used.zero_variance / used.generated),
        "rescued": TrainingCurve(steps, used.rescued / used.generated),
        "length": trained.length,
        **_metrics(store, run.record),
    }
    start = {"accuracy": _at(accuracy, 0), "ood": _at(ood, 0), "best": _at(best, 0)}
    epochs: list[Row] = [run.row | {"epoch": 0, "rollouts": 0} | start]
    for epoch, (before, end) in enumerate(itertools.pairwise(run.ends), 1):
        of_epoch: Row = {
            "epoch": epoch,
            "steps": end - before,
            "rollouts": int(_at(trained.rollouts, end)) if end else 0,
        }
        evaluated = {"accuracy": accuracy, "ood": ood, "best": best}
        of_epoch |= {name: _at(curve, end, run.discards) for name, curve in evaluated.items()}
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
    return epochs, row | _final(store, run.record)


def _final(store: storage.PosteriorStore, run: storage.RunRecord) -> Row:
    """accuracy, best and ood of the run's model, if it was evaluated after the training under the run's name."""
    query = """SELECT benchmark, accuracy, best FROM evaluations
               WHERE run_id = :run AND name = :name AND step IS NULL"""
    rows = store.query(query, run=run.run_id, name=run.name)
    groups = {row.benchmark: benchmarks.find(row.benchmark).group for row in rows}
    inside = [row for row in rows if groups[row.benchmark] == "ID"]
    outside = [row for row in rows if groups[row.benchmark] == "OOD"]
    found: Row = {}
    if inside:
        found |= {name: float(np.mean([getattr(row, name) for row in inside])) for name in ("accuracy", "best")}
    if outside:
        found["ood"] = float(np.mean([row.accuracy for row in outside]))
    return found


def _evaluations(store: storage.PosteriorStore, run: storage.RunRecord) -> tuple[TrainingCurve | None, ...]:
    """Held-out Acc@N, held-out Best@N and out-of-distribution Acc@N; None if not evaluated."""
    found = training_curves.validation(store, run)
    if found is None:
        return None, None, None
    sources = sorted(found.accuracy)
    groups = {name: benchmarks.find(name).group for name in sources if name in benchmarks.names()}
    inside = [name for name in sources if name == HELD_OUT or groups.get(name) == "ID"]
    outside = [name for name in sources if name == OOD or groups.get(name) == "OOD"]
    if len(sources) == 1:
        inside, outside = sources, []
    if not inside:
        raise UsageError(
            f"run {run.name!r} was evaluated on {', '.join(sources)}; give its data the datasource {HELD_OUT} or {OOD}"
        )
    curves = (
        [found.accuracy[name] for name in inside],
        [found.best[name] for name in inside],
        [found.accuracy[name] for name in outside],
    )
    return tuple(training_curves.average(each) if each else None for each in curves)


def _metrics(store: storage.PosteriorStore, run: storage.RunRecord) -> dict[str, TrainingCurve]:
    """The columns of ``_METRICS`` that the run logged, over steps."""
    logged = training_curves.metrics(store, run, list(_METRICS.values()))
    for column, name in _METRICS.items():
        if name not in logged:
            print(f"{run.name}: {name} was not logged; its {column} is left empty")
    return {column: logged[name] for column, name in _METRICS.items() if name in logged}


def _at(curve: TrainingCurve | None, step: int, between: bool = False) -> float:
    """The value at a step, NaN if there is none; ``between``: interpolated between neighbouring steps."""
    if curve is None or not (between or step in curve.x):
        return math.nan
    return float(np.interp(step, curve.x, curve.y, left=math.nan, right=math.nan))


def _mean(curve: TrainingCurve | None, before: int, end: int) -> float:
    """Mean over the steps after ``before`` up to ``end``; NaN if there are none."""
    if curve is None:
        return math.nan
    inside = (curve.x > before) & (curve.x <= end)
    return float(curve.y[inside].mean()) if inside.any() else math.nan


def _recorded(store_url: str | None, run: StudyRun) -> recorded.RecordedRun:
    what = recorded.read(store_url, str(run.record.run_id))
    if what.probes is None:
        raise UsageError(f"run {run.record.name!r} has no probes; train it with --probe.fraction 0.2")
    return what


def _errors(run: StudyRun, what: recorded.RecordedRun) -> list[Row]:
    """Mean squared errors, against the run's probes, of each estimator replayed on its recorded groups."""
    candidates = specs.sweep(replay.ESTIMATORS, DISCOUNTS)
    found = [scores.evaluate(candidate, what.visits, what.probes) for candidate in candidates]
    point = next(outcome.mean("probes") for outcome in found if outcome.estimator.name == "point")
    return [
        run.row
        | {
            "estimator": outcome.estimator.name,
            "discount": specs.knob_value(outcome.estimator),
            "mse": outcome.mean("probes"),
            "mse_point": point,
        }
        for outcome in found
    ]


def _priors(run: StudyRun, what: recorded.RecordedRun) -> list[Row]:
    """The smallest of these errors of DBB with each prior, and its discount."""
    rows = []
    for alpha, beta in itertools.product(MASSES, MASSES):
        candidates = specs.sweep([f"dbb:prior_alpha={alpha},prior_beta={beta}"], DISCOUNTS)
        found = [scores.evaluate(candidate, what.visits, what.probes) for candidate in candidates]
        least = min(found, key=lambda outcome: outcome.mean("probes") or math.inf)
        of_prior = {
            "prior_alpha": alpha,
            "prior_beta": beta,
            "discount": specs.knob_value(least.estimator),
            "mse": least.mean("probes"),
        }
        rows.append(run.row | of_prior)
    return rows
