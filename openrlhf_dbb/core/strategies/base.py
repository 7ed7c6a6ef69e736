"""The plain strategy, which the others change: every prompt is generated for, every group is trained on.

Axes: N rollouts of a group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class SamplingError(RuntimeError):
    """No batch can be filled, and going on would only cost rollouts."""


class Sampling:
    """How a rollout batch is filled with groups.

    A step draws prompts in rounds of :meth:`round_size`, leaving out those that :meth:`skips`; each of the others
    gets a group of rollouts, which :meth:`keeps` judges, until a batch of groups is kept. Surplus is discarded.

    Attributes:
        batch: groups of a batch.
        replaces: whether a rejected group is replaced at once by the next prompt, rather than in another round.
    """

    replaces = False

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def skips(self, prompt: int) -> bool:
        """Whether a drawn prompt is passed over before anything is generated for it."""
        return False

    def round_size(self, missing: int) -> int:
        """Prompts to generate for in the next round.

        Args:
            missing: groups that the batch still needs, >= 1.

        Raises:
            SamplingError: the strategy gives up.
        """
        return missing

    def keeps(self, prompt: int, scores_N: NDArray[np.float64]) -> bool:
        """Note a generated group and tell whether it may be trained on.

        Args:
            scores_N: the verifier's scores before any penalty; NaN where missing.
        """
        return True

    def end_round(self) -> None:
        """All groups of a round have been judged."""

    def end_step(self) -> None:
        """The batch is full and will be trained on."""

    def end_pass(self) -> None:
        """Every prompt has been drawn once more.

        Raises:
            SamplingError: the strategy gives up.
        """

    def metrics(self) -> dict[str, float]:
        """Numbers to be logged after a step, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold; taken between steps."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""


def varies(scores_N: NDArray[np.float64]) -> bool:
    """Whether the verified scores of a group differ at all; without two of them they do not."""
    known = scores_N[~np.isnan(scores_N)]
    return bool(len(known) and known.min() < known.max())
