"""Fixed shares by source: so many of a run's prompts are of each source, whatever is in the data.

Axes: P prompts of the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.strategies import (
    Drawn,
    Predictive,
    RolloutStrategy,
    RunFacts,
    Sampler,
    parameter,
    register,
)

REST = "rest"
_ROUNDING = 1e-9  # of sums of shares
_EXAMPLE = "write shares.of = math=0.5,code=0.3,rest"


@register
@dataclass(frozen=True)
class Shares(RolloutStrategy):
    """The prompts of each source have a fixed share of all draws, not by chance.

    ``rest`` stands for all prompts of other sources, and gets what is left of 1. The prompts of a
    source come in an order of chance, each once before any of them comes again. The advantages have
    no importance weights: a source counts by its share.

    The next prompt is of the source that is furthest behind (the rule of Sainte-Laguë): after k
    draws a source has had its share of k, rounded to a whole number.
    """

    of: str = parameter(REST, "shares by source, as math=0.5,code=0.3,rest")

    name: ClassVar[str] = "shares"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.of, str):
            raise ValueError(f"shares.of = {self.of!r:.80} is not a text; {_EXAMPLE}")
        _ = self.by_name

    @property
    def by_name(self) -> dict[str, float]:
        """The share of each name, in (0, 1]; of ``rest``, what the others leave.

        Raises:
            ValueError: the text gives no such shares.
        """
        parts = [part.strip() for part in self.of.split(",")]
        named = [part for part in parts if part != REST]
        shares = _shares(named)
        left = 1 - math.fsum(shares.values())
        has_rest = len(named) < len(parts)
        if not has_rest and abs(left) <= _ROUNDING:
            return shares
        if has_rest and left > _ROUNDING and REST not in shares:
            return shares | {REST: left}
        raise ValueError(
            f"shares.of = {self.of!r}: the shares sum to {1 - left:g}; "
            "give shares of 1 in all, or of less and rest"
        )

    @property
    def draws(self) -> bool:
        """True: it chooses the prompts."""
        return True

    @property
    def forecasts(self) -> bool:
        """False: the shares are fixed."""
        return False

    @property
    def needs(self) -> frozenset[Capability]:
        """It draws the prompts, and unless all are one, it knows their sources."""
        if list(self.by_name) == [REST]:
            return frozenset({Capability.DRAW})
        return frozenset({Capability.DRAW, Capability.SOURCES})

    def describe(self) -> str:
        """Return the share of each source."""
        shown = ", ".join(f"{share:.4g} of {name}" for name, share in self.by_name.items())
        return f"prompts by source: {shown}"

    def sampler(self, facts: RunFacts) -> "SharesSampler":
        """Return a sampler that keeps the shares.

        Raises:
            ValueError: the sources of the data do not fit the shares.
        """
        return SharesSampler(self, facts)


class SharesSampler(Sampler):
    """Draws each prompt of the source that is furthest behind its share."""

    kept: ClassVar[tuple[str, ...]] = ("_random", "_drawn", "_orders", "_of_step", "note")

    def __init__(self, strategy: Shares, facts: RunFacts) -> None:
        super().__init__(facts)
        self._shares = strategy.by_name
        self._random = np.random.default_rng(facts.seed)
        self._drawn = dict.fromkeys(self._shares, 0)
        # Of the source's pass, what is left
        self._orders: dict[str, list[int]] = {name: [] for name in self._shares}
        self._of_step: list[int] = []  # prompts that were drawn since the last step ended
        self._prompts: dict[str, list[int]] = {}  # by name, ascending
        if facts.sources is not None:
            self._prompts = self._by_name(facts.sources)

    def _by_name(self, sources: Mapping[int, str]) -> dict[str, list[int]]:
        prompts: dict[str, list[int]] = {name: [] for name in self._shares}
        for prompt_id, source in sorted(sources.items()):
            name = source if source in prompts else REST
            if name not in prompts:
                raise ValueError(
                    f"shares.of names no share of source {source!r}, which is in the data; "
                    "add it, or rest"
                )
            prompts[name].append(prompt_id)
        for name, share in self._shares.items():
            self._check_number(
                name, len(prompts[name]), math.ceil(share * self.facts.groups - 1e-9)
            )
        return prompts

    def _check_number(self, name: str, there: int, taken: int) -> None:
        """Refuse a source that has fewer prompts than a step takes of it."""
        if there == 0:
            raise ValueError(
                f"shares.of gives a share to {name!r}, of which the data has no prompt; "
                "leave it out"
            )
        if there < taken:
            raise ValueError(
                f"source {name!r} has {there} prompts, and a step takes up to {taken} of them; "
                "lower its share or the prompts of a step"
            )

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """Return the next prompt of the source that is furthest behind."""
        if not self._prompts:  # all prompts are one
            self._prompts = {REST: predictive().prompt_ids.tolist()}
        name = min(self._shares, key=self._turn)
        if not self._orders[name]:
            self._begin_pass(name)
        prompt_id = self._orders[name].pop(0)
        self._drawn[name] += 1
        self._of_step.append(prompt_id)
        expected = self._shares[name] * self.facts.groups
        return Drawn(prompt_id, min(expected / len(self._prompts[name]), 1.0), weight=1.0)

    def _begin_pass(self, name: str) -> None:
        """Shuffle the prompts of a source; those that are in this step already come last."""
        prompts = self._random.permutation(self._prompts[name]).tolist()
        recent = set(self._of_step)
        later = [prompt_id for prompt_id in prompts if prompt_id in recent]
        sooner = [prompt_id for prompt_id in prompts if prompt_id not in recent]
        self._orders[name] = sooner + later
        if self._drawn[name] and not self.note:
            self.note = (
                f"all {len(prompts)} prompts of {name!r} have been drawn once: "
                "its share of the draws repeats them (strategy shares)"
            )

    def end_step(self) -> None:
        """Forget the prompts of the step."""
        self._of_step = []

    def _turn(self, name: str) -> float:
        """Return after how many draws in all the next one of a source is due."""
        return (self._drawn[name] + 0.5) / self._shares[name]

    def metrics(self) -> dict[str, float]:
        """Return how often the prompts of each source have been drawn, on average."""
        passes = {}
        for name, prompts in self._prompts.items():
            passes[f"shares/{name}/passes"] = self._drawn[name] / len(prompts)
        return passes


def _shares(parts: Sequence[str]) -> dict[str, float]:
    """Return the share of each source that a part names; ValueError if one is named twice."""
    shares: dict[str, float] = {}
    for part in parts:
        name, share = _share(part)
        if name in shares:
            raise ValueError(f"shares.of: {part!r} gives {name!r} a second share; {_EXAMPLE}")
        shares[name] = share
    return shares


def _share(part: str) -> tuple[str, float]:
    """Return name and share of a part such as "math=0.5".

    Raises:
        ValueError: it is none.
    """
    name, _, number = part.rpartition("=")
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not name or not 0 < share <= 1:
        raise ValueError(f"shares.of: {part!r} is no source with a share in (0, 1]; {_EXAMPLE}")
    return name.strip(), share
