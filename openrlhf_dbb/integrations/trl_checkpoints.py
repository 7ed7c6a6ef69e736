"""Which step of which run a checkpoint of TRL belongs to.

transformers writes ``trainer_state.json`` after the model, the optimizer and the random state: a checkpoint in which
it can be read is whole. Our line in it names the run and the step. The store knows the checkpoint's name, and forgets
it when the run goes back behind it: one of steps that were undone is never taken for one of those that followed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.integrations import runs

_log = logging.getLogger(__name__)


class PosteriorState(TrainerCallback, ExportableState):
    """Puts run and step into every checkpoint's ``trainer_state.json``.

    Attributes:
        run: uuid of the run.
        step: of the run, the last one observed.
    """

    def __init__(self, run: str = "", step: int = 0) -> None:
        self.run, self.step = run, step

    def state(self) -> dict[str, Any]:
        """As transformers wants it."""
        return {"args": {"run": self.run, "step": self.step}, "attributes": {}}


def tag(global_step: int) -> str:
    """What a checkpoint of TRL's optimizer step is called: its folder, and its name in the store."""
    return f"{PREFIX_CHECKPOINT_DIR}-{global_step}"


def begin(output_dir: str, name: str) -> None:
    """Let a checkpoint of this name that is there count as not whole: it is about to be overwritten."""
    (Path(output_dir) / name / TRAINER_STATE_NAME).unlink(missing_ok=True)


def newest(output_dir: str, posteriors: Posteriors) -> tuple[str | None, int]:
    """The newest checkpoint of a run that is whole, and its step of the run; (None, 0) if there is none yet.

    Raises:
        ValueError: there is none here, and the run has recorded some.
    """
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        try:
            return str(folder), step_of(folder, posteriors)
        except ValueError as error:
            _log.warning("passed over: %s", error)
    runs.check_beginning(posteriors, Path(output_dir))
    return None, 0


def step_of(folder: Path, posteriors: Posteriors) -> int:
    """The step of the run that a checkpoint's model belongs to.

    Raises:
        ValueError: it is not whole, or not a checkpoint of this run as it now is.
    """
    try:
        saved = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"checkpoint {folder} is not whole: {TRAINER_STATE_NAME}: {error}; use an older one") from None
    ours = saved.stateful_callbacks.get(PosteriorState.__name__)
    if ours is None:
        raise ValueError(
            f"checkpoint {folder} was not saved by PosteriorGRPOTrainer; pass it as model, to begin with new posteriors"
        )
    run, step = ours["args"]["run"], int(ours["args"]["step"])
    runs.check_checkpoint(posteriors, folder, run, step, tag(saved.global_step))
    return step
