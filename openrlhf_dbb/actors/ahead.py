"""Generation ahead of the training (``--train.async_enable``): a thread of the driver fills the next rollout batches.

OpenRLHF has two actors, a queue and a lock for it. Here one process draws, generates, trains and stores, so that a
kill ends all of it at once. A checkpoint of step t holds the data position right after the batch of step t: groups that
were drawn later are drawn again after a resume.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from openrlhf_dbb.actors.generation import PolicyVersions, RolloutBatch, RolloutGenerator
from openrlhf_dbb.core.ahead import Ahead


@dataclass(frozen=True)
class _Filled:
    """What OpenRLHF's loop gets of a call, and the generator as it was right after."""

    result: tuple[RolloutBatch, float | None, int, bool]
    state: dict[str, Any]
    position: dict[str, Any]
    metrics: dict[str, float]


class GenerationAhead:
    """Stands where the trainer has its :class:`RolloutGenerator`: hands out, in order, what that one made in a thread.

    What the trainer sees of the generator (state, position, counts) belongs to the batch that it was handed last, not
    to those that are made meanwhile: a checkpoint continues right after its own step.

    Args:
        generator: makes the batches.
        versions: those that the generator was made with.
        args: OpenRLHF's, with ours.
    """

    def __init__(self, generator: RolloutGenerator, versions: PolicyVersions, args: Any) -> None:
        self._generator, self._versions, self._args = generator, versions, args
        self._ahead: Ahead[_Filled] | None = None
        self._episode = 0
        self._last: _Filled | None = None
        self._seen = (0.0, 0.0)
        self._watch, generator.watch = generator.watch, self._watch_if_awaited
        self._awaited = False
        self.score_more, self.generate_eval_samples = generator.score_more, generator.generate_eval_samples
        self.sample = generator.sample

    @property
    def generated(self) -> int:
        """Training rollouts generated up to the last batch handed out."""
        return int(self.state()["generated"])

    @property
    def with_log_probs(self) -> bool:
        """Whether training rollouts come with vLLM's log-probs, even if the loss does not use them."""
        return self._generator.with_log_probs

    @with_log_probs.setter
    def with_log_probs(self, value: bool) -> None:
        if self._ahead is None:
            self._generator.with_log_probs = value

    def begin_at(self, episode: int, step: int) -> None:
        """Where the training starts: pass over the data, and training steps behind it."""
        self._episode = episode
        self._versions.now = self._versions.first = step

    def generate_samples(self, **generate_kwargs: Any) -> tuple[RolloutBatch, float | None, int, bool]:
        """The next batch, as :meth:`RolloutGenerator.generate_samples` made it; the first call begins the making.

        Raises:
            BaseException: as that one.
        """
        if self._ahead is None:
            train = self._args.train
            self._ahead = Ahead(
                lambda step: self._fill(step, generate_kwargs),
                step=self._versions.now,
                version=lambda: self._versions.now,
                size=train.async_queue_size,
                max_lag=train.max_lag,
                overlap=train.partial_rollout_enable,
            )
            self._seen = time.monotonic(), 0.0
            self._ahead.start()
        self._awaited = True
        filled = self._ahead.take()
        self._awaited = False
        if filled is None:  # the last pass was the last
            return RolloutBatch(), None, 0, True
        self._last = filled
        return filled.result

    def metrics(self) -> dict[str, float]:
        """Numbers to be logged after a step: the strategy's, and how generation and training overlap.

        async/waiting: batches that were made and wait; async/generating: share of the time since the step before in
        which a batch was being made, in [0, 1].
        """
        assert self._ahead is not None and self._last is not None
        (then, busy_then), (now, busy) = self._seen, (time.monotonic(), self._ahead.busy)
        self._seen = now, busy
        share = (busy - busy_then) / (now - then)
        return self._last.metrics | {"async/waiting": float(self._ahead.waiting), "async/generating": share}

    def state(self) -> dict[str, Any]:
        """Of the generator after the last batch handed out."""
        return self._generator.state() if self._last is None else self._last.state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._generator.load(state)

    def position(self, episode: int) -> dict[str, Any]:
        """Where in the data a checkpoint of the last batch handed out continues."""
        return self._generator.position(episode) if self._last is None else self._last.position

    def unused(self) -> tuple[int, int]:
        """Rollouts that no step has used, and their tokens; to be asked after the end."""
        return self._generator.unused()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While the policy's weights are sent: generation waits, or with partial rollouts stands still and goes on."""
        if self._ahead is None:  # the engines get what a checkpoint held
            yield
            return
        engines = self._generator.vllm_engines
        partial = self._args.train.partial_rollout_enable
        with self._ahead.updating():
            if partial:
                ray.get([engine.pause_generation.remote() for engine in engines])
            try:
                yield
                ray.get([engine.note_update.remote() for engine in engines])
                self._versions.now += 1
            finally:
                if partial:
                    ray.get([engine.resume_generation.remote() for engine in engines])

    def close(self) -> None:
        """No further batch is wanted."""
        if self._ahead is not None:
            self._ahead.close()

    def _fill(self, step: int, generate_kwargs: dict[str, Any]) -> tuple[_Filled, bool] | None:
        """In the thread: the batch of a step, or what a pass that has ended leaves; None after the last pass."""
        if self._episode >= self._args.train.num_episodes:
            return None
        if self._args.train.max_lag is not None:
            self._generator.drop_stale(step - 1 - self._args.train.max_lag)
        result = self._generator.generate_samples(**generate_kwargs)
        filled = _Filled(
            result, self._generator.state(), self._generator.position(self._episode), self._generator.metrics()
        )
        if result[0].trained:
            self._generator.with_log_probs = False  # of this start's first batch, whose policy is the trainer's
        self._episode += result[3]
        return filled, bool(result[0].trained)

    def _watch_if_awaited(self, kept: int) -> None:
        if self._awaited:
            self._watch(kept)
