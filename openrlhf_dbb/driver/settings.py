"""A parsed command line: one set of values, frozen, and the views of it that others need."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any

from openrlhf_dbb.core import strategies
from openrlhf_dbb.driver.flags import NO_ESTIMATOR, estimator_parameters
from openrlhf_dbb.platform import machine

# Never printed, stored or sent to a tracker.
SECRET_FLAGS = ("store.url", "warm_start_url", "logger.wandb.key")
# Ours, shown beside those of OpenRLHF's arguments.
_SHOWN = ("method", "estimator", "preset")


@dataclass(frozen=True)
class Settings:
    """A parsed command line. Nothing changes it; :meth:`with_values` makes another one.

    Attributes:
        preset: name of the preset, the path of its file, or "none".
        method: name of the training method, or "none".
        estimator: registered name or ``module:Class``, or "none" for OpenRLHF's own advantages.
        run_name: name of the run.
        resume: run to continue, "" for the newest unfinished one, None to start a new run.
        warm_start, warm_start_weight, warm_start_url: see the flags.
        store_url: the database, None for the default.
        take_over: continue a run that another machine owns.
        dry_run: check and print everything, start nothing.
        verbose: show the output of all workers.
        on_cpu: train without CUDA.
        values: every other flag's value by name, OpenRLHF's and ours beside them.
        origin: where each value that is not OpenRLHF's default comes from.
    """

    preset: str
    method: str
    estimator: str
    run_name: str
    resume: str | None
    warm_start: str | None
    warm_start_weight: float
    warm_start_url: str | None = field(repr=False)
    store_url: str | None = field(repr=False, metadata={"flag": "store.url"})
    take_over: bool = field(metadata={"flag": "store.take_over"})
    dry_run: bool
    verbose: bool
    on_cpu: bool = field(metadata={"flag": None})
    values: Mapping[str, Any] = field(repr=False, metadata={"flag": None})
    origin: Mapping[str, str] = field(repr=False, metadata={"flag": None})

    def __post_init__(self) -> None:
        for name in ("values", "origin"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @classmethod
    def of(cls, flags: Mapping[str, Any], origin: Mapping[str, str], *, on_cpu: bool) -> Settings:
        """From the values of all flags."""
        own = {name: flags[flag] for flag, name in OWN_FLAGS.items()}
        values = {flag: value for flag, value in flags.items() if flag not in OWN_FLAGS}
        return cls(**own, on_cpu=on_cpu, values=values, origin=origin)

    def with_values(self, flags: Mapping[str, Any], origin: str) -> Settings:
        """These settings with other values of some flags, which come from ``origin``."""
        own = {OWN_FLAGS[flag]: value for flag, value in flags.items() if flag in OWN_FLAGS}
        values = {flag: value for flag, value in flags.items() if flag not in OWN_FLAGS}
        return dataclasses.replace(
            self, **own, values={**self.values, **values}, origin={**self.origin, **dict.fromkeys(flags, origin)}
        )

    @cached_property
    def args(self) -> SimpleNamespace:
        """The values as OpenRLHF's code reads them (``args.actor.adam.lr``); cannot be assigned to."""
        return _nested(self.values, _ReadOnly)

    def openrlhf_args(self) -> SimpleNamespace:
        """A copy of :attr:`args` to hand to OpenRLHF, which changes it."""
        return _nested(copy.deepcopy(dict(self.values)), SimpleNamespace)

    @property
    def flags(self) -> dict[str, Any]:
        """What is printed and stored: every value but the secret ones, and how they were chosen."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        hidden = (*SECRET_FLAGS, "local_rank")
        return shown | {flag: value for flag, value in self.values.items() if flag not in hidden}

    @property
    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters."""
        return {} if self.estimator == NO_ESTIMATOR else estimator_parameters(self.estimator, self.values)

    @property
    def machine(self) -> machine.Machine:
        """The GPUs to train on."""
        return machine.look()

    @property
    def strategy(self) -> strategies.RolloutStrategy:
        """The rollout strategy."""
        return strategies.of(self.args)

    @property
    def facts(self) -> strategies.RunFacts:
        """What the rollout strategy is told about the run."""
        return strategies.facts(self.args)


OWN_FLAGS: dict[str, str] = {
    flag: field.name
    for field in dataclasses.fields(Settings)
    if (flag := field.metadata.get("flag", field.name)) is not None
}
"""Flags that OpenRLHF is not to see, and the attributes of Settings that hold them."""


class _ReadOnly(SimpleNamespace):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings are frozen: {name} cannot be assigned to; use openrlhf_args() for a copy")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"settings are frozen: {name} cannot be deleted")


def _nested(values: Mapping[str, Any], kind: type[SimpleNamespace]) -> SimpleNamespace:
    """Namespaces in namespaces, by the dots in the flags' names."""
    branches: dict[str, dict[str, Any]] = {}
    leaves: dict[str, Any] = {}
    for flag, value in values.items():
        section, dot, rest = flag.partition(".")
        if dot:
            branches.setdefault(section, {})[rest] = value
        else:
            leaves[flag] = value
    return kind(**leaves, **{section: _nested(branch, kind) for section, branch in branches.items()})
