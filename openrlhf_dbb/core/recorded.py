"""Recorded rollouts: a run writes the batches it trains on; another run trains on them and generates nothing.

A record is a folder::

    record.json       run and model, and what must be the same for a run that trains on it
    step-000001.npz   the batch of step 1, and so on; a file is there whole or not at all

It takes 9 bytes a generated token, 5 a token of the prompt of each rollout, and about 200 a rollout.

Axes: T tokens of a rollout, prompt and response; A of them generated; R rollouts of a step.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.arrays import Key
from openrlhf_dbb.core.filling import Batch, Group
from openrlhf_dbb.core.replay import joined, split
from openrlhf_dbb.core.strategies import Drawn

ABOUT = "record.json"
FORMAT = 1
DATA_SET = "the data set (digest of prompts and labels)"
_COPY = "copy the whole folder again from where it was recorded"
_ARRAYS = (
    "lengths",
    "tokens",
    "actions",
    "log_probs",
    "rewards",
    "scores",
    "truncated",
    "texts",
)


@dataclass(frozen=True, eq=False)
class RecordedRollout:
    """A rollout as it was generated.

    Attributes:
        tokens: int32 (T,), prompt and response without padding.
        actions: bool (T - 1,), True where the policy generated ``tokens[1:]``.
        log_probs: float32 (A,), in nats, of the generated tokens at generation; NaN: not known.
        reward: before penalties.
        truncated: whether the response was cut at the length limit.
        logs: further numbers of the verifier, to be logged.
    """

    tokens: NDArray[np.int32]
    actions: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    reward: float
    truncated: bool = False
    logs: Mapping[str, float] = field(default_factory=dict)


RecordedBatch = Batch[Key, RecordedRollout]


class Recorder:
    """Writes a record."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Begin a record, or go on with it.

        Args:
            about: the "run" by name, its "model", and under "same" what :meth:`Record.check` compares.

        Raises:
            ValueError: the folder holds the record of another run, or a damaged one.
        """
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ABOUT
        if path.exists():
            other = _read_about(path).get("run")
            if other != about["run"]:
                raise ValueError(f"{folder} holds the rollouts of run {other!r}; give another one")
            return
        text = json.dumps({"format": FORMAT, **about}, indent=1)
        _write_whole(path, lambda file: file.write(text.encode()))

    def write(self, step: int, batch: RecordedBatch) -> None:
        """Write the batch of a step, from 1; it is durable afterwards."""
        arrays: dict[str, Any] = _arrays(batch)
        _write_whole(_path(self._folder, step), lambda file: np.savez(file, **arrays))

    def roll_back(self, step: int) -> None:
        """Delete the batches of later steps."""
        for number in sorted(_steps(self._folder), reverse=True):  # no gap after a kill
            if number > step:
                _path(self._folder, number).unlink()


class Record:
    """Reads a record.

    Attributes:
        about: of :class:`Recorder`.
        steps: how many were recorded, >= 1.
    """

    def __init__(self, folder: Path) -> None:
        """Find the steps of a record.

        Raises:
            ValueError: there is none, it is of another format, or a step is missing or was cut.
        """
        self._folder = folder
        path = folder / ABOUT
        if not path.exists():
            problem = f"{folder} has no {ABOUT}: it holds no recorded rollouts"
            raise ValueError(f"{problem}; name a folder that does")
        self.about = _read_about(path)
        recorded_format = self.about["format"]
        if recorded_format != FORMAT:
            known = f"format {recorded_format!r}, this release reads {FORMAT}"
            raise ValueError(f"{path} is of {known}; record the run again")
        self.steps = max(_steps(folder), default=0)
        if not self.steps:
            raise ValueError(f"{folder} holds no step; {_COPY}")
        for step in range(1, self.steps + 1):
            file = _path(folder, step)
            if not file.exists():
                raise ValueError(f"{file} is missing, while later steps are there; {_COPY}")
            if not zipfile.is_zipfile(file):  # its end, which was written last, is not there
                raise ValueError(f"{file} is damaged; {_COPY}")

    def check(self, same: Mapping[str, Any]) -> None:
        """Raise ValueError if a value differs from that of the recorded run."""
        for name, value in same.items():
            recorded = self.about["same"].get(name, value)
            if recorded != value:
                difference = f"{name} {recorded}, here it is {value}"
                raise ValueError(f"{self._folder} was recorded with {difference}; give the same")

    def batch(self, step: int, *, with_log_probs: bool = False) -> RecordedBatch:
        """Return the batch of a step, from 1; the ids of its prompts are 0.

        Raises:
            ValueError: its file is damaged, or lacks log-probs although ``with_log_probs`` is set.
        """
        path = _path(self._folder, step)
        try:
            with np.load(path) as file:  # refuses pickles, which could run code
                arrays = {name: file[name] for name in _ARRAYS}
            batch = _batch(arrays)
        except Exception as error:  # of a damaged file numpy and zipfile raise ten kinds
            raise ValueError(f"{path} is damaged ({error!r:.200}); {_COPY}") from error
        if with_log_probs and np.isnan(arrays["log_probs"]).any():
            advice = "leave out what takes them (vLLM's log-probs, off-policy correction)"
            raise ValueError(f"{path} lacks log-probs of the generation; {advice}")
        return batch


def _read_about(path: Path) -> dict[str, Any]:
    """Return what a record says of itself; ValueError if that is damaged."""
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = about["format"], about["same"].keys()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {_COPY}") from error
    return about


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that is there whole or not at all, also after a power failure."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def changed(batch: Batch[Any, Any], change: Callable[[Any], Any]) -> Batch[Any, Any]:
    """Return a batch with each of its groups changed."""
    trained = tuple(map(change, batch.trained))
    return Batch(trained, tuple(map(change, batch.filtered)), batch.skipped)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}.npz"


def _steps(folder: Path) -> list[int]:
    """Return the steps that have a file, in any order."""
    found = [re.fullmatch(r"step-(\d{6,})\.npz", path.name) for path in folder.iterdir()]
    return [int(match[1]) for match in found if match]


def _arrays(batch: RecordedBatch) -> dict[str, NDArray[Any]]:
    """Return the arrays of a step's file; ``texts`` is JSON."""
    groups = [*batch.trained, *batch.filtered]
    scores = [group.scores for group in groups if group.scores is not None]
    if len(scores) < len(groups):
        raise ValueError("a group has no scores; only scored rollouts are recorded")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = {
        "trained": len(batch.trained),
        "skipped": batch.skipped,
        "groups": [_described(group) for group in groups],
        "logs": [dict(rollout.logs) for rollout in rollouts],
    }
    return {
        "lengths": np.array([len(rollout.tokens) for rollout in rollouts], dtype=np.int64),
        "tokens": joined([rollout.tokens for rollout in rollouts], np.int32),
        "actions": joined([rollout.actions for rollout in rollouts], np.bool_),
        "log_probs": joined([rollout.log_probs for rollout in rollouts], np.float32),
        "rewards": np.array([rollout.reward for rollout in rollouts], dtype=np.float64),
        "scores": joined(scores, np.float64),
        "truncated": np.array([rollout.truncated for rollout in rollouts], dtype=np.bool_),
        "texts": np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8),
    }


def _described(group: Group[Key, RecordedRollout]) -> dict[str, Any]:
    text, label = group.prompt
    return {
        "prompt": text,
        "label": label,
        "rollouts": len(group.rollouts),
        "drawn": group.drawn and group.drawn[1:],
        "version": group.version,
        "read": list(group.read),
    }


def _batch(arrays: Mapping[str, NDArray[Any]]) -> RecordedBatch:
    """Return the batch of a file's arrays. Raises an exception if they do not fit each other."""
    texts = json.loads(arrays["texts"].tobytes())
    rollouts = _rollouts(arrays, texts["logs"])
    sizes = [described["rollouts"] for described in texts["groups"]]
    scores = split(arrays["scores"], sizes)
    groups = []
    end = 0
    for place, described in enumerate(texts["groups"]):
        start = end
        end += sizes[place]
        drawn = described["drawn"]
        group = Group(
            prompt=(described["prompt"], described["label"]),
            prompt_id=0,
            drawn=drawn and Drawn(0, *drawn),
            version=described["version"],
            rollouts=tuple(rollouts[start:end]),
            scores=scores[place],
            read=tuple(described["read"]),
        )
        groups.append(group)
    trained = texts["trained"]
    return Batch(tuple(groups[:trained]), tuple(groups[trained:]), texts["skipped"])


def _rollouts(
    arrays: Mapping[str, NDArray[Any]], logs_R: Sequence[Mapping[str, float]]
) -> list[RecordedRollout]:
    lengths_R = arrays["lengths"]
    actions_R = split(arrays["actions"], lengths_R - 1)
    columns = (
        split(arrays["tokens"], lengths_R),
        actions_R,
        split(arrays["log_probs"], [actions.sum() for actions in actions_R]),
        arrays["rewards"].tolist(),
        arrays["truncated"].tolist(),
        logs_R,
    )
    return [RecordedRollout(*row) for row in zip(*columns, strict=True)]
