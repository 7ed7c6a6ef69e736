"""Reads data sets: files, folders, data sets of the hub, tasks; refuses rows that are no use."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from openrlhf_dbb import tasks, upstream
from openrlhf_dbb.core.prompt_columns import decoded, pass_rate, value_at
from openrlhf_dbb.core.texts import (
    content_text,
    in_type,
    is_missing,
    label_text,
    prompt_text,
    unusable,
)
from openrlhf_dbb.errors import UsageError

RATE = "known pass rate"  # columns that are added to the training data
SOURCE = "source of the prompt"
TEXT_FILES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
FILES = (*TEXT_FILES, ".parquet")  # suffixes of the files that records() reads
_OTHERS = (".py", ".arrow")  # suffixes of the files that OpenRLHF reads
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
_PACKED = {b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip"}
_PACKINGS = (".gz", ".bz2", ".xz")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Between columns, though the name of the file tells another separator.
_SEPARATORS = {
    "\t": "name the file .tsv",
    ";": "save it with commas between the columns",
    "|": "save it with commas between the columns",
    ",": "name the file .csv",
}
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins with the mark of UTF-16
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True)
class _Table:
    places: list[str]  # of the rows, for messages
    records: list[dict[str, Any]]  # the rows, with the columns that are asked for
    names: set[str]  # of all columns
    rows: Any = None  # the whole ``datasets.Dataset``; None for a text file


def read(
    name: str,
    source: str,
    keys: Mapping[str, str],
    args: SimpleNamespace,
    backend: Any,
    split: str,
) -> Any:
    """Return one data set, a ``datasets.Dataset``: prompts, and labels, rates and sources as texts.

    Args:
        name: a file, a folder, a data set of the hub, or a task.
        source: the flag and the name, for messages.
        keys: the columns to read, by the last part of their flag, such as "label_key".
        backend: OpenRLHF's DeepSpeed strategy, or what its loader takes for one.
        split: of a folder or a data set of the hub.

    Raises:
        UsageError: the data set cannot be read, lacks a column, or has a row that cannot be used.
    """
    from datasets import Dataset

    data = args.data
    if tasks.is_spec(name):
        return Dataset.from_list(_problems(name, source, data, keys))
    is_ours = kind_of(Path(name)) != "" and Path(name).suffix != ".parquet"
    if is_ours or ("," in name and os.path.isfile(name)):
        table = _from_file(name, source, data.max_samples)
    else:
        table = _from_dataset(name, source, keys, args, backend, split)
    columns = _checked(table, _columns(table, keys, source), data, source)
    if table.rows is None:
        for extra in sorted(table.names & {data.image_key, "datasource"}):
            columns[extra] = [record.get(extra) for record in table.records]
        return Dataset.from_dict(columns)
    rows = table.rows
    for key, column in columns.items():
        rows = rows.remove_columns(table.names & {key}).add_column(key, column)
    return rows


def _problems(
    name: str,
    source: str,
    data: SimpleNamespace,
    keys: Mapping[str, str],
) -> list[dict[str, str]]:
    """Return the rows of a task."""
    if "pass_rate_key" in keys:
        raise UsageError(
            f"{source}: a program makes it, without pass rates; leave --data.pass_rate_key out"
        )
    rows = []
    for made in tasks.problems(name, data.task_instruction):
        row = {data.input_key: made["prompt"], data.label_key: made["label"]}
        if "group_key" in keys:
            row[SOURCE] = name.partition("?")[0]
        rows.append(row)
    return rows


def _from_file(name: str, source: str, most: int) -> _Table:
    rows = records(Path(name), source, most)
    names: set[str] = set()
    for record in rows.values():
        names.update(record)
    return _Table(list(rows), list(rows.values()), names)


def _from_dataset(
    name: str,
    source: str,
    keys: Mapping[str, str],
    args: SimpleNamespace,
    backend: Any,
    split: str,
) -> _Table:
    """Read Parquet files, folders and data sets of the hub as OpenRLHF does."""
    if "," in name:
        raise UsageError(f"{source}: a comma parts data sets; rename the folder")
    if os.path.isfile(name):
        _check_file(name, source)
    blend = upstream.load("openrlhf.datasets.utils", "blending_datasets")
    rows = blend(
        name,
        None,
        backend,
        args.train.seed,
        max_count=args.data.max_samples,
        dataset_split=split,
    )
    names = set(rows.column_names)
    needed = set(keys.values())
    needed.update(key.partition(".")[0] for key in keys.values())
    places = [f"row {number}" for number in range(1, len(rows) + 1)]
    table = rows.select_columns(sorted(names & needed)).with_format("arrow")[:]
    return _Table(places, _table_rows(table), names, rows)


def _check_file(name: str, source: str) -> None:
    """Raise UsageError for a file of which datasets would not say what is wrong with it."""
    suffix = Path(name).suffix
    if suffix in _OTHERS:
        return
    if suffix != ".parquet":
        readable = ", ".join(FILES)
        raise UsageError(
            f"{source}: files of this kind are not read; give {readable}, or .jsonl.gz"
        )
    from pyarrow import parquet

    try:
        rows = parquet.read_metadata(name).num_rows
        _refuse_repeated(parquet.read_schema(name).names)
    except ValueError as error:
        raise UsageError(f"{source} cannot be read: {error}") from error
    if rows == 0:
        raise UsageError(f"{source} has no rows")


def _table_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a ``pyarrow.Table``; 0.1 in 32 bits is 0.1, not 0.10000000149011612."""
    import pyarrow

    kinds = {pyarrow.float32(): "float32", pyarrow.float16(): "float16"}
    short = {column.name: kinds[column.type] for column in table.schema if column.type in kinds}
    rows: list[dict[str, Any]] = table.to_pylist()
    for name, kind in short.items():
        for row in rows:
            if row[name] is not None:
                row[name] = float(str(in_type(row[name], kind)))
    return rows


def _columns(table: _Table, keys: Mapping[str, str], source: str) -> dict[str, list[Any]]:
    """Return the values of the columns by their keys; refuse a column that is not there."""
    columns = {}
    for flag, key in keys.items():
        values = [decoded(value_at(record, key)) for record in table.records]
        columns[key] = values
        if not table.names or any(value is not None for value in values):
            continue
        column = f"column {key!r} (--data.{flag})"
        if key in table.names:
            raise UsageError(f"{source}: {column} is empty; name another one, or fill it")
        there = listed_names(sorted(table.names))
        raise UsageError(f"{source} has no {column}; it has {there}")
    return columns


def _checked(
    table: _Table,
    columns: Mapping[str, list[Any]],
    data: SimpleNamespace,
    source: str,
) -> dict[str, list[Any]]:
    """Return the columns as a training reads them; refuse rows that it cannot use."""
    prompts = [_plain_prompt(prompt) for prompt in columns[data.input_key]]
    labels = ["-"] * len(prompts)
    if data.label_key is not None:
        labels = columns[data.label_key]
    bad = _faults(table.places, prompts, labels)
    checked: dict[str, list[Any]] = {}
    if data.group_key in columns:
        checked[SOURCE] = [str(value) for value in columns[data.group_key]]
    if data.pass_rate_key in columns:
        checked[RATE] = []
        for place, value in zip(table.places, columns[data.pass_rate_key], strict=True):
            rate = pass_rate(value, data.pass_rate_attempts, "--data.pass_rate_attempts")
            if isinstance(rate, str):
                bad[place] = rate
            checked[RATE].append(rate)
    refuse(bad, len(table.places), source)
    checked[data.input_key] = prompts
    if data.label_key is not None:
        checked[data.label_key] = list(map(label_text, labels))
    return checked


def _faults(places: list[str], prompts: list[Any], labels: list[Any]) -> dict[str, str]:
    """Return the places of the rows that cannot be used, and why."""
    kind = None
    bad = {}
    for place, prompt, label in zip(places, prompts, labels, strict=True):
        fault = _prompt_fault(prompt, kind) or label_fault(label)
        if fault:
            bad[place] = fault
        if kind is None and prompt and isinstance(prompt, (str, list)):
            kind = type(prompt)
    return bad


def _plain_prompt(prompt: Any) -> Any:
    """Return a prompt as the chat template takes it: text parts of a message become one text."""
    if not isinstance(prompt, list):
        return prompt
    messages = []
    for message in prompt:
        if isinstance(message, dict) and "content" in message:
            message = {**message, "content": content_text(message["content"])}
        messages.append(message)
    return messages


def _prompt_fault(prompt: Any, kind: type | None) -> str | None:
    """Return why a prompt cannot be used; ``kind``: all are texts, or all are messages."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        return "no prompt"
    if isinstance(prompt, (bytes, bytearray)):
        try:
            prompt = prompt_text(prompt)
        except ValueError as error:
            return str(error)
    if not isinstance(prompt, (str, list)) or not isinstance(prompt, kind or object):
        found = type(prompt).__name__
        return f"its prompt is a {found}; all have to be texts, or all lists of messages"
    return None if isinstance(prompt, str) else _messages_fault(prompt)


def _messages_fault(messages: list[Any]) -> str | None:
    """Return why a model cannot answer messages."""
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            return (
                f"its message {number} has no texts as role and content "
                "(an image is <image> in the text)"
            )
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        return f"its last message is of role {last}; end with the user's"
    if not messages[-1]["content"].strip():
        return "its last message is empty"
    return None


def label_fault(label: Any) -> str | None:
    """Return why no verifier can use a label, which is a text or a number; None if it can."""
    if is_missing(label) or not str(label).strip():
        return "no label"
    if isinstance(label, (bool, list, dict)):
        kind = type(label).__name__
        return f"its label is a {kind}; write it as text, or name a field of it, as in label.answer"
    if isinstance(label, (float, Decimal)) and math.isinf(label):
        return "its label is infinite, perhaps too large for its column; write it as text"
    try:
        label_text(label)
    except ValueError as error:
        return str(error)
    return None


def refuse(bad: Mapping[str, str], total: int, source: str) -> None:
    """Refuse a data set with bad rows: their reasons by place.

    Raises:
        UsageError: there are some.
    """
    if bad:
        raise UsageError(f"{source}: {unusable(bad, total)}")


def kind_of(path: Path) -> str:
    """Return the suffix of a data file, one of ``FILES``; "" for a file that is none.

    Example:
        >>> kind_of(Path("a/B.JSONL.gz")), kind_of(Path("a.csv")), kind_of(Path("notes.txt"))
        ('.jsonl', '.csv', '')
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKINGS:
        suffixes.pop()
    if suffixes and suffixes[-1] in FILES:
        return suffixes[-1]
    return ""


def records(path: Path, source: str, most: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by place ("line 4"); numbers of a text file as they are written.

    A text file may be packed by gzip, bzip2 or xz. A file of another kind is read like JSON.

    Args:
        source: what names the file in messages.
        most: the number of rows, from the first one; None: all.

    Raises:
        UsageError: the file or a row is broken, or is not UTF-8; the message names ``source``.
    """
    try:
        rows = _rows(path, most)
    except (
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        ValueError,
        csv.Error,
        RecursionError,
    ) as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which source names
        line = " ".join(str(reason).split())
        raise UsageError(f"{source} cannot be read: {line}") from error
    fault = "it is no JSON object, or has more fields than the header"
    odd = {place: fault for place, row in rows.items() if not isinstance(row, dict) or None in row}
    refuse(odd, len(rows), source)
    return rows


def _rows(path: Path, most: int | None) -> dict[str, Any]:
    kind = kind_of(path)
    if kind == ".parquet":
        from pyarrow import parquet

        _refuse_repeated(parquet.read_schema(path).names)
        return _numbered(_table_rows(parquet.read_table(path)), most)
    text = _text(path)
    if kind in _DELIMITERS:
        return _numbered(_csv_rows(text, _DELIMITERS[kind]), most)
    return _json_rows(text, most)


def unpacked(path: Path) -> BinaryIO:
    """Open a file for reading what is packed in it by gzip, bzip2 or xz; another file as it is.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        content = file.read(max(map(len, _OPENERS)))
    for start, opener in _OPENERS.items():
        if content.startswith(start):
            opened: BinaryIO = opener(path, "rb")
            return opened
    return path.open("rb")


def _text(path: Path) -> str:
    """Return the text of a file in UTF-8, perhaps packed by gzip, bzip2 or xz; ValueError for another one."""
    with unpacked(path) as file:
        content = file.read()
    for start, name in _PACKED.items():
        if content.startswith(start):
            raise ValueError(f"it is packed by {name}; unpack it, or pack it by gzip, bzip2 or xz")
    for mark, encoding in _ENCODINGS.items():
        if content.startswith(mark):
            raise ValueError(f"it is in {encoding}; convert it: iconv -f {encoding} -t UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{error}; convert it to UTF-8") from error


def _numbered(rows: Iterable[Any], most: int | None) -> dict[str, Any]:
    return {f"row {number}": row for number, row in enumerate(islice(rows, most), 1)}


def _csv_rows(text: str, delimiter: str) -> Iterable[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # by default a field may have 131,072 characters
    header = text.partition("\n")[0]
    for other, advice in _SEPARATORS.items():
        if delimiter not in header and other in header:
            raise ValueError(f"its header has no {delimiter!r}, but {other!r}; {advice}")
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    _refuse_repeated([name for name in rows.fieldnames or [] if name])
    return rows


def _refuse_repeated(names: Sequence[str]) -> None:
    """Raise ValueError if a column or key is there twice; one would hide the other."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice; rename or drop one")


def _row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([key for key, _ in pairs])
    return dict(pairs)


def _json_rows(text: str, most: int | None) -> dict[str, Any]:
    """Return the entries of one list, or the values of lines, with numbers as they are written."""
    # 2.50 and 1e-5 are answers as they stand, and 23 digits are too many for a column of numbers.
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, object_pairs_hook=_row)
    if text.lstrip().startswith("["):
        return _numbered(decoder.decode(text), most)
    rows: dict[str, Any] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if len(rows) == most:
            break
        if not line.strip():
            continue
        try:
            rows[f"line {number}"] = decoder.decode(line)
        except ValueError as error:
            raise ValueError(f"line {number}: broken JSON: {error}") from error
    return rows


def listed_names(names: Iterable[str]) -> str:
    """Return names of columns for a message; an empty one, or one with blanks around, is quoted."""
    shown = []
    for name in names:
        is_plain = name and name == name.strip()
        shown.append(name if is_plain else repr(name))
    return ", ".join(shown)
