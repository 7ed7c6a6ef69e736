"""The command import makes a finished run of another trainer's log of rollouts."""

import argparse
import math
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.data import FILES, records
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


def add_commands(add: Any) -> None:
    parser = add("import", import_log, opens_store=False)
    parser.add_argument("log", metavar="LOG", nargs="+", type=Path, help=f"files ({', '.join(FILES)}), or folders")
    parser.add_argument("--run_name", required=True, metavar="NAME", help="name of the new run")
    for name, columns in COLUMNS.items():
        text = f"column of the {name} (default: the first of {', '.join(columns)})"
        parser.add_argument(f"--{name}_key", metavar="COLUMN", help=text)
    add_store(parser)


def import_log(arguments: argparse.Namespace) -> None:
    keys = {name: [given] if (given := getattr(arguments, f"{name}_key")) else known for name, known in COLUMNS.items()}
    rows = [
        _rollout(row, f"{file}, {place}", _number(file), keys)
        for file in _files(arguments.log)
        for place, row in _read(file).items()
    ]
    rewarded = {row["step"] for row in rows if row["reward"] is not None}
    # Stable: the rollouts of a step stay in their order. A step of which nothing was verified teaches nothing.
    rows = sorted((row for row in rows if row["step"] in rewarded), key=lambda row: row["step"])
    if not rows:
        raise UsageError(f"{arguments.log[0]} has no rows with a reward; name a log of rollouts")
    rewards = {row["reward"] for row in rows} - {None}
    unit = min(rewards) >= 0 and max(rewards) <= 1
    estimator, parameters = "dbb" if unit else "gaussian", {"partial_credit": True} if unit and rewards - {0, 1} else {}
    prompts, labels = ([row[name] for row in rows] for name in ("prompt", "label"))
    store, log = getattr(arguments, "store_url", None), list(map(str, arguments.log))
    try:
        with Posteriors.create(
            store, arguments.run_name, prompts, labels, estimator=estimator, parameters=parameters, method="import",
            dataset=", ".join(log), config={"import": {"log": log, "columns": keys}},
        ) as posteriors:  # fmt: skip
            try:
                for number, (step, group) in enumerate(groupby(rows, key=lambda row: row["step"]), 1):
                    names = ("prompt", "label", "reward", "response")
                    *columns, texts = zip(*([row[name] for name in names] for row in group), strict=True)
                    posteriors.observe(number, *columns, extras=StepExtras(responses=Responses(texts)))
                    posteriors.record_metrics(number, {"import/step": step})  # a log may have every tenth step only
                posteriors.finish()
            except BaseException:
                posteriors.store.delete_run(posteriors.run.record)
                raise
            counted = f"{posteriors.step} steps, {len(posteriors.prompt_ids)} prompts, {len(rows)} rollouts"
            print(f"run {arguments.run_name!r}: {counted}, estimator {estimator}")
    except ValueError as error:
        raise UsageError(f"the log cannot be imported: {error}") from error


def _files(paths: list[Path]) -> Iterator[Path]:
    """Yield files, and those of a folder in the order of the numbers in their names."""
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}; name a log of rollouts or a folder of them")
        inside = [file for file in path.iterdir() if file.suffix in FILES] if path.is_dir() else [path]
        yield from sorted(inside, key=lambda file: (_number(file) or 0, file.name))


def _number(file: Path) -> int | None:
    """Return the first whole number in a file's name, which is the step in the names of TRL, verl and W&B."""
    found = re.search(r"\d+", file.name)
    return int(found[0]) if found else None


def _read(file: Path) -> dict[str, dict[str, Any]]:
    rows = records(file, str(file))
    table = next(iter(rows.values()), {})
    if not table.keys() >= {"columns", "data"}:
        return rows
    # A table of W&B.
    return {f"row {at}": dict(zip(table["columns"], row, strict=True)) for at, row in enumerate(table["data"], 1)}


def _rollout(row: dict[str, Any], place: str, named: int | None, keys: dict[str, Any]) -> dict[str, Any]:
    """Return prompt, label, reward (None where missing), step and response of a row; ``named``: the file's number."""
    found = {name: next((key for key in columns if key in row), None) for name, columns in keys.items()}
    for name in ("prompt", "reward", "step"):
        if found[name] is None and (name != "step" or named is None):
            raise UsageError(f"{place} has no column {' or '.join(keys[name])}; give --{name}_key of {', '.join(row)}")
    value: dict[str, Any] = {name: row[key] if key else None for name, key in found.items()}
    try:
        reward = math.nan if value["reward"] in (None, "") else float(value["reward"])
        step = named if found["step"] is None else int(float(value["step"]))
    except (TypeError, ValueError):
        raise UsageError(
            f"{place}: reward {value['reward']!r:.40} or step {value['step']!r:.40} is not a number"
        ) from None
    texts = [value["response"] or ""]  # or messages, as in TRL's tables
    texts = texts if isinstance(texts[0], str) else [str(message["content"]) for message in texts[0]]
    texts_of = {"prompt": text_of(value["prompt"]), "label": label_of(value["label"]), "response": "\n".join(texts)}
    return texts_of | {"reward": None if math.isnan(reward) else reward, "step": step}
