"""Generation ahead of the training (``--train.async_enable``), in a thread of the driver.

OpenRLHF has two actors for it. Here a kill ends everything at once, and a checkpoint knows which groups were used.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from openrlhf_dbb.actors.generation import RolloutGenerator
from openrlhf_dbb.actors.rollout_batch import RolloutBatch
from openrlhf_dbb.core.ahead import Ahead

_Result = tuple[RolloutBatch, float | None, int, bool]  # see RolloutGenerator.generate_samples


class GenerationAhead:
    def __init__(self, generator: RolloutGenerator, args: Any, episode: int, step: int) -> None:
        """Start with this pass over the data, after ``step`` training steps."""
        self._generator, self._args, self._episode = generator, args, episode
        generator.version = step
        self._ahead: Ahead[_Result] | None = None

    def generate_samples(self, **generate_kwargs: Any) -> _Result:
        """Return the next batch of :meth:`RolloutGenerator.generate_samples`, or raise its error."""
        if self._ahead is None:
            train = self._args.train
            self._ahead = Ahead(
                lambda step: self._fill(step, generate_kwargs),
                step=self._generator.version,
                version=lambda: self._generator.version,
                size=train.async_queue_size,
                max_lag=train.max_lag,
                overlap=train.partial_rollout_enable,
            )
        return self._ahead.take() or (RolloutBatch(), None, 0, True)  # None: the last pass is over

    def _fill(self, step: int, generate_kwargs: dict[str, Any]) -> tuple[_Result, bool] | None:
        """Run in the thread: return the batch of a step or the end of a pass; None after the last pass."""
        if self._episode >= self._args.train.num_episodes:
            return None
        if self._args.train.max_lag is not None:
            self._generator.drop_stale(step - 1 - self._args.train.max_lag)
        result = self._generator.generate_samples(**generate_kwargs)
        self._episode += result[-1]
        return result, bool(result[0])

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Send weights inside: generation waits, or with partial rollouts stands still."""
        if self._ahead is None:  # the engines get the weights of the checkpoint
            yield
            return
        engines = self._generator.vllm_engines
        partial = self._args.train.partial_rollout_enable
        with self._ahead.updating():
            if partial:
                ray.get([engine.pause_generation.remote() for engine in engines])
            try:
                yield
                self._generator.version += 1
            finally:
                if partial:
                    ray.get([engine.resume_generation.remote() for engine in engines])

    def close(self) -> None:
        """Ask for no further batch."""
        if self._ahead is not None:
            self._ahead.close()
