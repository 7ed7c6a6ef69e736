"""Generation ahead of the training: a thread makes the next batches while the trainer trains.

The trainer gets the batches in the order of making. docs/async.md defines policy versions and lags.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Batch = TypeVar("_Batch")


class Ahead(Generic[_Batch]):
    """Makes at most ``size`` batches ahead of the training. The policy does not change while a batch is made.

    The lag of a batch is at most ``size``, since a batch is begun only after the one ``size`` before it was taken.

    ``make`` is called in the thread with the step that the batch is for. It returns the batch and whether the batch
    fills the step (an empty one does not), or None to end the making.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[_Batch, bool] | None],
        *,
        step: int,  # the last trained one
        version: Callable[[], int],  # the number of training steps that the policy has seen
        size: int = 1,  # batches that may be begun and not yet taken
        max_lag: int | None = None,  # a batch is begun only once its lag cannot exceed this
        overlap: bool = False,  # the policy may change while a batch is made (partial rollouts)
    ) -> None:
        self._make, self._version, self._max_lag, self._overlap = make, version, max_lag, overlap
        self._step, self._slots = step + 1, size
        self._making = self._updating = self._closed = self._ended = False
        self._error: BaseException | None = None
        self._batches: deque[tuple[_Batch, bool]] = deque()
        self._changed = threading.Condition()
        # A daemon, since the end of the training must not wait for a batch.
        self._thread = threading.Thread(target=self._run, name="generation ahead", daemon=True)
        self._thread.start()

    def take(self) -> _Batch | None:
        """Return the next batch, None after the last; raise the error that ended the making."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._ended)
            if not self._batches:
                if self._error is not None:
                    raise self._error
                return None
            batch, fills_step = self._batches.popleft()
            self._slots += fills_step
            self._changed.notify_all()
        return batch

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Let the policy change: no batch is made meanwhile, unless the two may overlap."""
        with self._changed:
            self._updating = not self._overlap  # the update comes before the next batch
            self._changed.wait_for(lambda: self._overlap or not self._making or self._ended)
        try:
            yield
        finally:
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def close(self) -> None:
        """Begin no further batch. The batch that is being made is not used."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._may_begin)
                    if self._closed:
                        return
                    self._slots -= 1  # take() gives the slot back
                    self._making = True
                made = self._make(self._step)
                with self._changed:
                    self._making = False
                    if made is None:
                        return
                    self._slots += not made[1]
                    self._step += made[1]
                    self._batches.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # take() raises it in the trainer's thread
            self._error = error
        finally:
            with self._changed:
                self._making, self._ended = False, True
                self._changed.notify_all()

    def _may_begin(self) -> bool:  # or end
        fresh_enough = self._max_lag is None or self._step - 1 - self._version() <= self._max_lag
        return self._closed or (self._slots > 0 and not self._updating and fresh_enough)
