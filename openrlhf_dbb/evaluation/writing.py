"""Writes rows of the journal into the Parquet files of a finished evaluation; each file appears complete or not at all.

Axes: R evaluation runs (seeds), P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_dbb.evaluation.journal import Journal, Key
from openrlhf_dbb.evaluation.results import schema

if TYPE_CHECKING:
    from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts

ROWS = 512
"""Rows in memory at a time: their responses are long."""


def path_of(folder: Path, benchmark: str) -> Path:
    """The file of a benchmark."""
    return folder / f"{benchmark}.parquet"


def written(folder: Path, benchmark: str) -> set[Key]:
    """Keys of the rows in a benchmark's file; empty if there is no file."""
    from pyarrow import parquet

    if not path_of(folder, benchmark).exists():
        return set()
    columns = parquet.read_table(path_of(folder, benchmark), columns=["run", "index"]).to_pydict()
    return {Key(benchmark, *place) for place in zip(columns["run"], columns["index"], strict=True)}


def write(folder: Path, benchmark: str, prompts: BenchmarkPrompts, runs: int, journal: Journal) -> None:
    """Write all R x P rows of a benchmark in order, keeping those already in the file.

    Raises:
        KeyError: a row is missing.
    """
    from pyarrow import parquet

    path, building = path_of(folder, benchmark), folder / f".{benchmark}.parquet.building"
    old = written(folder, benchmark)
    # The file has complete runs, the first ones.
    missing = [Key(benchmark, run, index) for run in range(runs) for index in range(len(prompts.texts))][len(old) :]
    if not missing:
        return
    with parquet.ParquetWriter(building, schema(), compression="zstd") as writer:
        if old:
            before = parquet.ParquetFile(path)
            for group in range(before.num_row_groups):
                writer.write_table(before.read_row_group(group))
        for table in _tables(missing, prompts, journal):
            writer.write_table(table)
    _replace(building, path)


def _tables(keys: list[Key], prompts: BenchmarkPrompts, journal: Journal) -> Iterator[Any]:
    import pyarrow as pa

    for start in range(0, len(keys), ROWS):
        rows = []
        for key in keys[start : start + ROWS]:
            row = journal.read(key)
            values = {"run": key.run, "index": key.index} | {
                "id": prompts.ids[key.index],
                "prompt": prompts.texts[key.index],
                "label": prompts.labels[key.index],
            }
            rows.append(values | {name: value for name, value in vars(row).items() if name != "key"})
        yield pa.Table.from_pylist(rows, schema=schema())


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace a file with these values as JSON."""
    building = path.with_name(f".{path.name}.building")
    building.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _replace(building, path)


def _replace(building: Path, path: Path) -> None:
    with building.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(building, path)
