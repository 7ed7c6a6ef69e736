"""Which checkpoints of a run are whole: each gets a manifest of its files when it is complete, written last.

A run is resumed from the newest checkpoint whose files are all as its manifest says. Without a manifest a checkpoint
was not finished. Layout, below ``--ckpt.path``::

    _actor/TAG/                 the ranks' files, by DeepSpeed; TAG is global_step8, or of runs before the best model
                                had a folder of its own (see ``best_model``) also best_global_step8
    _actor/TAG/manifest.json    ours
    replay/global_step8.npz     the replay cache, if there is one
    features/global_step8.npz   the prompts' hidden features then in use, if the estimator reads them
    aside/TAG/                  passed over by the last resume; deleted when the next checkpoint is whole
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from openrlhf_dbb.errors import RunError

MANIFEST = "manifest.json"
LOADED = "openrlhf_dbb_loaded"
"""Key under which a rank's states say which checkpoint it has loaded."""
FORMAT = 1
WHOLE_BYTES = 64 * 2**20
BLOCKS, BLOCK_BYTES = 64, 2**20
SHARED_WAIT_S = 90.0
"""How long a network file system may take to show the files of another host."""

_TAG = re.compile(r"(best_)?global_step(\d+)")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A checkpoint of the policy.

    Attributes:
        step: global step it was saved after.
        regular: False for the best checkpoint of an evaluation, which only earlier versions saved.
        tag: name of its folder.
    """

    step: int
    regular: bool
    tag: str

    @classmethod
    def named(cls, tag: str) -> Checkpoint | None:
        """The checkpoint that a folder's name stands for; None if it is none."""
        match = _TAG.fullmatch(tag)
        return match and cls(int(match[2]), match[1] is None, tag)


def actor_folder(folder: Path, tag: str = "") -> Path:
    """Where the ranks' files are: of all checkpoints, or of one."""
    return folder / "_actor" / tag


def replay_file(folder: Path, step: int) -> Path:
    """The replay cache that belongs to the checkpoints of ``step``."""
    return folder / "replay" / f"global_step{step}.npz"


def features_file(folder: Path, step: int) -> Path:
    """The prompts' features that belong to the checkpoints of ``step``."""
    return folder / "features" / f"global_step{step}.npz"


_BESIDE = (replay_file, features_file)


def all_of(folder: Path) -> list[Checkpoint]:
    """All checkpoints in ``--ckpt.path``, whole or not, the newest first."""
    names = [path.name for path in actor_folder(folder).glob("*") if path.is_dir()]
    return sorted(filter(None, map(Checkpoint.named, names)), reverse=True)


def listing(folder: Path, tag: str) -> dict[str, int]:
    """The ranks' files of a checkpoint as this host sees them: size in bytes, by path below ``folder``."""
    return sizes(folder, actor_folder(folder, tag))


def sizes(folder: Path, part: Path) -> dict[str, int]:
    """The files in a part of a folder as this host sees them, without a manifest: size in bytes, by path below it."""
    paths = [path for path in part.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def begin(folder: Path, tag: str) -> None:
    """Delete an earlier checkpoint of this name: its files must not be taken for the new one's."""
    if actor_folder(folder, tag).is_dir():
        (actor_folder(folder, tag) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(actor_folder(folder, tag))


def complete(folder: Path, tag: str, run: str, listings: Sequence[Mapping[str, int]]) -> None:
    """Write the manifest: from here on the checkpoint is whole, also after a power failure.

    Args:
        folder: ``--ckpt.path``.
        run: uuid of the run.
        listings: what each rank's host sees of it, from :func:`listing`.

    Raises:
        RunError: this host does not see all of it.
    """
    checkpoint = Checkpoint.named(tag)
    assert checkpoint is not None, tag
    names = wait_for(folder, f"checkpoint {tag}", listings)
    beside = [file(folder, checkpoint.step) for file in _BESIDE]
    names += [str(path.relative_to(folder)) for path in beside if path.is_file()]
    files = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            files[name] = {"bytes": os.fstat(file.fileno()).st_size, "digest": _digest(file)}
    manifest = {
        "format": FORMAT,
        "run": run,
        "tag": tag,
        "step": checkpoint.step,
        "ranks": len(listings),
        "files": files,
    }
    target = actor_folder(folder, tag) / MANIFEST
    write_json(target, manifest | {"digest": _own_digest(manifest)})
    flush_folders({(folder / name).parent for name in files} | {target.parent.parent})
    shutil.rmtree(folder / "aside", ignore_errors=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file, which is there whole or not at all, also after a power failure."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=1))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def flush_folders(folders: Iterable[Path]) -> None:
    """Make durable which files these folders hold."""
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def wait_for(folder: Path, what: str, listings: Sequence[Mapping[str, int]]) -> list[str]:
    """Wait until this host sees the files that any rank's host sees.

    Args:
        folder: that the names in ``listings`` are relative to.
        what: the files are called in an error.
        listings: what each rank's host sees, from :func:`sizes`.

    Returns:
        Their names.

    Raises:
        RunError: it does not within SHARED_WAIT_S seconds.
    """
    expected: dict[str, int] = {}
    for name, size in (item for each in listings for item in each.items()):
        expected[name] = max(size, expected.get(name, 0))  # a host may see another's file before it is all there
    deadline = time.monotonic() + SHARED_WAIT_S
    while missing := [name for name, size in expected.items() if _size(folder / name) != size]:
        if time.monotonic() > deadline:
            raise RunError(
                f"{what} is not whole on this host: {folder / missing[0]} ({len(missing)} of "
                f"{len(expected)} files) was written on another one; --ckpt.path must be a folder that all hosts share"
            )
        time.sleep(0.2)
    return list(expected)


def newest_whole(folder: Path, run: str, last_step: int) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a run that is whole.

    Args:
        folder: ``--ckpt.path``.
        run: uuid of the run.
        last_step: the step its posteriors are at; a later checkpoint cannot be used.

    Returns:
        The checkpoint, None if there is none, and why each newer one is passed over.
    """
    passed: list[str] = []
    for checkpoint in all_of(folder):
        fault = _fault(folder, checkpoint, run, last_step)
        if fault is None:
            return checkpoint, passed
        passed.append(f"checkpoint {checkpoint.tag} {fault}")
    return None, passed


def is_finished(folder: Path, tag: str) -> bool:
    """Whether a checkpoint was ever complete; it may be damaged now."""
    return (actor_folder(folder, tag) / MANIFEST).exists()


def check_loaded(folder: Path, tag: str, run: str, loaded: Sequence[tuple[Any, Any, Any]]) -> None:
    """Whether every rank has loaded a checkpoint of a run.

    Args:
        loaded: tag, global step and run that each rank's states name; None where they name none.

    Raises:
        RunError: one of them has not.
    """
    checkpoint = Checkpoint.named(tag)
    assert checkpoint is not None, tag
    for rank, found in enumerate(loaded):
        if found != (tag, checkpoint.step, run):
            raise RunError(
                f"rank {rank} has loaded checkpoint {found[0]} (step {found[1]}, run {found[2]}), not {tag} of run "
                f"{run}; is {folder} the same folder on all hosts? Nothing was trained, and the run can be resumed"
            )


def set_aside_after(folder: Path, run: str, step: int) -> None:
    """Move the checkpoints of steps after ``step`` away: a run that continues from there will save these once more.

    Those of other runs stay. Nothing is resumed from there; it is deleted when the next checkpoint is whole.
    """
    for checkpoint in all_of(folder):
        if checkpoint.step > step and _manifest(folder, checkpoint.tag).get("run", run) == run:
            aside = folder / "aside" / checkpoint.tag
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            actor_folder(folder, checkpoint.tag).rename(aside)


def delete_stale(folder: Path) -> None:
    """Delete the replay caches and features whose checkpoint OpenRLHF has deleted."""
    steps = [checkpoint.step for checkpoint in all_of(folder)]
    for file in _BESIDE:
        kept = {file(folder, step) for step in steps}
        for path in file(folder, 0).parent.glob("global_step*.npz"):
            if path not in kept:
                path.unlink()


def _manifest(folder: Path, tag: str) -> dict[str, Any]:
    """The manifest; empty if it cannot be read, or is not what was written."""
    try:
        found = json.loads((actor_folder(folder, tag) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    digest = found.pop("digest", None)
    return found if digest == _own_digest(found) else {}


def _own_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _fault(folder: Path, checkpoint: Checkpoint, run: str, last_step: int) -> str | None:
    """Why a checkpoint cannot be used, None if it can."""
    if not is_finished(folder, checkpoint.tag):
        return f"was not finished ({MANIFEST} is missing)"
    manifest = _manifest(folder, checkpoint.tag)
    if manifest.get("format") != FORMAT:
        return f"is damaged: its {MANIFEST} is not what was written"
    if (manifest.get("tag"), manifest.get("step")) != (checkpoint.tag, checkpoint.step):
        return f"is damaged: its {MANIFEST} is that of {manifest.get('tag')}"
    if manifest.get("run") != run:
        return f"belongs to another run ({manifest.get('run')})"
    if checkpoint.step > last_step:
        return f"is newer than the posteriors, which are at step {last_step}"
    return next(_differences(folder, manifest["files"]), None)


def _differences(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, saved in files.items():
        path = folder / name
        size = _size(path)
        if size is None:
            yield f"is damaged: {path} is missing"
        elif size != saved["bytes"]:
            yield f"is damaged: {path} has {size:,} bytes, not {saved['bytes']:,}"
    for name, saved in files.items():
        try:
            with (folder / name).open("rb") as file:
                same = _digest(file) == saved["digest"]
        except OSError as error:
            yield f"cannot be read: {folder / name}: {error.strerror}"
        else:
            if not same:
                yield f"is damaged: the content of {folder / name} is not what was saved"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _digest(file: BinaryIO) -> str:
    """BLAKE2 of a file; of a large one, of its size and of blocks spread from its beginning to its end."""
    size = os.fstat(file.fileno()).st_size
    starts: Sequence[int] = range(0, size, BLOCK_BYTES)
    if size > WHOLE_BYTES:
        starts = [(size - BLOCK_BYTES) * place // (BLOCKS - 1) for place in range(BLOCKS)]
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    for start in starts:
        digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return digest.hexdigest()
