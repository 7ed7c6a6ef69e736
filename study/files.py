"""The study's CSV files: read, written whole, added to. Floats have 6 significant digits; NaN is an empty field."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.figures import write_csv
from study.data import (
    EVERY_ARM,
    ControlRow,
    EpochRow,
    ErrorRow,
    GradientRow,
    MaskedRow,
    PointRow,
    PriorRow,
    RunRow,
    Study,
    is_pilot,
)

_Row = TypeVar("_Row", bound=NamedTuple)


def load(folder: Path) -> Study:
    """Read those of the study's CSV files that exist.

    Raises:
        UsageError: none of the first four exists, a column is missing, a field is not a number, an arm is unknown, or
            an experiment has a seed of an arm twice.
    """
    main = [f"{name}.csv" for name in ("runs", "epochs", "gradients", "mse")]
    if not any((folder / name).exists() for name in main):
        raise UsageError(f"{folder}: none of {', '.join(main)} exists; collect the study first")
    study = Study(
        runs=read(folder / "runs.csv", RunRow),
        epochs=read(folder / "epochs.csv", EpochRow),
        gradients=read(folder / "gradients.csv", GradientRow),
        mse=read(folder / "mse.csv", ErrorRow),
        priors=read(folder / "priors.csv", PriorRow),
        control=read(folder / "control.csv", ControlRow),
        masked=read(folder / "masked.csv", MaskedRow),
        points=read(folder / "points.csv", PointRow),
    )
    named = [(run.run, run.arm) for run in study.runs] + [(epoch.run, epoch.arm) for epoch in study.epochs]
    for run, arm in named:
        if arm not in EVERY_ARM:
            raise UsageError(f"{folder}: run {run} has the unknown arm {arm!r}; arms are {', '.join(EVERY_ARM)}")
    seeds = Counter(
        (run.experiment, run.arm, run.seed, run.learning_rate if is_pilot(run) else 0) for run in study.runs
    )
    for (experiment, arm, seed, _), times in seeds.items():
        if times > 1:
            raise UsageError(f"{folder}/runs.csv: {experiment} has seed {seed} of {arm} {times} times; keep one")
    return study


def read(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """The rows of a file; none if it does not exist.

    Raises:
        UsageError: a column is missing, or a field is not a number.
    """
    if not path.exists():
        return ()
    types = get_type_hints(kind)
    header, rows = _texts(path)
    missing = [name for name in kind._fields if name not in header]
    if missing:
        raise UsageError(f"{path}: no column {', '.join(missing)}; collect the study again")
    return tuple(kind._make(_value(path, types[name], name, row[name]) for name in kind._fields) for row in rows)


def read_texts(path: Path, header: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a file as text; none if it does not exist.

    Raises:
        UsageError: it has other columns than ``header``.
    """
    if not path.exists():
        return []
    found, rows = _texts(path)
    if found != list(header):
        raise UsageError(f"{path} has other columns than this version writes; move it away")
    return rows


def write(path: Path, header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows, their missing columns empty; the file appears complete or not at all."""
    part = path.with_name(f"{path.name}.part")
    write_csv(part, header, ([_text(row.get(column)) for column in header] for row in rows))
    os.replace(part, path)


def append(path: Path, rows: Sequence[_Row]) -> None:
    """Add rows of one kind, at least one, to a file, which is created if it does not exist."""
    header: tuple[str, ...] = rows[0]._fields
    write(path, header, [*read_texts(path, header), *(row._asdict() for row in rows)])


def merge(source: Path, into: Path, key: Sequence[str]) -> None:
    """Add the rows of one CSV file to another, replacing rows that have the same values in the ``key`` columns.

    Raises:
        UsageError: the two have different columns.
    """
    if not source.exists():
        return
    header, rows = _texts(source)
    here = {tuple(row[name] for name in key) for row in rows}
    kept = [row for row in read_texts(into, header) if tuple(row[name] for name in key) not in here]
    write(into, header, [*kept, *rows])
    print(f"{into}: {len(kept) + len(rows)} rows")


def _texts(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return list(reader.fieldnames or []), rows


def _text(value: Any) -> Any:
    if not isinstance(value, float):
        return "" if value is None else value
    return "" if math.isnan(value) else f"{value:.6g}"


def _value(path: Path, kind: type, name: str, text: str) -> Any:
    if kind is float and text == "":
        return math.nan
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{path}: {name} is {text!r}, not a number; collect the study again") from None
