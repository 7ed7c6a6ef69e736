"""Evaluations on disk: the settings, and a line of responses for each run and prompt.

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


Settings = dict[str, Any]
"""The content of ``evaluation.json``."""


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
        """The first three fields."""
        return Key(*self[:3])


class Results(NamedTuple):
    """The rows of one model on one benchmark as arrays."""

    benchmark: str
    ids: list[str]  # (P,), as labels and prompts
    scores_R_P_N: NDArray[np.float64]  # NaN is missing
    answers_R_P_N: NDArray[np.object_]  # str, or None where a response has no answer
    labels: list[str]
    tokens_R_P_N: NDArray[np.int64]
    truncated_R_P_N: NDArray[np.bool_]
    prompts: Sequence[str] = ()  # empty if they are not known


class Evaluation(NamedTuple):
    """A finished evaluation."""

    name: str
    settings: Settings
    results: dict[str, Results]  # by benchmark


class Responses:
    """The rows of an evaluation in its folder, which is created; ``keys`` are those of the rows.

    Raises:
        UsageError: another process appends rows, the folder cannot be written, or a row is damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / RESPONSES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            # The end of the process releases it.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder}: another process is evaluating into it; wait, or give another --name"
            ) from None
        except OSError as error:
            raise UsageError(
                f"{folder}: {error.strerror}; give another --output or --name"
            ) from error
        self.keys = {row.key for row in read_rows(path)}
        with path.open("rb") as lines:
            # A killed process may have left an incomplete last line.
            self._file.truncate(sum(len(line) for line in lines if line.endswith(b"\n")))

    def append(self, row: Row) -> None:
        """Write a row; the row survives the end of this process."""
        line = json.dumps(row._asdict(), ensure_ascii=False, allow_nan=False)
        self._file.write(f"{line}\n".encode())
        self._file.flush()
        self.keys.add(row.key)

    def close(self) -> None:
        """Close the file; another process may append rows then."""
        self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of responses; an incomplete last line is left out.

    Raises:
        UsageError: another line is damaged.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Row(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"{path}, line {number}: {error}; delete this line and evaluate again"
                ) from error


def find(name: str) -> Path:
    """Return the folder of an evaluation by its path, or its name under ``evaluations/``.

    Raises:
        UsageError: there is no such evaluation.
    """
    for folder in (Path(name), FOLDER / name):
        if (folder / SETTINGS).is_file():
            return folder
    others = sorted(path.parent.name for path in FOLDER.glob(f"*/{SETTINGS}"))
    listed = ", ".join(others) or "no evaluations"
    raise UsageError(f"there is no evaluation {name!r}; {FOLDER}/ has {listed}")


def read_settings(folder: Path) -> Settings:
    """Return the content of ``evaluation.json``."""
    return dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))


def read_evaluation(folder: Path) -> Evaluation:
    """Read an evaluation without its responses, which would fill the memory.

    Raises:
        UsageError: it is not finished, or a row is damaged.
    """
    settings = read_settings(folder)
    rows = sorted(row._replace(responses=[]) for row in read_rows(folder / RESPONSES))
    results = {}
    for name, about in settings["benchmarks"].items():
        own = [row for row in rows if row.benchmark == name]
        needed = settings["runs"] * about["prompts"]
        if len(own) < needed:
            raise UsageError(
                f"{folder} is not finished, it has {len(own)} of {needed} rows of {name}; "
                "repeat the evaluate command that started it"
            )
        results[name] = as_results(own)
    return Evaluation(folder.resolve().name, settings, results)


def as_results(rows: Sequence[Row]) -> Results:
    """Return the rows of one benchmark, ordered by run and place, as arrays."""
    runs = rows[-1].run + 1
    first = rows[: len(rows) // runs]

    def column(name: str, kind: Any) -> NDArray[Any]:
        values = np.array([getattr(row, name) for row in rows], dtype=kind)
        return values.reshape(runs, len(first), -1)

    return Results(
        first[0].benchmark,
        ids=[row.id for row in first],
        labels=[row.label for row in first],
        prompts=[row.prompt for row in first],
        scores_R_P_N=column("scores", np.float64),  # None becomes NaN
        answers_R_P_N=column("answers", object),
        tokens_R_P_N=column("tokens", np.int64),
        truncated_R_P_N=column("truncated", np.bool_),
    )
