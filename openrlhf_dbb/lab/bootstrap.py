"""Which of several candidates is best, and how sure that is: a bootstrap over prompts.

Axes: P prompts, C candidates, B bootstrap draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimators.base import Floats
from openrlhf_dbb.lab.visits import Integers

DRAWS = 1000
_CHUNK = 50  # draws at a time: 50 x 17,280 prompts are 7 MB


@dataclass(frozen=True)
class Bootstrap:
    """Mean loss of C candidates, and how it varies with the choice of prompts.

    Attributes:
        mean_C: over visits.
        mean_B_C: over the visits of prompts resampled with replacement; in a draw all candidates see the same prompts.
    """

    mean_C: Floats
    mean_B_C: Floats

    @property
    def best(self) -> int:
        """Position of the candidate with the lowest mean."""
        return int(self.mean_C.argmin())

    def excess(self, over: int) -> tuple[Floats, Floats, Floats]:
        """Loss beyond that of candidate ``over``, and the ends of its 95 % interval; each (C,)."""
        low, high = np.percentile(self.mean_B_C - self.mean_B_C[:, [over]], [2.5, 97.5], axis=0)
        return self.mean_C - self.mean_C[over], low, high

    def wins(self, names: Sequence[str]) -> dict[str, float]:
        """By name, the share of the draws in which the best candidate has that name."""
        winners = np.asarray(names)[self.mean_B_C.argmin(axis=1)]
        return {name: float((winners == name).mean()) for name in dict.fromkeys(names)}

    def best_value(self, members: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
        """The value (its discount, for example) of the best of some candidates, and the ends of its 95 % interval.

        Args:
            members: positions of the candidates.
            values: one for each of them.
        """
        among, of = list(members), np.asarray(values)
        low, high = np.percentile(of[self.mean_B_C[:, among].argmin(axis=1)], [2.5, 97.5], method="nearest")
        return float(of[self.mean_C[among].argmin()]), float(low), float(high)


def bootstrap(losses: Sequence[Floats], prompt: Integers, *, seed: int = 0) -> Bootstrap:
    """Compare candidates by their mean loss over visits.

    Visits of one prompt depend on each other, so prompts are resampled, not visits.

    Args:
        losses: of each of the C candidates, (V,), lower is better; NaN where a visit does not count, which must be
            the same visits for all.
        prompt: (V,) position of the visit's prompt.
    """
    counted = ~np.isnan(losses[0])
    prompts, member = np.unique(prompt[counted], return_inverse=True)
    sums_P_C = np.stack([np.bincount(member, loss[counted], len(prompts)) for loss in losses], axis=1)
    visits_P = np.bincount(member, minlength=len(prompts))
    rng = np.random.default_rng(seed)
    means = []
    for start in range(0, DRAWS, _CHUNK):
        size = min(_CHUNK, DRAWS - start)
        chosen = rng.integers(len(prompts), size=(size, len(prompts))) + len(prompts) * np.arange(size)[:, None]
        times_B_P = np.bincount(chosen.ravel(), minlength=size * len(prompts)).reshape(size, -1)
        means.append(times_B_P @ sums_P_C / (times_B_P @ visits_P)[:, None])
    return Bootstrap(sums_P_C.sum(axis=0) / visits_P.sum(), np.concatenate(means))
