"""The command export: a run's history with prompts and labels as CSV, JSON lines or Parquet; streamed."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect.runs import RUN_HELP, chosen
from storage import PosteriorStore
from storage.log import HISTORY_COLUMNS, history_with_texts

Parts = Iterable[Sequence[Sequence[Any]]]


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.posteriors``."""
    parser = add("export", export, "a run's history with prompts and labels, as a table for other programs")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--format", choices=("csv", "jsonl", "parquet"), default="csv", help="default: csv")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: standard output")


def export(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    path: Path | None = arguments.output
    if arguments.format == "parquet":
        _check_pyarrow()
    if path is None:
        if arguments.format == "parquet":
            raise UsageError("Parquet is written to a file; name one with -o FILE")
        if sys.stdout.isatty():
            raise UsageError("prompts may hold control characters; name a file with -o FILE, or write to a pipe")
        with closing(history_with_texts(store, run)) as parts:
            _TEXT_FORMATS[arguments.format](sys.stdout, parts)
        return
    part = path.with_name(path.name + ".part")
    try:
        with closing(history_with_texts(store, run)) as parts:
            if arguments.format == "parquet":
                _write_parquet(part, parts)
            else:
                with open(part, "w", encoding="utf-8", newline="") as file:
                    _TEXT_FORMATS[arguments.format](file, parts)
        os.replace(part, path)  # a file of this name is always whole
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file that can be written") from None
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {path}", file=sys.stderr)


def _write_csv(file: TextIO, parts: Parts) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HISTORY_COLUMNS)
    for rows in parts:
        writer.writerows(rows)


def _write_jsonl(file: TextIO, parts: Parts) -> None:
    for rows in parts:
        for row in rows:
            file.write(json.dumps(dict(zip(HISTORY_COLUMNS, row, strict=True))) + "\n")


_TEXT_FORMATS: dict[str, Callable[[TextIO, Parts], None]] = {"csv": _write_csv, "jsonl": _write_jsonl}


def _check_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UsageError("Parquet needs pyarrow: pip install pyarrow, or choose --format csv or jsonl") from None


def _write_parquet(path: Path, parts: Parts) -> None:
    import pyarrow
    from pyarrow import parquet

    whole, text = ("step", "prompt_id", "rollouts"), ("prompt", "label")
    types = {name: pyarrow.int64() for name in whole} | {name: pyarrow.string() for name in text}
    layout = pyarrow.schema([(name, types.get(name, pyarrow.float64())) for name in HISTORY_COLUMNS])
    with parquet.ParquetWriter(path, layout) as writer:
        for rows in parts:
            columns = [list(column) for column in zip(*rows, strict=True)]
            writer.write_table(pyarrow.table(columns, schema=layout))
