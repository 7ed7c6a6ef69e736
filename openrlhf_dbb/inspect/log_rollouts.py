"""The rollouts of a log: its rows, and the columns that are taken."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.core import texts
from openrlhf_dbb.core.prompt_columns import value_at
from openrlhf_dbb.data.files import records
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect.log_files import refuse_copies, steps_of_names

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
_WORDS = {"true": 1.0, "false": 0.0}

Columns = Mapping[str, str | None]
"""The column of each of ``COLUMNS``; None where the log has none."""

Fields = dict[str, Any]
"""A row as it is written."""


@dataclass(frozen=True)
class Row:
    """A row of a log."""

    file: Path
    place: str  # file and line, for messages
    fields: Fields


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


@dataclass(frozen=True)
class Log:
    """A log of rollouts."""

    columns: Columns
    rollouts: list[Rollout]  # in the order of files and rows


def read_log(files: Sequence[Path], keys: Columns) -> Log:
    """Read the rollouts of a log.

    Args:
        keys: the columns that are asked for; None: the first known one that some row has.

    Raises:
        UsageError: a file, a column or a value cannot be used, or a prompt has two labels.
    """
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise UsageError(f"{files[0]} has no rows; name a log of rollouts")
    columns = _columns(rows, keys)
    step_of_name = steps_of_names(files) if columns["step"] is None else {}
    refuse_copies(files, step_of_name)
    rollouts = [_rollout(row, columns, step_of_name.get(row.file)) for row in rows]
    # The rollouts of a prompt with two labels would be of two posteriors.
    bad = texts.contradictions(
        [rollout.prompt for rollout in rollouts],
        [rollout.label for rollout in rollouts],
        [rollout.place for rollout in rollouts],
    )
    if bad:
        raise UsageError(f"{texts.unusable(bad, len(rollouts))}, or give another --label_key")
    return Log(columns, rollouts)


def _rows(file: Path) -> list[Row]:
    rows = records(file, str(file))
    table = next(iter(rows.values()), {})
    if table.keys() >= {"columns", "data"}:
        rows = _table_of_wandb(file, table)
    return [Row(file, f"{file}, {place}", fields) for place, fields in rows.items()]


def _table_of_wandb(file: Path, table: Fields) -> dict[str, Fields]:
    names = [str(name) for name in table["columns"]]
    rows = {}
    for number, values in enumerate(table["data"], 1):
        if len(values) != len(names):
            raise UsageError(
                f"{file}, row {number} has {len(values)} values for {len(names)} columns; "
                "write the table again"
            )
        rows[f"row {number}"] = dict(zip(names, values, strict=True))
    return rows


def _columns(rows: Sequence[Row], keys: Columns) -> Columns:
    """Return the columns that are given, else the first known ones that some row has."""
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    columns = {}
    for name, usual in COLUMNS.items():
        key = keys[name]
        wanted = usual if key is None else (key,)
        columns[name] = _first_present(wanted, names, rows)
        if columns[name] is None and (key is not None or name in _NEEDED):
            raise UsageError(
                f"{rows[0].place} has no column {' or '.join(wanted)}, and no other row has; "
                f"give --{name}_key of {', '.join(names)}"
            )
    return columns


def _first_present(keys: Sequence[str], names: Collection[str], rows: Sequence[Row]) -> str | None:
    for key in keys:
        is_field = "." in key and any(value_at(row.fields, key) is not None for row in rows)
        if key in names or is_field:
            return key
    return None


def _rollout(row: Row, columns: Columns, step_of_name: int | None) -> Rollout:
    """Return a row as a rollout; raise UsageError that names the row if a value is wrong."""
    values = {
        name: None if column is None else value_at(row.fields, column)
        for name, column in columns.items()
    }
    reward_column = str(columns["reward"])
    if reward_column not in row.fields and reward_column.partition(".")[0] not in row.fields:
        raise UsageError(
            f"{row.place} has no column {reward_column}, and other rows have it; "
            "write null where there is no reward"
        )
    try:
        prompt = texts.prompt_text(values["prompt"] or "")
        label = texts.label_text(values["label"])
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{row.place}: {columns['prompt']} {values['prompt']!r:.40}, "
            f"label {values['label']!r:.40} cannot be read: {error}"
        ) from None
    if not prompt.strip():
        raise UsageError(f"{row.place} has no prompt; drop the row")
    return Rollout(
        place=row.place,
        step=_step(row, values["step"]) if step_of_name is None else step_of_name,
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
    cell = f"{row.place}: {column} {value!r:.40}"
    try:
        number = texts.number_of(value)
    except ValueError:
        advice = (
            "write a number in the digits 0 to 9, such as 1000 or 0.5, or null where there is none"
        )
        if isinstance(value, dict):
            advice = "name a field of it, as in --reward_key reward.correct"
        raise UsageError(f"{cell} is not a number; {advice}") from None
    if math.isinf(number):
        raise UsageError(f"{cell} is not finite; write null where it is not known")
    return None if math.isnan(number) else number
