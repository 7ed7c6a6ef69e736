"""The paper's claims: claims.toml, read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.presets import read_toml
from study import protocol
from study.protocol import PlannedRun, Protocol

MANIFEST = Path(__file__).parent / "claims.toml"
SCALES = {"tiny": ("cpu", "paper"), "gpu": ("gpu",)}
"""The protocols whose experiments the tests at a scale name."""


@dataclass(frozen=True)
class Test:
    """What a claim is tested on.

    Attributes:
        experiment: of a protocol; its runs are paired by seed.
        outcome: see ``findings.outcome``; "" where the test needs none.
        against: a second experiment, for ``best``; "" for none.
        arm: instead of the claim's, where the paper compares another one at this scale.
    """

    experiment: str
    outcome: str = ""
    against: str = ""
    arm: str = ""

    @property
    def experiments(self) -> list[str]:
        return [self.experiment, *([self.against] if self.against else [])]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper. claims.toml says what the kinds of tests are, and how each is judged.

    Attributes:
        id: its name on the command line.
        where, says, paper: its place, the claim in words, the paper's numbers.
        kind: of its tests, a key of ``findings.KINDS``.
        arms: compared, each to ``against`` (an arm) or with one another.
        expected: "above", "below" or "not above"; "" where the kind says it.
        margin: of "not above", in the unit of the outcome, and of ``prior``, as a share.
        estimator: whose error is measured; ``against`` is then another.
        first, last: discounts, of ``below_point``.
        tests: by scale; the first of a scale is the verdict.
    """

    id: str
    where: str
    says: str
    paper: str
    kind: str
    tests: dict[str, tuple[Test, ...]]
    arms: tuple[str, ...] = ()
    against: str = ""
    expected: str = ""
    margin: float = 0.0
    estimator: str = ""
    first: float = 0.0
    last: float = 1.0

    def at(self, test: Test) -> Claim:
        """The claim with the arm of one of its tests."""
        return replace(self, arms=(test.arm,)) if test.arm else self

    def needs(self, test: Test) -> list[str]:
        """Arms whose runs a test needs; errors are measured on GRPO's."""
        arms = self.at(test).arms
        on_grpo = [] if arms and self.kind != "agreement" else ["grpo"]
        return [*arms, *([self.against] if arms and self.against else []), *on_grpo]

    def runs(self, scale: str) -> list[tuple[Protocol, PlannedRun]]:
        """The runs that its tests at a scale need, each with its protocol."""
        wanted = {(name, arm) for test in self.tests[scale] for name in test.experiments for arm in self.needs(test)}
        return [
            (plan, run)
            for plan in map(protocol.load, SCALES[scale])
            for run in plan.runs
            if (run.experiment, run.arm) in wanted
        ]


def load(path: Path = MANIFEST) -> dict[str, Claim]:
    """All claims by id, in the order of the manifest."""
    return {name: _claim(name, entry) for name, entry in read_toml(path)["claims"].items()}


def choose(ids: Sequence[str]) -> list[Claim]:
    """The claims of these ids; all for "all".

    Raises:
        UsageError: there is no such claim.
    """
    known = load()
    unknown = [name for name in ids if name not in (*known, "all")]
    if unknown:
        raise UsageError(
            f"the paper's claims have no {unknown[0]!r}; python -m study reproduce list shows the {len(known)} "
            "there are, all stands for all of them"
        )
    return list(known.values()) if "all" in ids else [known[name] for name in dict.fromkeys(ids)]


def _claim(name: str, entry: dict[str, Any]) -> Claim:
    tests = {scale: tuple(Test(**test) for test in entry.pop(scale)) for scale in SCALES}
    arms = tuple(entry.pop("arms", [])) or tuple(filter(None, [entry.pop("arm", "")]))
    return Claim(id=name, kind=entry.pop("test"), arms=arms, tests=tests, **entry)
