"""Collects a study's numbers from its store and its runs' folders into CSV files.

An epoch is one of E equal parts of a run's steps. It is not a pass over the data, because some methods take several.
Shares of rollouts, rewards and lengths are over all generated rollouts, including the filtered ones.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from openrlhf_dbb import storage
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, results
from openrlhf_dbb.lab import ESTIMATORS, replay
from openrlhf_dbb.lab.candidates import knob_value, sweep
from openrlhf_dbb.storage import read
from study import rows
from study.rows import COLUMNS, EVERY_ARM

TIMES, EXACT = "times.jsonl", "exact.jsonl"
MEASURED = "measure"
"""The arm that only measures the policy before training."""
DISCOUNTS = tuple(round(0.05 * step, 2) for step in range(21))
"""Tried with each estimator that has a discount, on the runs with probes. For laplace this is the smoothing."""
MASSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Prior pseudo-counts tried with DBB, in rollouts."""
METRICS = {
    "abs_advantage": "estimator/abs_advantage",
    "clip_fraction": "ppo_clip_ratio",
    "grad_norm": "actor_grad_norm",
    "entropy": "entropy_loss",
    "loss": "policy_loss",
}
"""Columns of epochs.csv that the trainer logs, and its names for them."""
_NAME = re.compile(
    f"(?P<experiment>[a-z0-9.-]+?)-(?P<arm>{'|'.join(map(re.escape, EVERY_ARM))})"
    r"(-lr[0-9]+(\.[0-9]+)?(e-?[0-9]+)?)?-s(?P<seed>[0-9]+)"
)
Row = dict[str, Any]


def name_parts(name: str) -> tuple[str, str, int] | None:
    """Return experiment, arm and seed of a run's name, or None if no run of the study has such a name.

    Example:
        >>> name_parts("n2-dbb-s3"), name_parts("pilot-n2-grpo-lr0.0002-s101")
        (('n2', 'dbb', 3), ('pilot-n2', 'grpo', 101))
    """
    match = _NAME.fullmatch(name)
    return match and (match["experiment"], match["arm"], int(match["seed"]))


@dataclass(frozen=True)
class StudyRun:
    """A finished run of the study."""

    record: storage.RunRecord
    experiment: str
    arm: str
    seed: int

    @property
    def row(self) -> Row:
        """The columns that runs.csv and epochs.csv share."""
        rate = float(self.record.config["actor.adam.lr"])
        n = int(self.record.config["rollout.n_samples_per_prompt"])
        first = {"run": self.record.name, "experiment": self.experiment, "arm": self.arm}
        return first | {"n": n, "seed": self.seed, "learning_rate": rate}

    @property
    def ends(self) -> list[int]:
        """0, then the last step of each epoch: (1 + E,)."""
        epochs = int(self.record.config["train.num_episodes"])
        return [round(epoch * self.record.last_step / epochs) for epoch in range(epochs + 1)]

    @property
    def has_errors(self) -> bool:
        """Whether estimators are replayed on the run: it trained GRPO, and it has probes."""
        return bool(self.record.config.get("probe.fraction")) and self.arm == "grpo"


def collect(store_url: str, folder: Path) -> None:
    """Write runs.csv, epochs.csv, mse.csv, priors.csv and transfer.csv, and print the runs that were left out.

    Rows of runs that are not in the store are kept. Where the store has no finished run, they stay as they are.

    Args:
        folder: of the trainings. ``times.jsonl`` and ``exact.jsonl`` in it are optional. A line has a run and numbers.
            ``transfer/``, optional too, has an evaluation of ``openrlhf-dbb evaluate`` for each run.

    Raises:
        UsageError: there is neither a finished run nor a runs.csv.
    """
    with storage.open_store(store_url, create=False) as store:
        runs = _finished(store)
        if not runs and (folder / "runs.csv").exists():
            return
        if not runs:
            raise UsageError(
                f"{store.location} has no finished run of the study; train some, or name another store"
            )
        measured = [_measures(store, run) for run in runs]
    lasts = pd.DataFrame([last for _, last in measured])
    for file in (TIMES, EXACT):
        lasts = lasts.merge(read_lines(folder / file), left_on="run", right_index=True, how="left")
    epochs = pd.DataFrame([row for of_run, _ in measured for row in of_run])
    evaluated = ("actor.model_name_or_path", "eval.dataset", "data.max_samples")
    _share_starts(
        lasts,
        epochs,
        {run.record.name: tuple(map(run.record.config.get, evaluated)) for run in runs},
    )
    known = set(rows.read(folder / "priors.csv", COLUMNS["priors"]).run)
    mse: list[Row] = []
    priors: list[Row] = []
    for run in runs:
        if run.has_errors and run.record.name not in known:  # a replay takes 10 s
            _, visits = replay.read(store_url, str(run.record.run_id))
            mse += _errors(run, visits)
            priors += _priors(run, visits)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "runs": lasts,
        "epochs": epochs,
        "mse": pd.DataFrame(mse),
        "priors": pd.DataFrame(priors),
    }
    if measured_before := [
        row for run in runs if run.arm == MEASURED for row in _gate(store_url, run)
    ]:
        files["gate"] = pd.DataFrame(measured_before)
    if others := _transfers(folder / "transfer"):
        files["transfer"] = pd.DataFrame(others)
    for name, new in files.items():
        path = folder / f"{name}.csv"
        old = rows.read(path, COLUMNS[name])
        kept = old[~old.run.isin(new["run"])] if len(new) else old
        every = pd.concat(
            [part.reindex(columns=COLUMNS[name]) for part in (kept, new) if len(part)] or [old]
        )
        rows.write(path, every.sort_values("run", kind="stable"))
        print(
            f"{path}: {len(every)} rows"
            + (f", {len(kept)} of them from earlier" if len(kept) else "")
        )


def _gate(store_url: str, run: StudyRun) -> list[Row]:
    """Return the rows of gate.csv; a prompt ends with its problem."""
    query = """SELECT p.prompt, h.rollouts AS samples, h.successes FROM posterior_history h
               JOIN prompts p ON p.prompt_id = h.prompt_id WHERE h.run_id = :run ORDER BY h.prompt_id"""
    with storage.open_store(store_url, create=False) as store:
        found = store.query(query, run=run.record.run_id)
    return [
        {"run": run.record.name, "prompt": row.prompt.rpartition(": ")[2], "samples": row.samples}
        | {"successes": round(row.successes)}
        for row in found
    ]


def _transfers(folder: Path) -> list[Row]:
    """Return the rows of transfer.csv, an evaluation's name being the run's."""
    found: list[Row] = []
    for path in sorted(folder.glob(f"*/{results.RESPONSES}")):
        scores = pd.DataFrame(
            [(row.benchmark, np.array(row.scores, float)) for row in results.read_rows(path)]
        )
        for name, of_name in scores.groupby(0):
            scores_P_N = np.stack(of_name[1].to_list())
            prompts, samples = scores_P_N.shape
            found.append(
                {"run": path.parent.name, "benchmark": name, "prompts": prompts, "samples": samples}
            )
            found[-1]["accuracy"] = scores_P_N.mean()
    return found


def _share_starts(lasts: Any, epochs: Any, models: dict[str, tuple[Any, ...]]) -> None:
    """Set every run's start to the mean over the evaluations of its model on its data, so that all arms share it."""
    # Two evaluations of a model differ by sampling.
    model = lasts.run.map(models)
    for column, shared in (("accuracy", "start_accuracy"), ("ood", "start_ood")):
        lasts[shared] = lasts[shared].groupby(model).transform("mean")
        first = epochs.epoch == 0
        epochs.loc[first, column] = epochs.run[first].map(lasts.set_index("run")[shared])


def read_lines(path: Path) -> Any:
    """Return a file of JSON lines as a frame indexed by run, with the last line of each run."""
    if not path.exists():
        return pd.DataFrame()
    lines = {}
    for place, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            lines[line.pop("run")] = line
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f'{path}, line {place}: {text!r} is not {{"run": NAME, ...}}; remove it'
            ) from error
    return pd.DataFrame.from_dict(lines, orient="index")


def _finished(store: storage.PosteriorStore) -> list[StudyRun]:
    """Return the finished runs of the study, and print the others."""
    runs = []
    for record in store.runs():
        parts = name_parts(record.name)
        if parts is None:
            print(f"left out: {record.name}, not the name of a run of the study")
        elif record.status != "finished":
            print(f"left out: {record.name}, unfinished at step {record.last_step}")
        else:
            runs.append(StudyRun(record, *parts))
    return runs


def _measures(store: storage.PosteriorStore, run: StudyRun) -> tuple[list[Row], Row]:
    """Return the run's rows of epochs.csv, and its row of runs.csv."""
    steps = _steps(store, run.record)
    evaluated = _evaluations(store, run)
    epochs = [run.row | {"epoch": 0, "rollouts": 0}]
    for epoch, (before, end) in enumerate(itertools.pairwise(run.ends), 1):
        part = steps[(steps.index > before) & (steps.index <= end)]
        means = part.drop(columns=["total"]).mean().to_dict()
        rollouts = int(steps.total.get(end, 0))
        epochs.append(
            run.row | {"epoch": epoch, "steps": end - before, "rollouts": rollouts} | means
        )
    for row, end in zip(epochs, run.ends, strict=True):
        row |= evaluated.loc[end].to_dict() if end in evaluated.index else {}
    totals, last = read.progress(store, run.record), run.record.last_step
    start, final = (
        {} if step not in evaluated.index else evaluated.loc[step].to_dict() for step in (0, last)
    )
    row = run.row | {f"start_{name}": start.get(name, np.nan) for name in ("accuracy", "ood")}
    row |= {name: final.get(name, np.nan) for name in ("accuracy", "best", "ood")}
    row |= {"reward_last": epochs[-1].get("reward"), "trained": totals["trained"], "steps": last}
    row |= {"rollouts": totals["generated"] + totals["unused_rollouts"]}
    return epochs, row | _final(store, run.record)


def _steps(store: storage.PosteriorStore, run: storage.RunRecord) -> Any:
    """Return the columns of epochs.csv that every step has, by step, and ``total``, rollouts generated so far."""
    query = """SELECT step, rollouts, successes, generated, generated_tokens, zero_variance, rescued, generated_total,
               metrics FROM steps WHERE run_id = :run ORDER BY step"""
    steps = pd.DataFrame([row._asdict() for row in store.query(query, run=run.run_id)]).set_index(
        "step"
    )
    logged = pd.DataFrame([json.loads(text or "{}") for text in steps.metrics], index=steps.index)
    missing = [name for name in METRICS.values() if name not in logged]
    if missing:
        print(f"{run.name}: {', '.join(missing)} was not logged; the columns are left empty")
    measures = pd.DataFrame({
        "reward": steps.successes / steps.rollouts,
        "zero_variance": steps.zero_variance / steps.generated,
        "rescued": steps.rescued / steps.generated,
        "length": steps.generated_tokens / steps.generated,
        "total": steps.generated_total,
    })  # fmt: skip
    return measures.join(
        logged.reindex(columns=list(METRICS.values())).set_axis(list(METRICS), axis=1)
    )


def _evaluations(store: storage.PosteriorStore, run: StudyRun) -> Any:
    """Return accuracy and best of the held-out data, and accuracy out of distribution, by step.

    A run that discards rollouts is not evaluated at the ends of its epochs, because their steps are not known in
    advance. Its values there are interpolated between neighbouring evaluations.
    """
    query = """SELECT step, benchmark, accuracy, best FROM evaluations
               WHERE run_id = :run AND name = :name AND step IS NOT NULL ORDER BY step"""
    found = store.query(query, run=run.record.run_id, name=storage.TRAINING)
    if not found:
        return pd.DataFrame(columns=["accuracy", "best", "ood"])
    evaluated = pd.DataFrame([row._asdict() for row in found])
    sources = sorted(set(evaluated.benchmark))
    groups = {name: benchmarks.find(name).group for name in sources if name in benchmarks.NAMES}
    groups |= {"heldout": "ID", "ood": "OOD"} | ({sources[0]: "ID"} if len(sources) == 1 else {})
    if "ID" not in {groups.get(name) for name in sources}:
        raise UsageError(
            f"run {run.record.name!r} was evaluated on {', '.join(sources)}; its data need a datasource heldout or ood"
        )
    group = evaluated.benchmark.map(groups)
    inside, outside = (
        evaluated[group == name].groupby("step")[["accuracy", "best"]].mean()
        for name in ("ID", "OOD")
    )
    table = inside.join(outside.accuracy.rename("ood"), how="outer")
    if run.record.config["rollout.strategy"] == "plain":
        return table
    wanted = table.index.union(run.ends)
    return table.reindex(wanted).interpolate(method="index", limit_area="inside")


def _final(store: storage.PosteriorStore, run: storage.RunRecord) -> Row:
    """Return accuracy, best and ood of the run's model, if ``openrlhf-dbb evaluate`` stored them under its name."""
    query = """SELECT benchmark, accuracy, best FROM evaluations
               WHERE run_id = :run AND name = :name AND step IS NULL"""
    found = [
        (benchmarks.find(row.benchmark).group, row)
        for row in store.query(query, run=run.run_id, name=run.name)
    ]
    final: Row = {}
    for group, columns in (
        ("ID", {"accuracy": "accuracy", "best": "best"}),
        ("OOD", {"ood": "accuracy"}),
    ):
        of_group = [row for name, row in found if name == group]
        if of_group:
            final |= {
                name: float(np.mean([getattr(row, at) for row in of_group]))
                for name, at in columns.items()
            }
    return final


def _replayed(
    visits: replay.Visits, names: Sequence[str]
) -> list[tuple[str, float | None, float | None]]:
    """Return estimator, discount and error against the probes of each candidate."""
    candidates = sweep(names, DISCOUNTS)
    tried = [replay.evaluate(candidate, visits) for candidate in candidates]
    return [
        (each.estimator.name, knob_value(each.estimator), each.mean("probes")) for each in tried
    ]


def _errors(run: StudyRun, visits: replay.Visits) -> list[Row]:
    """Return the error, against the run's probes, of each estimator replayed on its recorded groups."""
    tried = _replayed(visits, ESTIMATORS)
    point = next(mse for name, _, mse in tried if name == "point")
    return [
        run.row | {"estimator": name, "discount": discount, "mse": mse, "mse_point": point}
        for name, discount, mse in tried
    ]


def _priors(run: StudyRun, visits: replay.Visits) -> list[Row]:
    """Return the smallest of these errors of DBB with each prior, and its discount."""
    made = []
    for alpha, beta in itertools.product(MASSES, MASSES):
        tried = _replayed(visits, [f"dbb:prior_alpha={alpha},prior_beta={beta}"])
        _, discount, mse = min(tried, key=lambda candidate: candidate[2] or np.inf)
        made.append(
            run.row | {"prior_alpha": alpha, "prior_beta": beta, "discount": discount, "mse": mse}
        )
    return made
