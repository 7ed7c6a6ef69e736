"""CSV as every command writes it: a header, Unix line endings, numbers with all digits."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any


def write_rows(file: IO[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a header and rows to an open text file (opened with ``newline=""``)."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a file and return its path."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        write_rows(file, header, rows)
    return path
