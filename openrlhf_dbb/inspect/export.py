"""The command export: a run's history, kept rollouts, where they went, or groups, as CSV, JSON lines or Parquet."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from openrlhf_dbb.csv_files import write_rows
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.options import add_run, chosen
from storage import PosteriorStore, RunRecord, read_usage
from storage.log import (
    GROUP_COLUMNS,
    HISTORY_COLUMNS,
    ROLLOUT_COLUMNS,
    history_with_texts,
    ledger,
    rollouts_with_texts,
)
from storage.usage import COUNTS

Rows = Sequence[Sequence[Any]]
Parts = Iterable[Rows]


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("export", export)
    add_run(parser)
    parser.add_argument(
        "--what",
        choices=tuple(_TABLES),
        default="history",
        help="visits with posterior, prompt and label (default); kept rollouts with their texts; where the rollouts "
        "of each step and prompt went; or the groups that asynchronous training asked for",
    )
    parser.add_argument("--format", choices=("csv", "jsonl", "parquet"), default="csv", help="default: csv")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("-"), help="default: -, standard output"
    )


def export(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    path: Path = arguments.output
    columns, read = _TABLES[arguments.what]
    if arguments.format == "parquet":
        _check_pyarrow()
    if str(path) == "-":
        if arguments.format == "parquet":
            raise UsageError("Parquet is written to a file, not to standard output; name one with -o FILE")
        if sys.stdout.isatty() and "prompt" in columns:
            raise UsageError("prompts may hold control characters; name a file with -o FILE, or write to a pipe")
        with closing(read(store, run)) as parts:
            _TEXT_FORMATS[arguments.format](sys.stdout, columns, parts)
        return
    part = path.with_name(path.name + ".part")
    try:
        with closing(read(store, run)) as parts:
            if arguments.format == "parquet":
                _write_parquet(part, columns, parts)
            else:
                with open(part, "w", encoding="utf-8", newline="") as file:
                    _TEXT_FORMATS[arguments.format](file, columns, parts)
        os.replace(part, path)  # a file of this name is always complete
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file that can be written") from None
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {path}", file=sys.stderr)


def _usage_rows(store: PosteriorStore, run: RunRecord) -> Generator[Rows, None, None]:
    log = read_usage(store, run)
    if len(log.step):
        yield list(zip(*(column.tolist() for column in vars(log).values()), strict=True))


_TABLES = {
    "history": (HISTORY_COLUMNS, history_with_texts),
    "rollouts": (ROLLOUT_COLUMNS, rollouts_with_texts),
    "usage": (("step", "prompt_id", *COUNTS), _usage_rows),
    "groups": (GROUP_COLUMNS, ledger),
}


def _write_csv(file: TextIO, columns: Sequence[str], parts: Parts) -> None:
    write_rows(file, columns, chain.from_iterable(parts))


def _write_jsonl(file: TextIO, columns: Sequence[str], parts: Parts) -> None:
    for rows in parts:
        for row in rows:
            file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")


_TEXT_FORMATS: dict[str, Callable[[TextIO, Sequence[str], Parts], None]] = {"csv": _write_csv, "jsonl": _write_jsonl}


def _check_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UsageError("Parquet needs pyarrow: pip install pyarrow, or choose --format csv or jsonl") from None


def _write_parquet(path: Path, columns: Sequence[str], parts: Parts) -> None:
    import pyarrow
    from pyarrow import parquet

    real = ("successes", "alpha", "beta", "mean", "variance", "reward", "score", "advantage", "log_prob")
    types = {name: pyarrow.float64() for name in (*real, "policy_version", "lag")}
    types |= {name: pyarrow.string() for name in ("prompt", "label", "text", "fate")}
    layout = pyarrow.schema([(name, types.get(name, pyarrow.int64())) for name in columns])
    with parquet.ParquetWriter(path, layout) as writer:
        for rows in parts:
            values = [list(column) for column in zip(*rows, strict=True)]
            writer.write_table(pyarrow.table(values, schema=layout))
