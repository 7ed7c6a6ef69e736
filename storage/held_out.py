"""Held-out accuracy of a run during its training, by step and by prompt.

Axes: T evaluated steps, P prompts of a benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.evaluations import TRAINING
from storage.records import RunRecord
from storage.store import PosteriorStore

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """The evaluations made during a run's training.

    Attributes:
        step: (T,) int64, ascending; 0 is before the training. T >= 1.
        accuracy: (T,) mean score over verified responses, then over prompts, then over benchmarks.
        benchmarks: at the last of these steps, how many; each has the same weight.
        prompts: at that step, of all benchmarks together.
        samples: responses to each prompt.
    """

    step: NDArray[np.int64]
    accuracy: Floats
    benchmarks: int
    prompts: int
    samples: int

    @property
    def best(self) -> int:
        """Index of the highest accuracy; of the first one, if there are several."""
        return int(np.argmax(self.accuracy))


def held_out(store: PosteriorStore, run: RunRecord) -> HeldOut | None:
    """Held-out accuracy over the steps of a run; None if it was not measured.

    Steps at which a benchmark has no verified response are left out.
    """
    query = """SELECT step, avg(accuracy) AS accuracy, count(*) AS benchmarks, CAST(sum(prompts) AS BIGINT) AS prompts,
                      max(samples * repeats) AS samples
               FROM evaluations WHERE run_id = :run AND name = :name AND step IS NOT NULL
               GROUP BY step HAVING count(accuracy) = count(*) ORDER BY step"""
    rows = store.query(query, run=run.run_id, name=TRAINING)
    if not rows:
        return None
    return HeldOut(
        step=np.array([row.step for row in rows], dtype=np.int64),
        accuracy=np.array([row.accuracy for row in rows], dtype=np.float64),
        benchmarks=rows[-1].benchmarks,
        prompts=rows[-1].prompts,
        samples=rows[-1].samples,
    )


def held_out_prompts(store: PosteriorStore, run: RunRecord, step: int) -> dict[str, tuple[NDArray[np.int64], Floats]]:
    """Held-out accuracy after a step, prompt by prompt.

    Returns:
        By benchmark: (P,) prompt ids, ascending, and (P,) the accuracy of each in [0, 1] for scores of 0 and 1;
        prompts without a verified response are left out.
    """
    query = """SELECT benchmark, prompt_id, avg(successes / verified) AS accuracy FROM evaluation_results
               WHERE run_id = :run AND name = :name AND step = :step AND verified > 0
               GROUP BY benchmark, prompt_id ORDER BY benchmark, prompt_id"""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in store.query(query, run=run.run_id, name=TRAINING, step=step):
        found.setdefault(row.benchmark, []).append((row.prompt_id, row.accuracy))
    return {
        benchmark: (np.array([ids for ids, _ in rows]), np.array([accuracy for _, accuracy in rows]))
        for benchmark, rows in found.items()
    }
