"""Evaluations on disk: ``evaluation.json`` has the settings, ``responses.jsonl`` one line for each (run, prompt).

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError

FOLDER = Path("evaluations")
SETTINGS = "evaluation.json"
RESPONSES = "responses.jsonl"


class Key(NamedTuple):
    """Identifies a row: run is 0 to R - 1, place (of the prompt in the benchmark) 0 to P - 1."""

    benchmark: str
    run: int
    place: int


class Row(NamedTuple):
    """The N responses to a prompt in one run."""

    benchmark: str
    run: int
    place: int
    id: str  # as the benchmark calls the prompt
    prompt: str  # as the model saw it
    label: str
    scores: list[float | None]  # in [0, 1]; None is missing: the response could not be verified
    answers: list[str | None]  # extracted; None where a response has no answer
    tokens: list[int]  # lengths, end of sequence included
    truncated: list[bool]  # whether the response was cut at the length limit
    responses: list[str]

    @property
    def key(self) -> Key:
        return Key(*self[:3])


class Results(NamedTuple):
    """The rows of one model on one benchmark as arrays; ids, labels and prompts of its P prompts."""

    benchmark: str
    ids: list[str]
    scores_R_P_N: NDArray[np.float64]  # NaN is missing
    answers_R_P_N: NDArray[np.object_]  # str, or None where a response has no answer
    labels: list[str]
    tokens_R_P_N: NDArray[np.int64]
    truncated_R_P_N: NDArray[np.bool_]
    prompts: Sequence[str] = ()  # empty if they are not known


class Evaluation(NamedTuple):
    """A finished evaluation: its name, the content of ``evaluation.json``, and its results by benchmark."""

    name: str
    settings: dict[str, Any]
    results: dict[str, Results]


class Responses:
    """The rows of an evaluation (``keys``) in its folder, which is created; no other process may append rows."""

    def __init__(self, folder: Path) -> None:
        path = folder / RESPONSES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the end of the process releases it
        except BlockingIOError:
            raise UsageError(f"{folder}: another process is evaluating into it; wait, or give another --name") from None
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}; give another --output or --name") from error
        self.keys = {row.key for row in read_rows(path)}
        with path.open("rb") as lines:
            # A killed process may have left an incomplete last line.
            self._file.truncate(sum(len(line) for line in lines if line.endswith(b"\n")))

    def append(self, row: Row) -> None:
        """Write a row; the row survives the end of this process."""
        self._file.write(json.dumps(row._asdict(), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self.keys.add(row.key)

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of responses; an incomplete last line is left out, another damaged line refused."""
    with path.open("rb") as file:
        for number, line in enumerate((line for line in file if line.endswith(b"\n")), start=1):
            try:
                yield Row(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{path}, line {number}: {error}; delete this line and evaluate again") from error


def find(name: str) -> Path:
    """Return the folder of an evaluation by its path, or its name under ``evaluations/``."""
    for folder in (Path(name), FOLDER / name):
        if (folder / SETTINGS).is_file():
            return folder
    known = sorted(path.parent.name for path in FOLDER.glob(f"*/{SETTINGS}"))
    raise UsageError(f"there is no evaluation {name!r}; {FOLDER}/ has {', '.join(known) or 'no evaluations'}")


def read_settings(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))


def read_evaluation(folder: Path) -> Evaluation:
    """Read an evaluation without its responses; one that is not finished is refused."""
    settings, results = read_settings(folder), {}
    # The responses would fill the memory.
    rows = sorted(row._replace(responses=[]) for row in read_rows(folder / RESPONSES))
    for name, about in settings["benchmarks"].items():
        found = [row for row in rows if row.benchmark == name]
        if len(found) < (needed := settings["runs"] * about["prompts"]):
            done = f"{len(found)} of {needed} rows of {name}"
            raise UsageError(f"{folder} is not finished, it has {done}; repeat the evaluate command that started it")
        results[name] = as_results(found)
    return Evaluation(folder.resolve().name, settings, results)


def as_results(rows: Sequence[Row]) -> Results:
    """Return the rows of one benchmark, ordered by run and place, as arrays."""
    runs = rows[-1].run + 1
    first = rows[: len(rows) // runs]
    columns: dict[str, Any] = {f"{name}s": [getattr(row, name) for row in first] for name in ("id", "label", "prompt")}
    kinds: dict[str, Any] = {"scores": np.float64, "answers": object, "tokens": np.int64, "truncated": np.bool_}
    for name, kind in kinds.items():  # a score of None becomes NaN
        values = np.array([getattr(row, name) for row in rows], dtype=kind)
        columns[f"{name}_R_P_N"] = values.reshape(runs, len(first), -1)
    return Results(first[0].benchmark, **columns)
