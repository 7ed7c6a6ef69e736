"""The files of a log of rollouts, and the steps in their names."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from openrlhf_dbb.data.files import FILES, kind_of, unpacked
from openrlhf_dbb.errors import UsageError

# With the word in front of it, what is between them, and a letter behind it. 2.5 is one number.
_NUMBER = re.compile(r"([^\W\d_]*)([\W_]*)([0-9]+(?:\.[0-9]+)*)(?=([^\W\d_]?))")
# Shards of the hub, train-00000-of-00002, and days, 2026-11-28
_NO_STEP = re.compile(r"[0-9]+-of-[0-9]+|[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")
# To these a step may be glued; other words hold numbers of their own, such as gsm8k and aime24.
_STEPS = ("step", "steps", "iter", "iteration", "iterations", "epoch", "epochs")
# Processes write files side by side: their numbers are no steps.
_PROCESSES = (
    "actor",
    "replica",
    "seed",
    "device",
    "of",  # part_0_of_2
    "rank",
    "worker",
    "shard",
    "part",
    "process",
    "gpu",
    "node",
    "host",
)

_CHUNK = 2**20  # bytes

Number = tuple[str, int]
"""A number in a file's name, behind the word in front of it."""


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those of the folders by name.

    Raises:
        UsageError: one does not exist, or is named twice, or a folder holds no log.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}; name a log of rollouts or a folder of them")
        files += _files_in(path) if path.is_dir() else [path]
    seen = set()
    for file in files:
        if file.resolve() in seen:
            raise UsageError(f"{file} is named twice and would count twice; name each file once")
        seen.add(file.resolve())
    return files


def _files_in(folder: Path) -> list[Path]:
    files = sorted(filter(_is_log, folder.iterdir()))
    if files:
        return files
    inside = sorted(file.parent for file in folder.rglob("*") if _is_log(file))
    advice = "name a log of rollouts"
    if inside:
        advice = f"its folder {inside[0].relative_to(folder)} does; name the files, or that folder"
    raise UsageError(f"folder {folder} itself holds no file of {', '.join(FILES)}; {advice}")


def _is_log(file: Path) -> bool:
    return file.is_file() and kind_of(file) != ""


def refuse_copies(files: Sequence[Path], step_of_name: Mapping[Path, int]) -> None:
    """Refuse copies among the files of a step, packed or not; empty files may be equal.

    Raises:
        UsageError: two files hold the same.
    """
    nothing = hashlib.blake2b().digest()
    seen: dict[tuple[bytes, int | None], Path] = {}
    for file in files:
        digest = _digest(file)
        if digest == nothing:
            continue
        first = seen.setdefault((digest, step_of_name.get(file)), file)
        if first != file:
            raise UsageError(f"{file} is a copy of {first} and would count twice; name one of them")


def _digest(path: Path) -> bytes:
    """Return a hash of what a file holds, unpacked."""
    content = hashlib.blake2b()
    with unpacked(path) as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    return content.digest()


def steps_of_names(files: Sequence[Path]) -> dict[Path, int]:
    """Return the step that the name of each file tells.

    Raises:
        UsageError: there is not one number that is the step.
    """
    folder = os.path.commonpath([file.absolute().parent for file in files])
    names = [str(file.absolute().relative_to(folder)) for file in files]
    column = None
    if len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        column = _column_of_step([_numbers(name) for name in names])
    if column is None:
        several = f"{names[0]} does"
        if len(files) > 1:
            several = f"{names[0]} .. {names[-1]} do"
        raise UsageError(
            f"no column has the step, and {several} not tell it by one number; "
            "give --step_key, or file names as step_1.jsonl"
        )
    return {file: step for file, (_, step) in zip(files, column, strict=True)}


def _numbers(name: str) -> list[Number]:
    """Return the numbers of a name that may be its step."""
    numbers = []
    for word, between, digits, behind in _NUMBER.findall(_NO_STEP.sub("", name)):
        is_glued = behind or (word and not between and word.lower() not in _STEPS)
        if not is_glued and digits.isdigit():
            numbers.append((word.lower(), int(digits)))
    return numbers


def _column_of_step(numbers: Sequence[Sequence[Number]]) -> Sequence[Number] | None:
    """Return that number of each name which is the step; None if that is not plain."""
    named = []
    varying = []
    for column in zip(*numbers, strict=True):
        word, _ = column[0]
        if word in _PROCESSES:
            continue
        if word in ("step", "steps"):
            named.append(column)
        if len(column) == 1 or len(set(column)) > 1:
            varying.append(column)
    if len(named) != 1:
        return varying[0] if len(varying) == 1 else None
    # Two files of one step are two processes' files, not for example two epochs'.
    is_plain = len(set(named[0])) == len(numbers) or set(varying) <= set(named)
    return named[0] if is_plain else None
