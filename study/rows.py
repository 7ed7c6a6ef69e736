"""The rows of a study: read from its CSV files, written whole, added to.

Floats are written with 6 significant digits. NaN is an empty field.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from openrlhf_dbb.errors import UsageError

ARMS = {
    "grpo": "GRPO",
    "grpo-wide": "GRPO, wide clip",
    "laplace": "Laplace",
    "dbb": "DBB 0.5",
    "auto": "auto",
    "dr_grpo": "Dr.GRPO",
    "dr_grpo-dbb": "Dr.GRPO-DBB 0.5",
    "dapo": "DAPO",
    "greso": "GRESO",
    "repo": "RePO",
    "single": "N = 1",
    "single-text": "N = 1, predicted prior",
    "spo": "SPO",
    "max_rl": "MaxRL",
    "max_rl-auto": "MaxRL, auto",
    "batch-mean": "batch mean",
    "centered": "centred",
    "centered-seq": "centred, GRPO's loss",
    "centered-mean": "centred, token-mean loss",
}
"""Printed names of the arms that the study compares, in the order of its tables and figures."""
PAPER_ARMS = ("dbb-0.25", "dbb-0.75", "dbb-1", "dbb-standard")
"""Further arms, for the paper's claims."""
THINNED = {"dbb-thin": "1", "dbb-thin-half": "0.5"}
"""Arms of the experiment ``thin`` with ``--train.thin C``, and their C."""
FEWER_ARMS = {
    "single": ARMS["single"],
    "single-hidden": "N = 1, predicted",
    "drawn": "N = 1, predicted, drawn",
    "drawn-weighted": "N = 1, predicted, drawn, weights",
}
"""Printed names of arms with one rollout a prompt."""
DRAWS_ARMS = (
    "measure",
    "even8",
    "even4",
    "oracle",
    "oracle-unweighted",
    "memory",
    "memory-unweighted",
    "learns",
    "warm",
    "rates",
    "learns-unweighted",
    "rates-unweighted",
)
"""Arms that draw prompts by what is known of them, and what they are compared with."""
RIVAL_ARMS = ("own-counts", "two-stage")
"""Further arms of the protocol ``rival``."""
EVERY_ARM = (*ARMS, *PAPER_ARMS, *THINNED, *FEWER_ARMS, *DRAWS_ARMS, *RIVAL_ARMS)
EXPERIMENTS = {
    "n2": "N = 2", "n4": "N = 4", "n8": "N = 8", "hard": "hard start", "long-n2": "N = 2, 16 passes",
    "real": "SmolLM2", "real-n2": "SmolLM2, N = 2", "terms": "SmolLM2, three terms", "lcm": "SmolLM2, lcm",
    "pairs": "SmolLM2, pairs", "many": "SmolLM2, pairs, N = 2", "real-clip": "SmolLM2, four gradient steps a step",
}  # fmt: skip
"""Experiments that compare arms. The first one is the primary experiment."""
TASKS = {
    "pairs": "sums of two numbers, 33 %",
    "sums": "sums of the preset, 18 %",
    "lcm": "common multiples, 6 %",
}
"""Printed names of the tasks on which SmolLM2's estimates are measured, with its success rate before training."""
EVALUATED = ("accuracy", "ood", "best")
"""Columns of epochs.csv that only epochs with an evaluation have."""
CONTROL_OF = "control-"
"""Stands before an experiment's name in points.csv where the control repeats the experiment."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "runs": (
        "run", "experiment", "arm", "n", "seed", "learning_rate", "start_accuracy", "accuracy", "best", "start_ood",
        "ood", "reward_last", "exact", "ends_at_once", "rollouts", "trained", "steps", "seconds",
        "commit",  # empty in rows that were collected before it was noted
    ),
    # Epoch 0 is before training.
    "epochs": (
        "run", "experiment", "arm", "n", "seed", "epoch", "steps", "rollouts", "accuracy", "ood", "reward",
        "zero_variance", "rescued", "abs_advantage", "clip_fraction", "grad_norm", "entropy", "length", "best", "loss",
    ),
    # An estimator replayed on a run with probes. The discount is empty if the estimator has none.
    "mse": ("run", "n", "seed", "estimator", "discount", "mse", "mse_point"),
    # DBB with a prior, replayed at the discount with the smallest error.
    "priors": ("run", "n", "seed", "prior_alpha", "prior_beta", "discount", "mse"),
    # A trained model on a task that it was not trained on. The run "start" is the model before training.
    "transfer": ("run", "benchmark", "prompts", "samples", "accuracy"),
    # A policy saved during training; step 0 is before training.
    "points": ("run", "experiment", "arm", "n", "seed", "learning_rate", "step", "rollouts", "accuracy"),
    # Mean probability of the right answer of a saved policy, see study.forced; step 0 is before training.
    "forced": (
        "run", "experiment", "arm", "n", "seed", "learning_rate", "step", "rollouts", "heldout", "pool",
    ),
    # A prompt's rollouts before training, see study/protocols/draws.toml.
    "gate": ("run", "prompt", "samples", "successes"),
    # A training in plain PyTorch, see study.control.
    "control": (
        "experiment", "arm", "n", "seed", "learning_rate", "start_accuracy", "half_accuracy", "accuracy",
        "ends_at_once",
    ),
}  # fmt: skip
"""Columns by file, without the ending .csv. Accuracies are in [0, 1]."""


@dataclass(frozen=True, eq=False)
class Study:
    """The rows of every file as pandas frames."""

    runs: Any
    epochs: Any
    mse: Any
    priors: Any
    transfer: Any
    points: Any
    forced: Any
    gate: Any
    control: Any

    @classmethod
    def of(cls, **frames: Any) -> Study:
        """Return a study of these frames. The other ones have no rows."""
        return cls(
            **{
                name: frames.get(name, pd.DataFrame(columns=list(COLUMNS[name])))
                for name in COLUMNS
            }
        )

    def arms(self, experiment: str) -> list[str]:
        """Return the arms of ``ARMS`` that have runs in the experiment, in table order."""
        present = set(self.runs.arm[self.runs.experiment == experiment])
        return [arm for arm in ARMS if arm in present]

    def of_seeds(self, seeds: Iterable[int]) -> Study:
        """Return the study with only the runs and epochs of these seeds."""
        wanted = list(seeds)
        runs, epochs = (rows[rows.seed.isin(wanted)] for rows in (self.runs, self.epochs))
        return replace(self, runs=runs, epochs=epochs)

    @functools.cache  # noqa: B019 - a study lives as long as its command, which asks for each a hundred times
    def outcome(self, experiment: str, arm: str, name: str) -> Any:
        """Return one outcome of an arm's runs as a Series over seeds, without the runs that lack it.

        Args:
            experiment, arm: of the runs.
            name: a column of runs.csv, or ``mean_`` and a column of epochs.csv for its mean over the evaluated epochs
                after training. A run that misses one of these evaluations has no value.
        """
        if not name.startswith("mean_"):
            mine = self.runs_of.get((experiment, arm), self.runs.iloc[:0])
            return mine.set_index("seed")[name].dropna().sort_index()
        means = self._means(experiment, name.removeprefix("mean_"))
        return (
            means.xs(arm) if arm in means.index.get_level_values(0) else means.droplevel(0).iloc[:0]
        )

    @functools.cached_property
    def runs_of(self) -> dict[tuple[str, str], Any]:
        """The rows of runs.csv by experiment and arm, in this order."""
        return dict(iter(self.runs.groupby(["experiment", "arm"])))

    @functools.cache  # noqa: B019 - of all arms at once, as above
    def _means(self, experiment: str, column: str) -> Any:
        mine = self.epochs[(self.epochs.experiment == experiment) & (self.epochs.epoch > 0)]
        # Arms may divide as many rollouts into more epochs, so an evaluation is known by its part of the run.
        rows = mine.assign(part=mine.epoch / mine.groupby("run").epoch.transform("max")).dropna(
            subset=[column]
        )
        table = rows.pivot_table(index=["arm", "seed"], columns="part", values=column)
        return table.mean(axis=1, skipna=column not in EVALUATED).dropna()


def load(*folders: Path) -> Study:
    """Read the CSV files of these folders, those that exist.

    Raises:
        UsageError: a folder holds none, or a column is missing.
    """
    for folder in folders:
        if not any((folder / f"{name}.csv").exists() for name in COLUMNS):
            raise UsageError(
                f"{folder} holds none of {', '.join(COLUMNS)} as .csv; collect the study first"
            )
    frames = {}
    for name, columns in COLUMNS.items():
        parts = [part for folder in folders if len(part := read(folder / f"{name}.csv", columns))]
        if parts:
            frames[name] = pd.concat(parts, ignore_index=True)
    return Study.of(**frames)


def read(path: Path, columns: Sequence[str]) -> Any:
    """Read a CSV file as a pandas frame, without rows if the file does not exist.

    Raises:
        UsageError: the file lacks one of ``columns``.
    """
    if not path.exists():
        return pd.DataFrame(columns=list(columns))
    rows = pd.read_csv(path)
    missing = [name for name in columns if name not in rows]
    if missing:
        raise UsageError(f"{path}: no column {', '.join(missing)}; collect the study again")
    return rows


def finished(folder: Path, *, forced: bool) -> set[str]:
    """Return the runs in a folder's runs.csv; with ``forced`` only those whose last step is in its forced.csv.

    Raises:
        UsageError: a file lacks a column.
    """
    runs = read(folder / "runs.csv", COLUMNS["runs"])
    if not forced:
        return set(runs.run)
    points = read(folder / "forced.csv", COLUMNS["forced"])
    measured = set(zip(points.run, points.step, strict=True))
    return {run.run for run in runs.itertuples() if (run.run, run.steps) in measured}


def drop(path: Path, runs: Iterable[str]) -> None:
    """Remove the rows of runs from a CSV file, if it exists."""
    if path.exists():
        every = pd.read_csv(path)
        write(path, every[~every.run.isin(list(runs))])


def write(path: Path, rows: Any) -> None:
    """Write a pandas frame. The file appears complete or not at all."""
    part = path.with_name(f"{path.name}.part")
    rows.to_csv(part, index=False, float_format="%.6g", lineterminator="\n")
    os.replace(part, path)


def append(path: Path, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Add rows to a CSV file, which is created if it does not exist."""
    new = pd.DataFrame(rows, columns=list(columns))
    write(path, pd.concat([pd.read_csv(path), new], ignore_index=True) if path.exists() else new)
