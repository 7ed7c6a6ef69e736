"""Generation ahead of the training (``--train.async_enable``), in a thread; docs/training.md defines versions and lags.

OpenRLHF has two actors for it. Here a kill ends everything at once, and a checkpoint knows which groups were used.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import ray

from openrlhf_dbb.actors.generation import Generated, RolloutBatch, RolloutGenerator

THREAD = "generation ahead"


class GenerationAhead:
    """Makes batches ahead of the training, at most ``--train.async_queue_size``; the trainer gets them in that order.

    The lag of a batch is at most that size, since a batch is begun only after the one so many before it was taken.
    """

    def __init__(self, generator: RolloutGenerator, args: Any, episode: int, step: int) -> None:
        """Start with this pass over the data, after ``step`` training steps."""
        self._generator = generator
        self._train = args.train
        self._episode = episode
        generator.filler.version = step
        self._made = step  # of the last batch
        self._taken = step  # likewise
        self._results: deque[Generated] = deque()
        self._error: BaseException | None = None
        self._making = False
        self._updating = False
        self._closed = False
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def generate_samples(self, **generate_kwargs: Any) -> Generated:
        """Return the next batch of :meth:`RolloutGenerator.generate_samples`, or raise its error."""
        if self._thread is None:
            # A daemon, since the end of the training must not wait for a batch.
            self._thread = threading.Thread(
                target=self._run, args=(generate_kwargs,), name=THREAD, daemon=True
            )
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._ended)
            if not self._results:
                if self._error is not None:
                    raise self._error
                return RolloutBatch(), None, 0, True
            result = self._results.popleft()
            self._taken += bool(result[0])
            self._changed.notify_all()
        return result

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Send weights inside: generation waits, or with partial rollouts stands still."""
        if self._thread is None:  # the engines get the weights of the checkpoint
            yield
            return
        engines = self._generator.vllm_engines
        partial = self._train.partial_rollout_enable
        with self._changed:
            self._updating = not partial  # the update comes before the next batch
            self._changed.wait_for(lambda: partial or not self._making)
        if partial:
            ray.get([engine.pause_generation.remote() for engine in engines])
        try:
            yield
            self._generator.filler.version += 1
        finally:
            if partial:
                ray.get([engine.resume_generation.remote() for engine in engines])
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def close(self) -> None:
        """Begin no further batch. The batch that is being made is not used."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, generate_kwargs: dict[str, Any]) -> None:
        try:
            while self._episode < self._train.num_episodes:
                with self._changed:
                    self._changed.wait_for(self._may_begin)
                    if self._closed:
                        break
                    self._making = True
                if self._train.max_lag is not None:
                    self._generator.filler.drop_stale(self._made - self._train.max_lag)
                result = self._generator.generate_samples(**generate_kwargs)
                with self._changed:
                    self._making = False
                    self._episode += result[-1]
                    self._made += bool(result[0])  # the end of a pass may fill no batch
                    self._results.append(result)
                    self._changed.notify_all()
        except BaseException as error:  # generate_samples() raises it in the trainer's thread
            self._error = error
        with self._changed:
            self._making = False
            self._ended = True
            self._changed.notify_all()

    def _may_begin(self) -> bool:
        """Return whether the next batch may begin, or there is none because this is closed."""
        if self._closed:
            return True
        has_room = self._made - self._taken < self._train.async_queue_size
        max_lag = self._train.max_lag
        is_fresh = max_lag is None or self._made - self._generator.filler.version <= max_lag
        return has_room and is_fresh and not self._updating
