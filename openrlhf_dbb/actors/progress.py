"""How far a training is, for the driver's progress line.

The trainer notes the phase it is in. The policy's first rank is busy in one long call while it computes log-probs or
trains, so it counts its micro-batches in Ray's key-value store, which the driver reads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.experimental import internal_kv

from openrlhf_dbb.actors.health import StepOutcome
from openrlhf_dbb.core.best_model import Best

LOG_PROBS, TRAINING, GENERATING, EVALUATING = "log-probs", "training", "generating", "evaluating"
COUNTED_BY_POLICY = (LOG_PROBS, TRAINING)
COUNTED_BY_ENGINES = (GENERATING, EVALUATING)

_NAMESPACE = b"openrlhf_dbb"
_WRITE_EVERY_S = 0.5  # a micro-batch of a small model takes milliseconds


@dataclass
class Progress:
    """What the driver's progress line and its summary show. Steps are global steps.

    Attributes:
        step: steps that are trained and stored.
        total: steps that the run will have.
        phase: what the training is doing now.
        size: rollouts or micro-batches of the phase; 0 if they are not counted.
        since: when the phase began, of ``time.monotonic()``.
        ends: when the first step began, and when each step of this start ended.
        reward: mean reward of the last step.
        accuracy: held-out accuracy by step.
        outcomes: how the rollouts of each step of this start came out.
        best, best_folder: the best model, once the run has finished.
        warnings: what was wrong with the run at its end, once it has finished.
    """

    step: int = 0
    total: int = 0
    phase: str = "starting"
    size: int = 0
    since: float = field(default_factory=time.monotonic)
    ends: list[float] = field(default_factory=list)
    reward: float | None = None
    accuracy: dict[int, float] = field(default_factory=dict)
    outcomes: list[StepOutcome] = field(default_factory=list)
    best: Best | None = None
    best_folder: Path | None = None
    warnings: list[str] = field(default_factory=list)

    def enter(self, phase: str, size: int = 0) -> str:
        """Begin a phase with ``size`` rollouts or micro-batches, and return the one before."""
        before = self.phase
        self.size = size
        if phase != before:
            self.phase, self.since = phase, time.monotonic()
        return before


class MicroBatchCounter:
    """Counts the micro-batches of a phase where the driver can read them; used by the policy's first rank."""

    def __init__(self) -> None:
        self._phase, self._count, self._written = "", 0, 0.0

    def add(self, phase: str) -> None:
        """Count one more micro-batch of a phase; a new phase begins at 1."""
        self._count = self._count + 1 if phase == self._phase else 1
        self._phase, now = phase, time.monotonic()
        if now - self._written > _WRITE_EVERY_S:
            self._written = now
            internal_kv._internal_kv_put(_key(), f"{phase} {self._count}", namespace=_NAMESPACE)


def micro_batches(phase: str) -> int:
    """Return how many micro-batches of a phase the policy has done; 0 if it has counted none of this phase yet."""
    written = internal_kv._internal_kv_get(_key(), namespace=_NAMESPACE)
    counted, _, count = (written or b"").decode().rpartition(" ")
    return int(count) if counted == phase else 0


def _key() -> str:
    return f"progress of job {ray.get_runtime_context().get_job_id()}"  # the driver and its actors are one job
