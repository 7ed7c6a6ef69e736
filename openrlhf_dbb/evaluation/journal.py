"""The journal of an unfinished evaluation: one line of JSON for each finished (run, prompt).

Each line is written unbuffered, so that a process killed at any moment loses only what was in flight. It may leave an
incomplete last line, which is removed when the journal is opened again.

Axes: N samples of a prompt.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from openrlhf_dbb.errors import UsageError


@dataclass(frozen=True)
class Key:
    """The place of a row.

    Attributes:
        benchmark: its name.
        run: 0 to R - 1.
        index: the prompt's place in the benchmark, 0 to P - 1.
    """

    benchmark: str
    run: int
    index: int


@dataclass(frozen=True)
class Row:
    """The N responses to a prompt in one run.

    Attributes:
        scores: N scores in [0, 1]; None where missing: could not be verified.
        answers: N extracted answers, None where none was found.
        responses: N texts without special tokens.
        tokens: N lengths in tokens, end of sequence included.
        truncated: N times whether the response was cut at the length limit.
    """

    key: Key
    scores: list[float | None]
    answers: list[str | None]
    responses: list[str]
    tokens: list[int]
    truncated: list[bool]


class Journal:
    """Rows by key, appended to a file and read back one at a time.

    Attributes:
        keys: of the rows in it.

    Args:
        path: created if it does not exist; an incomplete last line is removed.

    Raises:
        UsageError: a line other than the last one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._reader = path.open("rb")
        self._places: dict[Key, int] = {}
        self._file.truncate(self._scan())

    @property
    def keys(self) -> set[Key]:
        return set(self._places)

    def append(self, row: Row) -> None:
        """Write a row; once this returns, the row survives the end of the process."""
        values = vars(row.key) | {name: value for name, value in vars(row).items() if name != "key"}
        line = json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        place = self._file.seek(0, os.SEEK_END)
        rest = memoryview(line)
        while rest:  # an unbuffered write may be partial
            rest = rest[self._file.write(rest) :]
        self._places[row.key] = place

    def read(self, key: Key) -> Row:
        """The row of a key.

        Raises:
            KeyError: there is no such row.
        """
        self._reader.seek(self._places[key])
        return _row(self._reader.readline())

    def remove(self) -> None:
        """Delete the file, when all its rows are stored elsewhere."""
        self._file.close()
        self._reader.close()
        self._path.unlink()

    def _scan(self) -> int:
        """Record where each row starts; returns the end of the last complete line, in bytes."""
        end = 0
        for number, line in enumerate(self._reader, start=1):
            try:
                row = _row(line)
            except (ValueError, KeyError, TypeError) as error:
                if self._reader.read(1):
                    raise UsageError(
                        f"line {number} of {self._path} is damaged ({error}); delete this line to repeat its prompt"
                    ) from None
                break  # incomplete: the process was killed while writing it
            self._places[row.key] = end
            end += len(line)
        return end


def _row(line: bytes) -> Row:
    if not line.endswith(b"\n"):
        raise ValueError("no end of line")
    values = json.loads(line)
    return Row(Key(*(values.pop(name) for name in ("benchmark", "run", "index"))), **values)
