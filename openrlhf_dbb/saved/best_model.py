"""The best model of a run by its evaluations: a Hugging Face model folder that survives kills and resumes.

The layout, beside the checkpoint folder if that is called ``checkpoints``, else inside it:

    best                            a link to one of the next folders, replaced in one operation
    best_models/step12-1b9d6bcd/    model, tokenizer and best.json (written last); 1b9d6bcd begins the uuid of the run
    best_models/unfinished/         a model that is being written

A resume goes back to a checkpoint, and so does the best model. Hence the best model up to the newest whole checkpoint
stays on disk until a checkpoint at or after the step of its successor is whole.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from openrlhf_dbb.errors import RunError
from openrlhf_dbb.saved import checkpoints

NAME = "best"
FILE = "best.json"
CARD = "README.md"  # the model card


@dataclass(frozen=True)
class Best:
    """The content of ``best.json``."""

    run: str  # its uuid
    step: int  # after which the model was evaluated
    measure: str  # such as ``eval_mean@8``
    value: float  # of the measure; the highest of all evaluations so far
    evaluated: list[str]  # names of the data sets that the measure covers, in order


def read(folder: Path) -> Best | None:
    """Return the ``best.json`` of a folder; None if there is no whole model."""
    try:
        return Best(**checkpoints.read_json(folder / FILE))
    except TypeError:
        return None


class BestModel:
    """Writes the best model of a run; ``run`` is its uuid."""

    def __init__(self, checkpoint_folder: Path, run: str) -> None:
        # Else several runs with folders like this would share one
        beside = checkpoint_folder.name == "checkpoints"
        self.link = (checkpoint_folder.parent if beside else checkpoint_folder) / NAME
        self.folder = self.link.with_name("best_models")
        self.run = run
        self.unfinished = self.folder / "unfinished"
        self._resumable = 0  # step of the newest whole checkpoint

    def newest(self, until: float = math.inf) -> Best | None:
        """Return the best model up to a step: a later one on disk is always better."""
        models = (best for _, best in self._models() if best.step <= until)
        return max(models, key=attrgetter("step"), default=None)

    def wants(self, candidate: Best) -> bool:
        """Return whether the candidate is the best so far, or of another measure; NaN never is."""
        best = self.newest()
        if best is None or (best.measure, best.evaluated) != (
            candidate.measure,
            candidate.evaluated,
        ):
            return not math.isnan(candidate.value)
        return candidate.value > best.value and candidate.step != best.step

    def begin(self) -> Path:
        """Return an empty folder to save the model into."""
        checkpoints.remove(self.unfinished, FILE)
        self.unfinished.mkdir(parents=True)
        return self.unfinished

    def finish(self, best: Best, listings: Sequence[Mapping[str, int]]) -> None:
        """Make the saved model the best one, also after a kill; ``listings`` as for :func:`checkpoints.wait_for`."""
        for name in checkpoints.wait_for(
            self.unfinished, f"the best model, of step {best.step}", listings
        ):
            with (self.unfinished / name).open("rb") as file:
                os.fsync(file.fileno())
        checkpoints.write_json(self.unfinished / FILE, asdict(best))
        target = self._folder_of(best)
        checkpoints.remove(target, FILE)
        self.unfinished.rename(target)
        checkpoints.flush_folders([target, self.folder])
        self._link_to(best)
        self._prune()

    def settle(self, step: int) -> None:
        """Note that no resume goes further back than ``step``."""
        self._resumable = step
        self._prune()

    def roll_back(self, step: int) -> None:
        """Undo what came after ``step``, from which the run continues; 0 undoes everything."""
        self._resumable = step
        best = self.newest(until=step)
        linked = read(self.link)
        if best is not None:
            self._link_to(best)
        elif linked is not None and linked.run == self.run and linked.step > step:
            self._unlink()
        for path, undone in self._models():
            if undone.step > step:
                checkpoints.remove(path, FILE)
        checkpoints.remove(self.unfinished, FILE)

    def _models(self) -> Iterator[tuple[Path, Best]]:
        """Yield the whole models of this run, each with its folder."""
        for path in self.folder.glob("step*"):
            best = read(path)
            if best is not None and best.run == self.run:
                yield path, best

    def _folder_of(self, best: Best) -> Path:
        return self.folder / f"step{best.step}-{best.run[:8]}"

    def _link_to(self, best: Best) -> None:
        if self.link.exists() and not self.link.is_symlink():
            self._unlink()
        new = self.folder / "link"
        new.unlink(missing_ok=True)
        new.symlink_to(Path(self.folder.name) / self._folder_of(best).name)
        new.replace(self.link)  # at no moment is there no link
        checkpoints.flush_folders([self.link.parent])

    def _unlink(self) -> None:
        if not self.link.is_symlink() and read(self.link) is None:
            raise RunError(
                f"{self.link} is in the way of the link to the run's best model; move it elsewhere"
            )
        # A folder in a copy of the run that has followed the link
        checkpoints.remove(self.link, FILE)

    def _prune(self) -> None:
        """Delete all but the best model, and the best model up to the newest whole checkpoint."""
        kept = set()
        for best in (self.newest(), self.newest(self._resumable)):
            if best is not None:
                kept.add(self._folder_of(best))
        for path in self.folder.glob("step*"):
            if kept and path not in kept:
                checkpoints.remove(path, FILE)
