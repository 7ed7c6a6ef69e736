"""Two runs on the held-out prompts they share: the paired difference of their last evaluations.

Axes: P held-out prompts of both runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.evaluation import statistics as st
from storage import PosteriorStore, RunRecord
from storage.held_out import held_out, held_out_prompts


@dataclass(frozen=True)
class HeldOutDifference:
    """Held-out accuracy of the second run minus that of the first, after the last evaluated step of each.

    Attributes:
        first, second: accuracy of each over the shared prompts, benchmarks weighted equally.
        steps: after which step of each.
        samples: responses to each prompt, of each.
        prompts: shared by both, of all shared benchmarks together.
        difference: in [-1, 1]; low, high: its 95 % interval over prompts, NaN for a single prompt.
        p: of the paired t-test over prompts, two-sided; NaN for a single prompt.
    """

    first: float
    second: float
    steps: tuple[int, int]
    samples: tuple[int, int]
    prompts: int
    difference: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        if not self.p < st.ALPHA:
            return "no difference shown"
        return "the second is higher" if self.difference > 0 else "the second is lower"


def held_out_difference(store: PosteriorStore, first: RunRecord, second: RunRecord) -> HeldOutDifference | None:
    """Compare the last evaluations of two runs; None unless both were measured, on some prompt of both."""
    measured, other_measured = held_out(store, first), held_out(store, second)
    if measured is None or other_measured is None:
        return None
    steps = int(measured.step[-1]), int(other_measured.step[-1])
    mine, other = held_out_prompts(store, first, steps[0]), held_out_prompts(store, second, steps[1])
    pairs = []
    for benchmark in sorted(mine.keys() & other.keys()):
        (ids, accuracy_P), (other_ids, other_P) = mine[benchmark], other[benchmark]
        _, at, at_other = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
        if len(at):
            pairs.append((accuracy_P[at], other_P[at_other]))
    if not pairs:
        return None
    test = st.stratified_t([second_P - first_P for first_P, second_P in pairs], two_sided=True)
    low, high = st.t_interval(test)
    return HeldOutDifference(
        first=float(np.mean([first_P.mean() for first_P, _ in pairs])),
        second=float(np.mean([second_P.mean() for _, second_P in pairs])),
        steps=steps,
        samples=(measured.samples, other_measured.samples),
        prompts=sum(len(first_P) for first_P, _ in pairs),
        difference=test.difference,
        low=low,
        high=high,
        p=test.p,
    )
