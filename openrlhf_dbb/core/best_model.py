"""The best model of a run by its evaluations, as a Hugging Face model folder that survives kills and resumes.

Layout, beside the folder of the checkpoints (in it, unless that is called ``checkpoints``)::

    best                            a link to one of the next, replaced at once
    best_models/step12-1b9d6bcd/    model, tokenizer, and ``best.json``, written last; 1b9d6bcd begins the run's uuid
    best_models/unfinished/         one that is being written

A resume goes back to a checkpoint, and the best model with it. So the best one up to the newest whole checkpoint stays
until a checkpoint at or after the step of the next one is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from openrlhf_dbb.core import checkpoints
from openrlhf_dbb.errors import RunError

NAME = "best"
FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """What ``best.json`` says.

    Attributes:
        run: uuid of the run.
        step: global step that the model was evaluated after.
        measure: by which it is the best, such as ``eval_mean@8``.
        value: of the measure; the highest of all evaluations so far.
        evaluated: names of what the measure is over, in order.
    """

    run: str
    step: int
    measure: str
    value: float
    evaluated: list[str]

    def is_beaten_by(self, other: Best) -> bool:
        """Whether another model takes its place: a higher value, or one that cannot be compared with this."""
        if (self.measure, self.evaluated) != (other.measure, other.evaluated):
            return True
        return other.value > self.value and other.step != self.step


def place(checkpoint_folder: Path) -> Path:
    """Where the best model of a run with these checkpoints (``--ckpt.path``) is."""
    beside = checkpoint_folder.name == "checkpoints"
    return (checkpoint_folder.parent if beside else checkpoint_folder) / NAME


def models(checkpoint_folder: Path) -> Path:
    """The folder of all models that are or have been the best one of such a run."""
    return place(checkpoint_folder).with_name("best_models")


def read(folder: Path) -> Best | None:
    """What is said of the best model in a folder; None if there is none."""
    try:
        return Best(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class BestModel:
    """The best model of a run, of which this process alone writes.

    Args:
        checkpoint_folder: ``--ckpt.path``.
        run: uuid of the run.
    """

    def __init__(self, checkpoint_folder: Path, run: str) -> None:
        self.link = place(checkpoint_folder)
        self.folder = models(checkpoint_folder)
        self.run = run
        self._resumable = 0  # step of the newest whole checkpoint
        self.unfinished = self.folder / "unfinished"

    def newest(self, until: float = math.inf) -> Best | None:
        """The best model up to a step; the later of two is the better one."""
        found = [best for best in self._all() if best.step <= until]
        return max(found, key=lambda best: best.step, default=None)

    def wants(self, candidate: Best) -> bool:
        """Whether this is the best so far; a value that is NaN never is."""
        best = self.newest()
        return not math.isnan(candidate.value) and (best is None or best.is_beaten_by(candidate))

    def begin(self) -> Path:
        """An empty folder to save the model into."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
        return self.unfinished

    def finish(self, best: Best, listings: Sequence[Mapping[str, int]]) -> None:
        """The model that has been saved is the best: from here on also after a kill or a power failure.

        Args:
            listings: what each rank's host sees of it, from :func:`checkpoints.sizes`.

        Raises:
            RunError: this host does not see all of it, or something else is in the way of the link.
        """
        for name in checkpoints.wait_for(self.unfinished, f"the best model, of step {best.step}", listings):
            with (self.unfinished / name).open("rb") as file:
                os.fsync(file.fileno())
        checkpoints.write_json(self.unfinished / FILE, asdict(best))
        target = self._folder_of(best)
        shutil.rmtree(target, ignore_errors=True)
        self.unfinished.rename(target)
        checkpoints.flush_folders([target, self.folder])
        self._point_to(best)
        self._prune()

    def settle(self, step: int) -> None:
        """The checkpoint of ``step`` is whole, or the run has finished: no resume goes back behind it."""
        self._resumable = step
        self._prune()

    def roll_back(self, step: int) -> None:
        """Undo what came after ``step``, the checkpoint that the run continues from; 0: it begins.

        Raises:
            RunError: something else is in the way of the link.
        """
        self._resumable = step
        best, shown = self.newest(until=step), read(self.link)
        if best is not None:
            self._point_to(best)
        elif shown is not None and shown.run == self.run and shown.step > step:
            self._take_away()
        for each in self._all():
            if each.step > step:
                _delete(self._folder_of(each))
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def _all(self) -> list[Best]:
        """Those of this run that are whole."""
        found = [read(path) for path in self.folder.glob("step*")]
        return [best for best in found if best is not None and best.run == self.run]

    def _folder_of(self, best: Best) -> Path:
        return self.folder / f"step{best.step}-{best.run[:8]}"

    def _point_to(self, best: Best) -> None:
        if self.link.exists() and not self.link.is_symlink():
            if read(self.link) is None:
                raise RunError(f"{self.link} is in the way of the run's best model: it is none; move it elsewhere")
            self._take_away()
        new = self.folder / "link"
        new.unlink(missing_ok=True)
        new.symlink_to(Path(self.folder.name) / self._folder_of(best).name)
        new.replace(self.link)
        checkpoints.flush_folders([self.link.parent])

    def _take_away(self) -> None:
        if self.link.is_symlink():
            self.link.unlink()
        else:
            _delete(self.link)  # a copy of the run's folder that has followed the link

    def _prune(self) -> None:
        """Delete all but the best one, and the best one up to the newest whole checkpoint."""
        kept = {self._folder_of(best) for best in (self.newest(), self.newest(self._resumable)) if best is not None}
        for path in self.folder.glob("step*"):
            if kept and path not in kept:
                _delete(path)


def _delete(folder: Path) -> None:
    """Delete a model; a part of one never counts as one."""
    (folder / FILE).unlink(missing_ok=True)
    shutil.rmtree(folder)
