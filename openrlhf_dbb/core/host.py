"""The seam between the memory and a trainer: what a *host*, the integration of a trainer, can do and has to do.

A host of the memory

    reads    the rollouts of a step into :meth:`openrlhf_dbb.core.posteriors.Posteriors.observe`
    trains   on the advantages that come back
    saves    the side state of the run into the folder of each model checkpoint

Some features ask for more, such as a second generation within a step. A host lists what it lacks, each with one
reason (:class:`Host`). Refusals and the documentation's table of features are made of these lists.

A host that generates more fills its steps by :class:`openrlhf_dbb.core.filling.Filler`. A host that
trains on further rows takes them from :class:`openrlhf_dbb.core.replay.ReplayMemory`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol


class Capability(Enum):
    """What a feature asks of a host, as the end of the sentence "the trainer ..."."""

    DRAW = "trains on the prompts that a strategy draws"
    GENERATE_MORE = "generates further rollouts before a step is trained on"
    EXTRA_ROWS = "trains on further rows that keep their own log-probs"
    PROBE = "generates rollouts that are not trained on"
    THIN = "trains on changed advantages while the store keeps those of the form"
    PASS_RATES = "reads known pass rates with the data"
    SOURCES = "reads the source of each prompt with the data"
    HELD_OUT = "stores its held-out evaluations by prompt"
    READ = "passes on what the verifier read"
    RECORD = "records its rollouts, and trains on those of a record"


@dataclass(frozen=True)
class Feature:
    """A row of the table of features: its name there, and what it asks of a host; None: of every host the same."""

    name: str
    needs: Capability | None = None


FEATURES = (
    Feature("every estimator"),
    Feature("every advantage form"),
    Feature("strategy posterior", Capability.DRAW),
    Feature("strategy dynamic", Capability.GENERATE_MORE),
    Feature("strategy greso", Capability.GENERATE_MORE),
    Feature("strategy two_stage", Capability.GENERATE_MORE),
    Feature("strategy allocate", Capability.GENERATE_MORE),
    Feature("strategy shares", Capability.SOURCES),
    Feature("replay (RePO)", Capability.EXTRA_ROWS),
    Feature("training without generating", Capability.RECORD),
    Feature("thinning", Capability.THIN),
    Feature("probes", Capability.PROBE),
    Feature("warm start"),
    Feature("known pass rates", Capability.PASS_RATES),
    Feature("groups by source", Capability.SOURCES),
    Feature("exact resume"),
    Feature("held-out evaluation", Capability.HELD_OUT),
    Feature("what the verifier read", Capability.READ),
    Feature("explain"),
    Feature("page"),
)


@dataclass(frozen=True)
class Host:
    """What a trainer's integration can do.

    Attributes:
        name: of the trainer, as users write it.
        lacks: what it cannot do, each with the reason as a sentence without its end: "TRL draws ...".
        tested: by the name of a :data:`FEATURES` row the test that shows it, ``file.py::test``.
    """

    name: str
    lacks: Mapping[Capability, str]
    tested: Mapping[str, str]

    def refusal(self, what: str, needs: frozenset[Capability]) -> str | None:
        """Return why this host cannot do ``what``, which needs these capabilities; None if it can."""
        for capability in Capability:
            if capability in needs and capability in self.lacks:
                reason = self.lacks[capability]
                return f"{what} needs a trainer that {capability.value}; {self.name} does not: {reason}"
        return None


class SideState(Protocol):
    """State of a run beside model and posteriors that a checkpoint holds: draws, replayed rollouts.

    It goes into files of its own, never through pickle, which could run code.
    """

    def save(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint, which exists."""

    def load(self, folder: Path) -> None:
        """Continue from what :meth:`save` has written, bit for bit.

        Raises:
            ValueError: there is no such state in ``folder``, or it is of other settings.
        """
