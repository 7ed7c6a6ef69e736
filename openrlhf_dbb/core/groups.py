"""The groups of a step: all rollouts of a prompt.

Axes: R rollouts (rows) of the step; P distinct prompts among them; V of these prompts that have a verified rollout; G
rollouts of the largest group.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.arrays import Floats, Positions


@dataclass(frozen=True)
class Groups:
    """The groups of a step: all rollouts of a prompt form one group, wherever they stand."""

    prompts_P: Positions  # in the run's prompts, ascending
    verified_P: NDArray[np.bool_]  # whether any rollout of the group was verified
    group_R: Positions  # of each rollout
    slot_R: Positions  # its place in the group

    @classmethod
    def by_prompt(cls, prompts_R: Positions, verified_R: NDArray[np.bool_]) -> "Groups":
        """Group rollouts by the positions of their prompts."""
        prompts_P, group_R = np.unique(prompts_R, return_inverse=True)
        verified_P = np.bincount(group_R, verified_R) > 0
        return cls(prompts_P, verified_P, group_R, slot_R=earlier_visits(group_R))

    @property
    def prompts_V(self) -> Positions:
        """The positions of the prompts that have a verified rollout."""
        return self.prompts_P[self.verified_P]

    def matrix(self, values_R: Floats) -> Floats:
        """Return the values of the verified groups' rollouts, (V, G); NaN fills the smaller groups."""
        size = int(self.slot_R.max()) + 1
        values_P_G = np.full((len(self.prompts_P), size), np.nan)
        values_P_G[self.group_R, self.slot_R] = values_R
        return values_P_G[self.verified_P]

    def rows(self, values_V: NDArray[Any]) -> Floats:
        """Return each rollout's value, (R,); 0 in a group without a verified rollout.

        ``values_V`` has a value for each group, (V,), or for each rollout of a group, (V, G).
        """
        values_P = np.zeros((len(self.prompts_P), *values_V.shape[1:]))
        values_P[self.verified_P] = values_V
        if values_P.ndim == 1:
            return values_P[self.group_R]
        return values_P[self.group_R, self.slot_R]


def earlier_visits(prompt_R: Positions) -> Positions:
    """Return for each entry the number of earlier entries with the same value, (R,)."""
    order = np.argsort(prompt_R, kind="stable")
    ascending = prompt_R[order]
    earlier = np.empty(len(prompt_R), dtype=np.int64)
    earlier[order] = np.arange(len(prompt_R)) - np.searchsorted(ascending, ascending)
    return earlier
