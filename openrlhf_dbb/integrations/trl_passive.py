"""The memory of a training of TRL that nothing changes, ``remember``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from openrlhf_dbb import storage
from openrlhf_dbb.core.posteriors import MemorySupportError, Posteriors
from openrlhf_dbb.core.step import StepExtras
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.trl_memory import Combined, Memory, Response
from openrlhf_dbb.integrations.trl_settings import Settings
from openrlhf_dbb.secrets import own_log

_log = own_log(__name__)


class PassiveMemory(Memory):
    """The memory of :func:`remember`: whatever it cannot take, TRL trains on."""

    _has_ended = False  # on all processes

    def attempt(self, what: str, work: Callable[..., Any], *given: Any) -> None:
        """Do ``work``; if it fails, on all processes, end the memory."""
        if self._has_ended:
            return
        try:
            work(*given)
        except Exception as error:  # nothing that a memory meets may end the training
            self._has_ended = True
            self._end(what, error)

    def record_log(self, logs: dict[str, float]) -> None:
        """Store numbers; a failure ends the memory, and the training goes on."""
        try:
            super().record_log(logs)
        except Exception as error:  # as above; the other processes learn of it with the next batch
            self._end("storing what TRL logged", error)

    def _end(self, what: str, error: Exception) -> None:
        """Close the run, so that it can be resumed, and say once what is lost."""
        self.trainer._logs["extra"].pop("posterior_mean", None)
        if self._opened is None:  # not the first process, or it has said so
            return
        run = self.run
        self._opened = None
        self.trainer.posteriors = None
        lost = f"no step after {run.step} of run {run.run.record.name!r} is remembered; the training goes on without"
        try:
            _give_up(run, reachable=not isinstance(error, storage.StoreError))
        except Exception as failure:  # nothing that a memory meets may end the training
            lost += f" (the run could not be closed: {failure})"
        _log.warning(
            "remembering has ended: %s failed: %s: %s; %s", what, type(error).__name__, error, lost
        )

    def open(self) -> None:
        """Start or resume the run, on the first process; with ``resume="auto"`` start one that cannot be resumed."""
        settings = self.settings
        if settings.resume:
            is_needed = settings.resume is True
            record = shared.stored_run(settings.store, self._run_name, create=not is_needed)
            if record is not None and record.parameters.get("memory") == "gaussian":
                self.settings = settings.with_real_memory()  # as after its first step
            try:
                if record is not None or is_needed:
                    self._begin(resume=True)
                    return
            except (storage.StoreError, ValueError) as error:
                if is_needed:
                    raise
                _log.warning("run %r is not continued: %s", self._run_name, error)
        self._begin_new()

    def _begin_new(self) -> None:
        """Begin a run, under another name if this one is taken, and say so."""
        self._begin(resume=False)
        name = self.run.run.record.name
        if name != self._run_name:
            _log.warning(
                "there is a run named %r: this training is remembered as %r; give another run_name=, or resume='auto' "
                "to continue the first",
                self._run_name,
                name,
            )

    def follow(self, checkpoint: str | bool | None) -> None:
        """Take the run to where TRL begins, on the first process.

        That is back to the checkpoint, or to a new run if it is not of this one.
        """
        self.evaluated = (-1, {})
        run = self.run
        name = run.run.record.name
        output = Path(self.trainer.args.output_dir)
        folder = get_last_checkpoint(output) if checkpoint is True else checkpoint
        reason = "it has steps, and this training begins without a checkpoint"
        if folder:
            try:
                self.steps.go_back(Path(folder), output)
                return
            except ValueError as error:
                reason = str(error)
        if run.step:
            _log.warning("run %r is not continued: %s", name, reason)
            _give_up(run, reachable=True)
            self._begin_new()
        elif folder:
            _log.warning("run %r begins without what was before: %s", name, reason)

    def _score(
        self, responses_R: Sequence[Response], combined: Combined, extras: StepExtras, batch: int
    ) -> tuple[list[float], list[float], dict[str, float]]:
        """Do a step; a memory of right and wrong that meets other rewards in the first one begins again."""
        try:
            return super()._score(responses_R, combined, extras, batch)
        except MemorySupportError as error:
            real = self.settings.with_real_memory()
            if self.run.step or real is self.settings:
                raise
            _log.warning("the memory is of real rewards, since %s", error)
            self._begin_again(real)
        return super()._score(responses_R, combined, extras, batch)

    def _begin_again(self, settings: Settings) -> None:
        """Replace a run without steps."""
        former = self.run
        former.store.delete_run(former.run.record)
        former.close()
        self.settings = settings
        self._begin(resume=False)
        if self.evaluated[1]:
            self._record_evaluation()


def _give_up(run: Posteriors, *, reachable: bool) -> None:
    """Close a run; another process may resume it at once if its store is reachable."""
    try:
        if reachable and run.run.record.status != "finished":
            run.settle()
            run.run.release()
    finally:
        run.close()
