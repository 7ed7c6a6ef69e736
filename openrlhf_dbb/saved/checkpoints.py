"""Finds the whole checkpoints of a run. A manifest, written last, lists the files of a checkpoint.

A run resumes from the newest checkpoint whose files all match its manifest. A checkpoint without a manifest was not
finished. The layout of the checkpoint folder:

    _actor/global_step8/                 the files of all ranks, written by DeepSpeed
    _actor/global_step8/posteriors.json  the state of the generation
    _actor/global_step8/manifest.json    step, run, and size and digest of every file
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from openrlhf_dbb.errors import RunError

MANIFEST = "manifest.json"
WHOLE_BYTES = 64 * 2**20
BLOCKS = 64
BLOCK_BYTES = 2**20
SHARED_WAIT_S = 90.0  # that a network file system may take to show the files of another host


def actor_folder(folder: Path, tag: str = "") -> Path:
    """Return the folder of the ranks' files: of all checkpoints, or of one."""
    return folder / "_actor" / tag


def step_of(tag: str) -> int:
    """Return the step in a checkpoint's tag: 8 for ``global_step8``."""
    return int(tag.removeprefix("global_step"))


def tags(folder: Path) -> list[str]:
    """Return all checkpoints, whole or not, the newest first."""
    names = []
    for path in actor_folder(folder).glob("global_step*"):
        if path.is_dir() and re.fullmatch(r"global_step\d+", path.name):
            names.append(path.name)
    return sorted(names, key=step_of, reverse=True)


def sizes(folder: Path) -> dict[str, int]:
    """Return the files in a folder as this host sees them: size in bytes by path below ``folder``."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            files[str(path.relative_to(folder))] = path.stat().st_size
    return files


def complete(folder: Path, tag: str, run: str, listings: Sequence[Mapping[str, int]]) -> None:
    """Write the manifest: the checkpoint of this run (a uuid) is whole now. ``listings`` as for :func:`wait_for`."""
    ranks = actor_folder(folder, tag)
    paths = {ranks / name for name in wait_for(ranks, f"checkpoint {tag}", listings)}
    files = {}
    for path in sorted(paths):
        with path.open("rb") as file:
            # The manifest must not be durable before the files that it lists
            os.fsync(file.fileno())
            saved = {"bytes": os.fstat(file.fileno()).st_size, "digest": _digest(file)}
        files[str(path.relative_to(folder))] = saved
    write_json(ranks / MANIFEST, {"run": run, "step": step_of(tag), "files": files})
    flush_folders({path.parent for path in paths} | {ranks.parent})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that is there whole or not at all, also after a power failure."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=1))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def flush_folders(folders: Iterable[Path]) -> None:
    """Make the names of the files in these folders durable."""
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def wait_for(folder: Path, name: str, listings: Sequence[Mapping[str, int]]) -> list[str]:
    """Wait until this host sees the files that the other hosts see, and return their names.

    ``name`` is that of the files together, ``listings`` what the host of each rank sees, from :func:`sizes`. Raise
    RunError if a file is missing after SHARED_WAIT_S seconds.
    """
    expected: dict[str, int] = {}
    for listing in listings:
        for path, size in listing.items():
            # A host may see another's file before its end
            expected[path] = max(size, expected.get(path, 0))
    deadline = time.monotonic() + SHARED_WAIT_S
    missing = _missing(folder, expected)
    while missing:
        if time.monotonic() > deadline:
            raise RunError(
                f"{name} is not whole on this host: {folder / missing[0]} ({len(missing)} of {len(expected)} "
                "files) was written on another one; the hosts must share the checkpoint folder"
            )
        time.sleep(0.2)
        missing = _missing(folder, expected)
    return list(expected)


def _missing(folder: Path, expected: Mapping[str, int]) -> list[str]:
    """Return the files of ``expected``, sizes by path, that are not there in this size."""
    return [path for path, size in expected.items() if _size(folder / path) != size]


def newest_whole(folder: Path, run: str, last_step: int) -> tuple[str | None, list[str]]:
    """Return the tag of the newest whole checkpoint of a run (a uuid) up to ``last_step``, or None.

    With it comes a line for each newer checkpoint that says why it is passed over.
    """
    passed: list[str] = []
    for tag in tags(folder):
        fault = _fault(folder, tag, run, last_step)
        if fault is None:
            return tag, passed
        passed.append(f"checkpoint {tag} {fault}")
    return None, passed


def is_finished(folder: Path, tag: str) -> bool:
    """Return whether a checkpoint was ever whole; it may be damaged now."""
    return (actor_folder(folder, tag) / MANIFEST).exists()


def check_loaded(folder: Path, tag: str, run: str, loaded: Sequence[tuple[Any, Any]]) -> None:
    """Raise RunError unless every rank has loaded this checkpoint of this run.

    ``loaded`` has step and run in the states of each rank; None where the states name none.
    """
    for rank, states in enumerate(loaded):
        if states != (step_of(tag), run):
            raise RunError(
                f"rank {rank} has loaded a checkpoint of step {states[0]} of run {states[1]}, not {tag} of run {run}; "
                f"is {folder} the same folder on all hosts? Nothing was trained, and the run can be resumed"
            )


def delete_after(folder: Path, run: str, step: int) -> None:
    """Delete the run's checkpoints of steps after ``step``, which are undone."""
    for tag in tags(folder):
        manifest = read_json(actor_folder(folder, tag) / MANIFEST)
        if step_of(tag) > step and manifest.get("run", run) == run:
            delete(folder, tag)


def delete(folder: Path, tag: str) -> None:
    """Delete a checkpoint, or what a kill has left of it."""
    remove(actor_folder(folder, tag), MANIFEST)


def remove(folder: Path, written_last: str) -> None:
    """Delete a folder, or a link to a folder but nothing in there; nothing is done if there is none."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        # Without this file the folder does not count, even if a kill leaves half of the other files.
        (folder / written_last).unlink(missing_ok=True)
        shutil.rmtree(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _fault(folder: Path, tag: str, run: str, last_step: int) -> str | None:
    """Return why a checkpoint cannot be used; None if it can."""
    if not is_finished(folder, tag):
        return f"was not finished ({MANIFEST} is missing)"
    manifest = read_json(actor_folder(folder, tag) / MANIFEST)
    listing = _listing(manifest)
    if (
        not listing
        or manifest.keys() != {"run", "step", "files"}
        or manifest["step"] != step_of(tag)
    ):
        return f"is damaged: its {MANIFEST} is not what was written"
    if manifest["run"] != run:
        return f"belongs to another run ({manifest['run']})"
    if step_of(tag) > last_step:
        return f"is newer than the posteriors, which are at step {last_step}"
    for name, size, digest in listing:
        fault = _fault_of_file(folder / name, size, digest)
        if fault is not None:
            return f"is damaged: {fault}"
    return None


def _listing(manifest: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Return name, size in bytes and digest of each file that a manifest lists; empty if it lists none."""
    files = []
    try:
        for name, saved in manifest["files"].items():
            files.append((name, int(saved["bytes"]), saved["digest"]))
    except (AttributeError, LookupError, TypeError, ValueError):
        return []
    return files


def _fault_of_file(path: Path, size: int, digest: str) -> str | None:
    there = _size(path)
    if there is None:
        return f"{path} is missing"
    if there != size:
        return f"{path} has {there:,} bytes, not {size:,}"
    with path.open("rb") as file:
        if _digest(file) != digest:
            return f"the content of {path} is not what was saved"
    return None


def _size(path: Path) -> int | None:
    # False for any name, unlike path.is_file()
    return path.stat().st_size if os.path.isfile(path) else None


def _digest(file: BinaryIO) -> str:
    """Return BLAKE2 of a file's size and content; of a large file only blocks from beginning to end are read."""
    size = os.fstat(file.fileno()).st_size
    # Reading tens of GB at every checkpoint would hold up the training.
    starts: Sequence[int] = range(0, size, BLOCK_BYTES)
    if size > WHOLE_BYTES:
        starts = [(size - BLOCK_BYTES) * place // (BLOCKS - 1) for place in range(BLOCKS)]
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    for start in starts:
        digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return digest.hexdigest()
