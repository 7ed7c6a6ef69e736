"""The command import makes a finished run of another trainer's log of rollouts.

Nothing is guessed in silence: it prints which columns it took, and where the steps come from. The
advantages are the log's own, or none are known.
"""

import argparse
import hashlib
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.core import IMPORTED, texts
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.data import FILES, _value, kind_of, records
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.integrations.shared import label_of, text_of
from openrlhf_dbb.options import add_store
from openrlhf_dbb.terminal import shown

# The names in TRL's tables, verl's dumps, our own tables and others; the first that the log has
# is taken.
COLUMNS = {
    "prompt": ("prompt", "input", "question"),
    "label": ("label", "gts", "ground_truth", "answer", "solution"),
    "reward": ("score", "reward"),
    "step": ("step", "global_step"),
    "response": ("completion", "response", "output"),
    "advantage": ("advantage", "advantages"),
}
_NEEDED = ("prompt", "reward")
_NUMBER = re.compile(r"([^\W\d_]*)[\W_]*([0-9]+)")  # with the word in front of it
# Processes write files side by side: their numbers are no steps.
_PROCESSES = ("rank", "worker", "shard", "part", "process", "gpu", "node", "host")
_STEP = attrgetter("step")
_WORDS = {"true": 1.0, "false": 0.0}

Number = tuple[str, int]
"""A number in a file's name, behind the word in front of it."""

Columns = Mapping[str, str | None]
"""The column of each of ``COLUMNS``; None where the log has none."""


@dataclass(frozen=True)
class Row:
    """A row of a log as it is written."""

    file: Path
    place: str  # file and line, for messages
    fields: dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """A rollout of a log; reward and advantage are None where they are missing."""

    place: str
    step: int
    prompt: str
    label: str
    reward: float | None
    response: str
    advantage: float | None


def add_commands(add: Any) -> None:
    parser = add("import", import_log, opens_store=False)
    text = f"files ({', '.join(FILES)}), or folders"
    parser.add_argument("log", metavar="LOG", nargs="+", type=Path, help=text)
    parser.add_argument("--run_name", required=True, metavar="NAME", help="name of the new run")
    for name, columns in COLUMNS.items():
        text = f"column of the {name} (default: the first of {', '.join(columns)}); a.b is a field"
        parser.add_argument(f"--{name}_key", metavar="COLUMN", help=text)
    add_store(parser)


def import_log(arguments: argparse.Namespace) -> None:
    files = _files(arguments.log)
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise UsageError(f"{arguments.log[0]} has no rows; name a log of rollouts")
    columns = _columns(rows, arguments)
    of_names = _steps_of_names(files) if columns["step"] is None else {}
    _refuse_copies(files, of_names)
    rollouts = [_rollout(row, columns, of_names.get(row.file)) for row in rows]
    _refuse_other_labels(rollouts)
    _print_columns(columns)
    source = "the file names" if columns["step"] is None else f"column {columns['step']}"
    numbers = [rollout.step for rollout in rollouts]
    print(shown(f"steps from {source}: {min(numbers)} to {max(numbers)}", None))
    _store(arguments, columns, rollouts)


def _refuse_other_labels(rollouts: Sequence[Rollout]) -> None:
    """Raise UsageError if a prompt has two labels: its rollouts would be of two posteriors."""
    prompts = [rollout.prompt for rollout in rollouts]
    labels = [rollout.label for rollout in rollouts]
    bad = texts.contradictions(prompts, labels, [rollout.place for rollout in rollouts])
    if bad:
        raise UsageError(f"{texts.unusable(bad, len(rollouts))}, or give another --label_key")


def _print_columns(columns: Columns) -> None:
    taken = []
    missing = []
    for name, column in columns.items():
        if column is not None:
            taken.append(f"{name} from {column}")
        elif name != "step":
            missing.append(f"no {name}")
    print(shown(f"columns: {', '.join(taken + missing)}", None))


def _store(arguments: argparse.Namespace, columns: Columns, rollouts: list[Rollout]) -> None:
    """Make a finished run of the rollouts; no run is left if one is refused."""
    used = _used(rollouts)
    if not used:
        raise UsageError(f"{arguments.log[0]} has no rows with a reward; name a log of rollouts")
    has_advantages = _has_advantages(used)
    memory = "auto" if {rollout.reward for rollout in used} <= {0.0, 1.0, None} else "gaussian"
    log = list(map(str, arguments.log))
    try:
        with Posteriors.create(
            getattr(arguments, "store_url", None),
            arguments.run_name,
            [rollout.prompt for rollout in used],
            [rollout.label for rollout in used],
            estimator="point",
            parameters={"memory": memory},
            method=IMPORTED,
            dataset=", ".join(log),
            config={"import": {"log": log, "columns": dict(columns)}},
        ) as posteriors:
            _fill(posteriors, used, has_advantages)
    except ValueError as error:
        raise UsageError(f"the log cannot be imported: {error}") from error
    counted = f"{posteriors.step} steps, {len(posteriors.prompt_ids)} prompts, {len(used)} rollouts"
    advantages = "the log's own advantages" if has_advantages else "its advantages are not known"
    print(f"run {arguments.run_name!r}: {counted}, memory {memory}; {advantages}")
    _print_left_out(rollouts, used)


def _used(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the rollouts by step, without steps of which nothing was verified: these teach nothing."""
    rewarded = {rollout.step for rollout in rollouts if rollout.reward is not None}
    used = [rollout for rollout in rollouts if rollout.step in rewarded]
    return sorted(used, key=_STEP)  # the rollouts of a step stay in their order


def _fill(posteriors: Posteriors, rollouts: list[Rollout], has_advantages: bool) -> None:
    """Do the steps of the log and finish the run; delete it if one is refused."""
    try:
        for number, (step, group) in enumerate(groupby(rollouts, key=_STEP), 1):
            _observe(posteriors, number, list(group), has_advantages)
            # A log may have every tenth step only.
            posteriors.record_metrics(number, {"import/step": step})
        posteriors.finish()
    except BaseException:
        posteriors.store.delete_run(posteriors.run.record)
        raise


def _print_left_out(rollouts: list[Rollout], used: list[Rollout]) -> None:
    missing = [rollout.place for rollout in rollouts if rollout.reward is None]
    if missing:
        left_out = len(set(map(_STEP, rollouts)) - set(map(_STEP, used)))
        counted = f"{len(missing)} rows have no reward, first {missing[0]}"
        print(shown(f"{counted}; {left_out} steps left out", None))


def _observe(posteriors: Posteriors, number: int, group: list[Rollout], has_advantages: bool) -> None:
    advantages = None
    if has_advantages:  # a rollout without a reward may have none
        advantages = [rollout.advantage or 0.0 for rollout in group]
    posteriors.observe(
        number,
        [rollout.prompt for rollout in group],
        [rollout.label for rollout in group],
        np.array([rollout.reward for rollout in group], dtype=np.float64),  # None becomes NaN
        form=None,
        advantages=advantages,
        extras=StepExtras(responses=Responses([rollout.response for rollout in group])),
    )


def _has_advantages(rollouts: Sequence[Rollout]) -> bool:
    """Return whether the log has advantages; refuse one that has some."""
    if all(rollout.advantage is None for rollout in rollouts):
        return False
    for rollout in rollouts:
        if rollout.advantage is None and rollout.reward is not None:
            raise UsageError(
                f"{rollout.place} has a reward and no advantage, and other rows have one; "
                "give a column that all rows have as --advantage_key"
            )
    return True


# ---- files, and the steps in their names


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those of the folders by name; refuse one that is named twice."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}; name a log of rollouts or a folder of them")
        files += _files_in(path) if path.is_dir() else [path]
    seen = set()
    for file in files:
        if file.resolve() in seen:
            raise UsageError(f"{file} is named twice and would count twice; name each file once")
        seen.add(file.resolve())
    return files


def _is_log(file: Path) -> bool:
    return file.is_file() and kind_of(file) != ""


def _refuse_copies(files: Sequence[Path], step_of_name: Mapping[Path, int]) -> None:
    """Raise UsageError if two files of the same steps hold the same."""
    seen: dict[tuple[bytes, int | None], Path] = {}
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "blake2b").digest()
        first = seen.setdefault((digest, step_of_name.get(file)), file)
        if first != file and file.stat().st_size:
            raise UsageError(f"{file} is a copy of {first} and would count twice; name one of them")


def _files_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if _is_log(file))
    if files:
        return files
    inside = sorted({file.parent for file in folder.rglob("*") if _is_log(file)})
    advice = "name a log of rollouts"
    if inside:
        advice = f"its folder {inside[0].relative_to(folder)} does; name the files, or that folder"
    raise UsageError(f"folder {folder} itself holds no file of {', '.join(FILES)}; {advice}")


def _steps_of_names(files: Sequence[Path]) -> dict[Path, int]:
    """Return the step that the name of each file tells.

    Raises:
        UsageError: there is not one number that is the step.
    """
    folder = os.path.commonpath([file.absolute().parent for file in files])
    names = [str(file.absolute().relative_to(folder)) for file in files]
    column = None
    if len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        column = _column_of_step([_numbers(name) for name in names])
    if column is None:
        several = f"{names[0]} does"
        if len(files) > 1:
            several = f"{names[0]} .. {names[-1]} do"
        raise UsageError(
            f"no column has the step, and {several} not tell it by one number; "
            "give --step_key, or file names as step_1.jsonl"
        )
    return {file: step for file, (_, step) in zip(files, column, strict=True)}


def _numbers(name: str) -> list[Number]:
    return [(word.lower(), int(digits)) for word, digits in _NUMBER.findall(name)]


def _column_of_step(numbers: Sequence[Sequence[Number]]) -> Sequence[Number] | None:
    """Return that number of each name which is the step; None if that is not plain."""
    named = []
    varying = []
    for column in zip(*numbers, strict=True):
        word, _ = column[0]
        if word in _PROCESSES:
            continue
        if word in ("step", "steps"):
            named.append(column)
        if len(column) == 1 or len(set(column)) > 1:
            varying.append(column)
    if len(named) != 1:
        return varying[0] if len(varying) == 1 else None
    # Two files of one step are two processes' files, not for example two epochs'.
    is_plain = len(set(named[0])) == len(numbers) or set(varying) <= set(named)
    return named[0] if is_plain else None


# ---- rows


def _rows(file: Path) -> list[Row]:
    rows = records(file, str(file))
    table = next(iter(rows.values()), {})
    if table.keys() >= {"columns", "data"}:
        rows = _table_of_wandb(file, table)
    return [Row(file, f"{file}, {place}", fields) for place, fields in rows.items()]


def _table_of_wandb(file: Path, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    names = [str(name) for name in table["columns"]]
    rows = {}
    for number, values in enumerate(table["data"], 1):
        if len(values) != len(names):
            counts = f"{len(values)} values for {len(names)} columns"
            raise UsageError(f"{file}, row {number} has {counts}; write the table again")
        rows[f"row {number}"] = dict(zip(names, values, strict=True))
    return rows


def _columns(rows: Sequence[Row], arguments: argparse.Namespace) -> Columns:
    """Return the columns that are given, else the first known ones that some row has."""
    names = {name: None for row in rows for name in row.fields}  # in their order
    columns = {}
    for name, known in COLUMNS.items():
        given = getattr(arguments, f"{name}_key")
        wanted = known if given is None else (given,)
        columns[name] = _first_present(wanted, names, rows)
        if columns[name] is None and (given is not None or name in _NEEDED):
            raise UsageError(
                f"{rows[0].place} has no column {' or '.join(wanted)}, and no other row has; "
                f"give --{name}_key of {', '.join(names)}"
            )
    return columns


def _first_present(keys: Sequence[str], names: Collection[str], rows: Sequence[Row]) -> str | None:
    for key in keys:
        is_field = "." in key and any(_value(row.fields, key) is not None for row in rows)
        if key in names or is_field:
            return key
    return None


def _rollout(row: Row, columns: Columns, step_of_name: int | None) -> Rollout:
    """Return a row as a rollout; raise UsageError that names the row if a value is wrong."""
    values: dict[str, Any] = {}
    for name, column in columns.items():
        values[name] = None if column is None else _value(row.fields, column)
    reward_column = str(columns["reward"])
    if reward_column not in row.fields and reward_column.partition(".")[0] not in row.fields:
        problem = f"{row.place} has no column {reward_column}, and other rows have it"
        raise UsageError(f"{problem}; write null where there is no reward")
    step = _step(row, values["step"]) if step_of_name is None else step_of_name
    try:
        prompt = text_of(values["prompt"] or "")
        label = label_of(values["label"])
    except (TypeError, ValueError) as error:
        found = f"{columns['prompt']} {values['prompt']!r:.40}, label {values['label']!r:.40}"
        raise UsageError(f"{row.place}: {found} cannot be read: {error}") from None
    if not prompt.strip():
        raise UsageError(f"{row.place} has no prompt; drop the row")
    return Rollout(
        place=row.place,
        step=step,
        prompt=prompt,
        label=label,
        reward=_number(row, reward_column, values["reward"]),
        response=texts.response_text(values["response"]),
        advantage=_number(row, str(columns["advantage"]), values["advantage"]),
    )


def _step(row: Row, value: Any) -> int:
    is_word = str(value).strip().lower() in _WORDS
    number = None if is_word else _number(row, "step", value)
    if number is None or number < 0 or number != int(number):
        raise UsageError(f"{row.place}: step {value!r:.40} is not a whole number, 0 or more")
    return int(number)


def _number(row: Row, column: str, value: Any) -> float | None:
    """Return a finite number, 1 and 0 for true and false; None where it is missing or NaN."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    try:
        number = texts.number_of(value)
    except ValueError:
        advice = "write a number in the digits 0 to 9, such as 1000 or 0.5, or null where there is none"
        if isinstance(value, dict):
            advice = "name a field of it, as in --reward_key reward.correct"
        raise UsageError(f"{row.place}: {column} {value!r:.40} is not a number; {advice}") from None
    if math.isinf(number):
        advice = "write null where it is not known"
        raise UsageError(f"{row.place}: {column} {value!r:.40} is not finite; {advice}")
    return None if math.isnan(number) else number
