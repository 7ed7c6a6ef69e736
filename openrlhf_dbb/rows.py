"""Rows of the training data that cannot be used: which they are, and what is wrong with them.

JSON files are read here, line by line: a broken line has its number, and labels may be numbers and text. R rows.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.errors import UsageError

# Columns that are added to a data set: the number of a row's line in its JSON file, and what is wrong with the row,
# "KIND" or "KIND; EXPLANATION".
LINE, FAULT = "__line__", "__fault__"
FIRST = "the first: "  # begins an explanation that holds for one row alone
TRAINING, HELD_OUT = "data.prompt_dataset", "eval.dataset"  # flags that name data sets
_NUL = "with a NUL character; PostgreSQL does not store it"
_SHOWN = 5  # numbers of a kind


class BadRows:
    """The rows that cannot be used, by the kind of their fault.

    Args:
        numbers: (R,) what the rows are called.
        unit: what ``numbers`` are: "line" of a file, or "row" of the data set, both from 1.

    Attributes:
        rows: places of the bad ones, from 0.
    """

    def __init__(self, numbers: Sequence[int], unit: str) -> None:
        self._numbers, self._unit = numbers, unit
        self._kinds: dict[str, list[int]] = {}
        self._explained: dict[str, str] = {}
        self.rows: set[int] = set()

    def add(self, row: int, fault: str) -> None:
        """Note what is wrong with a row: "KIND" or "KIND; EXPLANATION", of which a kind's first one is shown."""
        kind, _, explanation = fault.partition("; ")
        self._kinds.setdefault(kind, []).append(row)
        self._explained.setdefault(kind, explanation)
        self.rows.add(row)

    def name(self, row: int) -> str:
        """Such as "line 4"."""
        return f"{self._unit} {self._numbers[row]}"

    def names(self, rows: Sequence[int]) -> str:
        """Such as "lines 4, 17"; the first of many."""
        numbers = ", ".join(str(self._numbers[row]) for row in rows[:_SHOWN])
        return f"{self._unit}{'s' * (len(rows) > 1)} {numbers}{', ...' * (len(rows) > _SHOWN)}"

    def error(self) -> str:
        """How many rows cannot be used, which, and why."""
        kinds = []
        for kind, rows in self._kinds.items():
            explained = self._explained[kind].removeprefix(FIRST if len(rows) == 1 else "")
            kinds.append(f"{len(rows)} {kind} ({'; '.join(filter(None, (self.names(rows), explained)))})")
        return f"{len(self.rows)} of {len(self._numbers)} rows cannot be used: {', '.join(kinds)}"

    def report(self) -> str:
        """That they have been dropped."""
        kinds = "; ".join(f"{len(rows)} {kind}: {self.names(rows)}" for kind, rows in self._kinds.items())
        return f"{len(self.rows)} bad row{'s' * (len(self.rows) > 1)} dropped ({kinds})"


def find(rows: Any, args: SimpleNamespace) -> BadRows:
    """The bad rows of a data set that has gone through :func:`checked`.

    Rows with the same prompt and different labels are among them, unless only the first of these is used.
    """
    one_file = "," not in args.data.prompt_dataset and LINE in rows.column_names
    lines: list[Any] = rows[LINE][:] if one_file else [None]
    bad = BadRows(range(1, len(rows) + 1), "row") if None in lines else BadRows(lines, "line")
    for row, fault in enumerate(rows[FAULT][:]):  # [:] as a column is slow to iterate over
        if fault is not None:
            bad.add(row, fault)
    if args.data.skip_bad_rows or not args.data.drop_duplicates:
        _add_contradictions(bad, rows[args.data.input_key][:], labels_of(rows, args))
    return bad


def labels_of(rows: Any, args: SimpleNamespace) -> list[Any]:
    """The label of each row; without ``--data.label_key`` an empty one, as OpenRLHF has it."""
    key = args.data.label_key
    return [""] * len(rows) if key is None else list(rows[key][:])


def _add_contradictions(bad: BadRows, prompts: Sequence[Any], labels: Sequence[str]) -> None:
    first: dict[str, tuple[int, str]] = {}
    keys: dict[int, str] = {}
    contradicted: dict[str, str] = {}
    for row, (prompt, label) in enumerate(zip(prompts, labels, strict=True)):
        if row in bad.rows:
            continue
        key = keys[row] = prompt_key(prompt)
        earlier, other = first.setdefault(key, (row, label.strip()))
        if other != label.strip() and key not in contradicted:
            contradicted[key] = f"{bad.name(earlier)} has {other!r}, {bad.name(row)} {label.strip()!r}"
    for row, key in keys.items():
        if key in contradicted:
            bad.add(row, f"with the same prompt and different labels; {contradicted[key]}")


def prompt_key(prompt: str | list[dict[str, Any]]) -> str:
    """The same for the same text or messages."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def checked(rows: Any, args: SimpleNamespace) -> Any:
    """``rows`` with column ``FAULT``, and labels that are text; None where there is a fault."""
    from datasets import Value

    prompt_column, label_column = args.data.input_key, args.data.label_key
    known = rows[FAULT][:] if FAULT in rows.column_names else [None] * len(rows)
    prompts, labels = rows[prompt_column][:], labels_of(rows, args)
    faults = [
        fault or prompt_fault(prompt) or (None if label_column is None else label_fault(label))
        for fault, prompt, label in zip(known, prompts, labels, strict=True)
    ]
    added = {FAULT: faults}
    if label_column is not None and rows.features[label_column] != Value("string"):
        texts = zip(labels, faults, strict=True)
        added[label_column] = [None if fault else label_text(label) for label, fault in texts]
    rows = rows.remove_columns([name for name in added if name in rows.column_names])
    for name, values in added.items():
        rows = rows.add_column(name, values, feature=Value("string"))
    return rows


def prompt_fault(prompt: Any) -> str | None:
    """What is wrong with a prompt, which is text or a list of messages for a chat template."""
    if prompt is None:
        return "without a prompt"
    if isinstance(prompt, str):
        return _NUL if "\0" in prompt else None if prompt.strip() else "with an empty prompt"
    if not isinstance(prompt, list):
        return "with a prompt that is neither text nor messages"
    if not prompt:
        return "with an empty prompt"
    return None if all(map(_is_message, prompt)) else "with a prompt that is not a list of {role, content} messages"


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), (str, list))
    )


def label_fault(label: Any) -> str | None:
    """What is wrong with a label."""
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return "without a label"
    if isinstance(label, str):
        return _NUL if "\0" in label else None if label.strip() else "without a label"
    if isinstance(label, bool):
        return "whose label is true or false; write it as text"
    if isinstance(label, list):
        return "whose label is a list; name one answer"
    if isinstance(label, dict):
        return "whose label is an object; name a field of it, as in --data.label_key label.answer"
    if not isinstance(label, (int, float, decimal.Decimal, datetime.date, datetime.time)):
        return f"whose label is {type(label).__name__}; write it as text"
    return None


def label_text(label: Any) -> str:
    """A label as text; a whole number without ".0", as a column of integers that misses some is one of floats."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def read_json(path: Path, args: SimpleNamespace, flag: str = TRAINING) -> Any:
    """A JSON file as a data set of the columns that OpenRLHF reads, with ``LINE`` and ``FAULT``.

    Each line that is not blank is a row; or the file is one list of rows, which then have no lines.

    Args:
        flag: what errors call the file by.

    Raises:
        UsageError: a column is in none of the rows, or the list is broken.
    """
    from datasets import Dataset

    data = args.data
    lines, records, faults = [], [], []
    for line, record, fault in _records(path, flag):
        lines.append(line)
        records.append(record)
        faults.append(fault)
    prompts = _column("data.input_key", data.input_key, records)
    key = data.label_key
    labels = None if key is None else _column("data.label_key", key, records)
    for row, prompt in enumerate(prompts):
        faults[row] = faults[row] or prompt_fault(prompt) or (label_fault(labels[row]) if labels else None)
    rarer = _rarer_kind(prompts, faults)
    faults = [fault or rarer.get(type(prompt)) for prompt, fault in zip(prompts, faults, strict=True)]
    prompts = [None if fault else prompt for prompt, fault in zip(prompts, faults, strict=True)]
    columns = {data.input_key: prompts, LINE: lines, FAULT: faults}
    if labels is not None:
        columns[key] = [None if fault else label_text(each) for each, fault in zip(labels, faults, strict=True)]
    for name in (data.image_key, "datasource"):
        if any(name in (record or ()) for record in records):
            columns[name] = [(record or {}).get(name) for record in records]
    for name, values in columns.items():
        misfit = _first_misfit(values)
        if misfit is not None:
            where = f"line {lines[misfit]}" if lines[misfit] else f"row {misfit + 1}"
            raise UsageError(
                f"--{flag} {path}: {where}: {name!r} has another type than in the rows before; give all rows the same"
            )
    return Dataset.from_dict(columns)


def _rarer_kind(prompts: Sequence[Any], faults: Sequence[str | None]) -> dict[type, str]:
    """The fault of text among messages, or of messages among text: one column cannot hold both."""
    kinds = [type(prompt) for prompt, fault in zip(prompts, faults, strict=True) if not fault]
    texts, lists = kinds.count(str), kinds.count(list)
    if texts < lists:
        return {str: "with text as prompt, where most have messages"}
    return {list: "with messages as prompt, where most have text"} if texts else {}


def _records(path: Path, flag: str) -> Iterator[tuple[int | None, dict[str, Any] | None, str | None]]:
    """Line, row and fault of each."""
    with path.open("rb") as file:
        start = file.read(1 << 16)
        file.seek(0)
        if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            try:
                rows = json.loads(file.read().decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UsageError(f"--{flag} {path} is one JSON list, which is broken: {error}") from error
            for row in rows:
                is_row = isinstance(row, dict)
                yield None, row if is_row else None, None if is_row else "of JSON that is no object"
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, *_record(line)


def _record(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        text = line.decode("utf-8-sig").rstrip()
        row = json.loads(text)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except json.JSONDecodeError as error:
        return None, f"of broken JSON; {FIRST}{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, f"of broken JSON; {FIRST}{error}"
    return (row, None) if isinstance(row, dict) else (None, "of JSON that is no object")


def _column(flag: str, key: str, records: Sequence[dict[str, Any] | None]) -> list[Any]:
    found = [(False, None) if record is None else _value(record, key) for record in records]
    there = [record for record in records if record is not None]
    if there and not any(has for has, _ in found):
        raise no_column(flag, key, dict.fromkeys(name for record in there for name in record))
    return [value for _, value in found]


def no_column(flag: str, key: str, columns: Iterable[str]) -> UsageError:
    """The error for a column that is not in a data set."""
    return UsageError(f"--{flag} {key!r} is not a column of the data set; it has {', '.join(columns)}")


def _value(record: Any, key: str) -> tuple[bool, Any]:
    """Whether a row has a column, at the top or by dots below it, and what it holds."""
    if key in record:
        return True, record[key]
    for field in key.split("."):
        if not isinstance(record, dict) or field not in record:
            return False, None
        record = record[field]
    return True, record


def _first_misfit(values: list[Any]) -> int | None:
    """The first row whose value cannot be in one column with those before; None if all can."""
    if _fit(values):
        return None
    fitting, misfit = 0, len(values)  # numbers of first rows that do and do not
    while misfit - fitting > 1:
        middle = (fitting + misfit) // 2
        fitting, misfit = (middle, misfit) if _fit(values[:middle]) else (fitting, middle)
    return misfit - 1


def _fit(values: list[Any]) -> bool:
    import pyarrow as pa

    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError):
        return False
    return True
