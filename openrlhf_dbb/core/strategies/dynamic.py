"""Dynamic sampling: groups that agree wholly are not trained on, and others take their place.

Source: DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies.base import Sampling, SamplingError, varies


class DynamicSampling(Sampling):
    """Keeps groups whose scores vary.

    Refill ``one_for_one``: every rejected group is replaced by one new prompt, so that no rollout of a kept group is
    wasted. ``batches``: generation batches of ``multiple`` rollout batches, as published; surplus is discarded.

    Args:
        batch: groups of a batch.
        refill: "one_for_one" or "batches".
        multiple: size of a generation batch, in rollout batches; >= 1.
        max_rounds: generation batches that a step may take (0: any number); for ``batches``.
        within: the mean score must lie strictly between these two; None: wherever it likes.
    """

    def __init__(
        self, batch: int, refill: str, multiple: int, max_rounds: int, within: tuple[float, float] | None = None
    ) -> None:
        super().__init__(batch)
        self.replaces = refill == "one_for_one"
        self._round = multiple * batch
        self._most = max_rounds * self._round
        self._within = within
        self._generated = self._kept = 0

    def round_size(self, missing: int) -> int:
        if self.replaces:
            return missing
        if 0 < self._most <= self._generated:
            raise SamplingError(
                f"{self._generated} groups were generated for one step, {self._kept} of them with different rewards, "
                f"{self.batch} are needed; the data is too easy or too hard for the model, else raise "
                "--dynamic.max_rounds (0: no limit)"
            )
        # The end of a pass cuts a generation batch short; the limit counts prompts, so that this costs no round.
        return min(self._round, self._most - self._generated) if self._most else self._round

    def keeps(self, prompt: int, scores_N: NDArray[np.float64]) -> bool:
        kept = varies(scores_N)
        if kept and self._within is not None:
            kept = self._within[0] < float(np.nanmean(scores_N)) < self._within[1]
        self._generated += 1
        self._kept += kept
        return kept

    def end_step(self) -> None:
        self._generated = self._kept = 0
