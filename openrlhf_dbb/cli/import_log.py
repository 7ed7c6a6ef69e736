"""The command import makes a finished run of another trainer's log of rollouts.

It reads JSON lines (verl's ``trainer.rollout_data_dir``), CSV, Parquet (TRL's folder ``completions``), and JSON: a list
of rows, or a table as Weights & Biases has it.
"""

import argparse
import csv
import json
import math
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.integrations.shared import label_of, text_of
from openrlhf_dbb.options import add_store

# The names in TRL's tables, verl's dumps, our own tables and others; the first that a row has is taken.
COLUMNS = {
    "prompt": ("prompt", "input", "question"),
    "label": ("label", "gts", "ground_truth", "answer", "solution"),
    "reward": ("score", "reward"),
    "step": ("step", "global_step"),
    "response": ("completion", "response", "output"),
}
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is the function of ``cli.main``."""
    parser = add("import", import_log, opens_store=False)
    parser.add_argument("log", metavar="LOG", nargs="+", type=Path, help=f"files ({', '.join(SUFFIXES)}), or folders")
    parser.add_argument("--run_name", required=True, metavar="NAME", help="name of the new run")
    for name, columns in COLUMNS.items():
        text = f"column of the {name} (default: the first of {', '.join(columns)})"
        parser.add_argument(f"--{name}_key", metavar="COLUMN", help=text)
    parser.add_argument("--estimator", help="default: dbb for rewards in [0, 1], gaussian for others")
    add_store(parser)


def import_log(arguments: argparse.Namespace) -> None:
    keys = {name: [given] if (given := getattr(arguments, f"{name}_key")) else known for name, known in COLUMNS.items()}
    rows = [_rollout(row, place, step, keys) for file in _files(arguments.log) for row, place, step in _read(file)]
    rows.sort(key=lambda row: row["step"])  # stable: the rollouts of a step stay in their order
    rewards = {row["reward"] for row in rows} - {None}
    if not rewards:
        raise UsageError(f"{arguments.log[0]} has no rows with a reward; name a log of rollouts")
    estimator, unit = arguments.estimator, min(rewards) >= 0 and max(rewards) <= 1
    parameters = {"partial_credit": True} if estimator is None and unit and rewards - {0, 1} else None
    columns = {name: [row[name] for row in rows] for name in ("prompt", "label")}
    try:
        with Posteriors.create(
            getattr(arguments, "store_url", None), arguments.run_name, columns["prompt"], columns["label"],
            estimator=estimator or ("dbb" if unit else "gaussian"), parameters=parameters, method="import",
            dataset=", ".join(path.name for path in arguments.log), reward=", ".join(keys["reward"]),
            config={"import": {"log": list(map(str, arguments.log)), "columns": keys}},
        ) as posteriors:  # fmt: skip
            try:
                left_out = _observe(posteriors, rows)
                posteriors.finish()
            except BaseException:
                posteriors.store.delete_run(posteriors.run.record)
                raise
            print(
                f"run {arguments.run_name!r}: {posteriors.step} steps, {len(posteriors.prompt_ids)} prompts, "
                f"{len(rows) - left_out} rollouts, estimator {posteriors.estimator.name}; now in the commands show, "
                "prompts, lab replay, serve, and for train --warm_start"
            )
    except ValueError as error:
        raise UsageError(f"the log cannot be imported: {error}") from error


def _observe(posteriors: Posteriors, rows: list[dict[str, Any]]) -> int:
    """Observe the rows step by step; return how many belong to steps without any reward, which are left out."""
    left_out = 0
    for of_log, group in groupby(rows, key=lambda row: row["step"]):
        step = list(group)
        prompts, labels, rewards, texts = (
            [row[name] for row in step] for name in ("prompt", "label", "reward", "response")
        )
        if set(rewards) == {None}:
            left_out += len(step)
            continue
        extras = StepExtras(responses=Responses(texts))
        posteriors.observe(posteriors.step + 1, prompts, labels, rewards, extras=extras)
        posteriors.record_metrics(posteriors.step, {"import/step": of_log})  # a log may have every tenth step only
    return left_out


def _files(paths: list[Path]) -> Iterator[Path]:
    """Yield files, and those of a folder in the order of the numbers in their names."""
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}; name a log of rollouts or a folder of them")
        inside = [file for file in path.iterdir() if file.suffix in SUFFIXES] if path.is_dir() else [path]
        if not inside or inside[0].suffix not in SUFFIXES:
            raise UsageError(
                f"{path} is no log that can be read; allowed are {', '.join(SUFFIXES)}, or a folder of them"
            )
        yield from sorted(inside, key=lambda file: (_number(file) or 0, file.name))


def _number(file: Path) -> int | None:
    """Return the first whole number in a file's name, which is the step in the names of TRL, verl and W&B."""
    found = re.search(r"\d+", file.name)
    return int(found[0]) if found else None


def _read(file: Path) -> Iterator[tuple[dict[str, Any], str, int | None]]:
    """Yield the rows of a file, each with its place and the number in the file's name."""
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet

            rows: Any = parquet.read_table(file).to_pylist()
        elif file.suffix == ".csv":
            with file.open(newline="", encoding="utf-8-sig") as stream:
                rows = list(csv.DictReader(stream, strict=True))
        else:
            text = file.read_text(encoding="utf-8-sig")
            whole = file.suffix == ".json" and json.loads(text)
            rows = whole or [json.loads(line) for line in text.splitlines() if line.strip()]
            if isinstance(rows, dict):  # a table of W&B
                rows = [dict(zip(rows["columns"], row, strict=True)) for row in rows["data"]]
    except ImportError:
        raise UsageError(f"{file} needs pyarrow; run: pip install pyarrow") from None
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UsageError(f"{file} is broken: {' '.join(str(error).split())}") from error
    for place, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UsageError(f"{file}, row {place} is a {type(row).__name__}; rows need names for their columns")
        yield row, f"{file}, row {place}", _number(file)


def _rollout(row: dict[str, Any], place: str, step: int | None, keys: dict[str, Any]) -> dict[str, Any]:
    """Return prompt, label, reward (None where missing), step and response of a row."""
    found = {name: next((key for key in columns if key in row), None) for name, columns in keys.items()}
    for name in ("prompt", "reward"):
        if found[name] is None:
            raise UsageError(f"{place} has no column {' or '.join(keys[name])}; give --{name}_key of {', '.join(row)}")
    value: dict[str, Any] = {name: row[key] if key else None for name, key in found.items()}
    try:
        number = None if value["reward"] in (None, "") else float(value["reward"])
        step = int(float(value["step"])) if found["step"] else step
    except (TypeError, ValueError):
        raise UsageError(
            f"{place}: reward {value['reward']!r:.40} or step {value['step']!r:.40} is no number"
        ) from None
    if step is None:
        raise UsageError(
            f"{place} has no column {' or '.join(keys['step'])}, nor has its file's name a number; add one"
        )
    if not value["prompt"]:
        raise UsageError(f"{place} has no prompt in {found['prompt']!r}; fix or drop the row")
    response = value["response"] or ""  # a text, or messages as in TRL's tables
    return {
        "prompt": text_of(value["prompt"]),
        "label": label_of(value["label"]),
        "reward": None if number is None or math.isnan(number) else number,
        "step": step,
        "response": response if isinstance(response, str) else "\n".join(str(each["content"]) for each in response),
    }
