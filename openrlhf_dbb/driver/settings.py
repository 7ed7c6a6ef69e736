"""Holds the values of all flags, with the origin of each, for the rest of the driver."""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import estimators, upstream
from openrlhf_dbb.core import strategies
from openrlhf_dbb.driver.capacity import Shape
from openrlhf_dbb.driver.flags import ESTIMATOR, NO_ESTIMATOR, named_class
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.parameters import parameter_fields
from openrlhf_dbb.platform.machine import Machine
from openrlhf_dbb.secrets import without_secrets

COMMAND_LINE = "command line"
# OpenRLHF does not see these flags. It sends its arguments to trackers, and some of these hold passwords.
_DRIVERS = (
    "preset", "method", "estimator", "run_name", "resume", "warm_start", "warm_start_weight", "warm_start_url",
    "store.url", "store.take_over", "dry_run", "verbose",
)  # fmt: skip
_SHOWN = ("method", "estimator", "preset")
_HIDDEN = ("logger.wandb.key", "local_rank", *(flag for flag in _DRIVERS if flag not in _SHOWN))


def _named(flag: str) -> Any:
    """Return a property of :class:`Settings`: the name that a flag gives."""
    return property(lambda settings: settings.values[flag])


@dataclass(frozen=True)
class Settings:
    """The values of all flags. Nothing changes them; :meth:`with_values` returns other settings."""

    values: Mapping[str, Any] = field(repr=False)  # by flag
    origin: Mapping[str, str] = field(repr=False)  # of each value that is not OpenRLHF's default
    on_cpu: bool  # train without CUDA
    machine: Machine
    command: str = field(repr=False)  # that was given, without secrets
    shape: Shape | None = None  # of a dense model; known once its configuration has been read

    def with_values(self, flags: Mapping[str, Any], origin: str) -> "Settings":
        """Return these settings with other values of some flags, and where those come from."""
        return dataclasses.replace(
            self, values={**self.values, **flags}, origin={**self.origin, **dict.fromkeys(flags, origin)}
        )

    def given(self, flag: str) -> bool:
        """Return whether the command line sets a flag."""
        return self.origin.get(flag) == COMMAND_LINE

    preset = _named("preset")  # or the path of its file, or "none"
    method = _named("method")  # or "none"
    estimator = _named("estimator")  # or ``module:Class``, or "none" for OpenRLHF's own advantages
    run_name = _named("run_name")

    @cached_property
    def args(self) -> SimpleNamespace:
        """All values as OpenRLHF's code reads them (``args.actor.adam.lr``)."""
        return _nested(self.values)

    def openrlhf_args(self) -> SimpleNamespace:
        """Return a copy of the arguments for OpenRLHF, which changes it, without the flags of the driver."""
        return _nested(copy.deepcopy({flag: value for flag, value in self.values.items() if flag not in _DRIVERS}))

    @property
    def flags(self) -> dict[str, Any]:
        """The values that are printed and stored; passwords are not among them."""
        first = {flag: self.values[flag] for flag in _SHOWN}
        return dict(without_secrets(first | {k: value for k, value in self.values.items() if k not in _HIDDEN}))

    @property
    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters. Raises UsageError if one is outside its range."""
        if self.estimator == NO_ESTIMATOR:
            return {}
        cls = named_class(ESTIMATOR, estimators, self.estimator)
        # A parameter that a trainer fills in is no flag.
        parameters = {
            field.name: self.values.get(f"{cls.name}.{field.name}", field.default) for field in parameter_fields(cls)
        }
        with _flag_named():
            cls(**parameters)
        return parameters

    @property
    def strategy(self) -> strategies.RolloutStrategy:
        """The rollout strategy. Raises UsageError if a parameter is outside its range."""
        with _flag_named():
            return strategies.of(self.args)


@contextlib.contextmanager
def _flag_named() -> Iterator[None]:
    """Turn "NAME.FIELD = VALUE is not in ..." into a UsageError that names the flag."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"--{error}" if re.match(r"\w+\.\w+ ", str(error)) else str(error)) from error


def _nested(values: Mapping[str, Any]) -> SimpleNamespace:
    """Return namespaces in namespaces, by the dots in the flags' names."""
    nested: SimpleNamespace = upstream.load("openrlhf.utils.config", "hierarchize")(SimpleNamespace(**values))
    return nested
