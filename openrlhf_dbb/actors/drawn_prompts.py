"""Prompts in the order of a strategy that draws them; in the place of OpenRLHF's data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from openrlhf_dbb.core.step import Key
from openrlhf_dbb.core.strategies import Drawn, Predictive, Sampler


class DrawnPrompts:
    """Yields the prompts of OpenRLHF's data set that a strategy draws: draw, text, label, images; each a list of one.

    A pass ends when as many prompts were drawn as the data has rows. The sampler's state holds the prompts that are
    drawn and not yet yielded.
    """

    def __init__(
        self, data: Any, sampler: Sampler, prompt_ids: Mapping[Key, int], predictive: Callable[[], Predictive]
    ) -> None:
        self.dataset, self._sampler, self._predictive = data, sampler, predictive
        self._rows: dict[int, int] = {}
        for row, (prompt, label) in enumerate(zip(data.prompts, data.labels, strict=True)):
            self._rows.setdefault(prompt_ids[prompt, str(label)], row)  # equal rows share a posterior
        self._place = 0

    def __len__(self) -> int:
        return len(self.dataset.prompts)

    def __iter__(self) -> Iterator[tuple[list[Drawn], list[str], list[Any], list[Any]]]:
        while self._place < len(self):
            drawn = self._sampler.next_prompt(self._predictive)
            self._place += 1
            data, row = self.dataset, self._rows[drawn.prompt_id]
            yield [drawn], [data.prompts[row]], [data.labels[row]], [data.images[row]]
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]
