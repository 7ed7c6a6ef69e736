"""Batches made ahead of the training, in a thread of their own, and which policy makes them.

A step trains on the batch that was made for it, in the order in which they were made. Policy version v is the policy
after v training steps; the batch of step s is on-policy if version s - 1 made it, and its lag is s - 1 - v.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Made = TypeVar("_Made")


class Ahead(Generic[_Made]):
    """Makes what the training takes, at most ``size`` batches ahead, and keeps the policy still meanwhile.

    With ``size`` batches of one policy each, the lag of a batch is at most ``size``: it may be begun when the training
    has taken the one ``size`` before it. ``max_lag`` makes it wait longer.

    Args:
        make: called in the thread with the step that a batch is for; the batch, and whether it fills that step (an
            empty one does not). None ends it all.
        step: the last step trained; the first batch is for the next one.
        version: training steps that the policy has seen; asked each time.
        size: batches that may be begun and not yet taken, >= 1.
        max_lag: a batch is begun only once its lag cannot exceed this, >= 0; None: no limit.
        overlap: the policy may change while a batch is made (partial rollouts).

    Attributes:
        busy: seconds in which a batch was being made.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[_Made, bool] | None],
        *,
        step: int,
        version: Callable[[], int],
        size: int = 1,
        max_lag: int | None = None,
        overlap: bool = False,
    ) -> None:
        self._make, self._version, self._max_lag, self._overlap = make, version, max_lag, overlap
        self._step, self._slots = step + 1, size
        self._making_since: float | None = None
        self._made_for = 0.0
        self._updating = self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._batches: deque[tuple[_Made, bool]] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="generation ahead", daemon=True)

    def start(self) -> None:
        """Begin to make batches."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Batches made and not yet taken."""
        return len(self._batches)

    @property
    def busy(self) -> float:
        since = self._making_since
        return self._made_for + (time.monotonic() - since if since is not None else 0.0)

    def take(self) -> _Made | None:
        """The next batch, in the order of making; None after the last.

        Raises:
            BaseException: what ended the making, once all batches made before it are taken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._ended)
            if not self._batches:
                if self._error is not None:
                    raise self._error
                return None
            made, fills = self._batches.popleft()
            self._slots += fills
            self._changed.notify_all()
        return made

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While the policy changes: no batch is made meanwhile, unless the two may overlap."""
        with self._changed:
            self._updating = not self._overlap  # comes before the next batch
            self._changed.wait_for(lambda: self._overlap or self._making_since is None or self._ended)
        try:
            yield
        finally:
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def close(self) -> None:
        """Make no further batch; what is being made is given up with this process, or ends unused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._begin():
                made = self._make(self._step)
                with self._changed:
                    self._pause_clock()
                    if made is None:
                        return
                    _, fills = made
                    self._slots += not fills
                    self._step += fills
                    self._batches.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # the training raises it; after close() nobody is left to hear it
            self._error = error
        finally:
            with self._changed:
                self._pause_clock()
                self._ended = True
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait until the next batch may be begun; False if none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_begin())
            if self._closed:
                return False
            self._slots -= 1
            self._making_since = time.monotonic()
        return True

    def _may_begin(self) -> bool:
        fresh_enough = self._max_lag is None or self._step - 1 - self._version() <= self._max_lag
        return self._slots > 0 and not self._updating and fresh_enough

    def _pause_clock(self) -> None:
        if self._making_since is not None:
            self._made_for += time.monotonic() - self._making_since
            self._making_since = None
