"""Names of estimators: ours by decorator, others by entry point or ``module:Class``.

``register`` makes a class known; every module of this package is imported on first use, so adding an
estimator means adding one file. Another distribution may declare the entry-point group
``openrlhf_dbb.estimators`` (``name = package.module:Class``); anything importable works as
``package.module:Class`` without being declared.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any, TypeVar

import estimators
from estimators.base import RewardEstimator

ENTRY_POINT_GROUP = "openrlhf_dbb.estimators"
_classes: dict[str, type[RewardEstimator]] = {}
_Class = TypeVar("_Class", bound=type[RewardEstimator])


def register(cls: _Class) -> _Class:
    """Class decorator: make ``cls`` known under ``cls.name``.

    Raises:
        ValueError: another class has that name already.
    """
    known = _classes.setdefault(cls.name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"estimator name {cls.name!r} is taken by {known.__module__}:{known.__qualname__}")
    return cls


def available() -> dict[str, type[RewardEstimator]]:
    """All named estimators: this package's and those of installed entry points, by name."""
    for module in pkgutil.iter_modules(estimators.__path__):
        importlib.import_module(f"estimators.{module.name}")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in _classes:
            _classes[point.name] = _checked(point.load(), f"entry point {point.name!r}")
    return dict(sorted(_classes.items()))


def get(name: str) -> type[RewardEstimator]:
    """The estimator class called ``name``, or found at ``package.module:Class``.

    Raises:
        ValueError: no such estimator; the message lists the known ones.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return _checked(getattr(importlib.import_module(module), attribute), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"estimator {name!r} cannot be imported: {error}") from error
    known = available()
    if name not in known:
        raise ValueError(f"unknown estimator {name!r}; known: {', '.join(known)}, or module:Class")
    return known[name]


def build(name: str, **parameters: Any) -> RewardEstimator:
    """An estimator by name with its parameters (the fields of its class).

    Raises:
        ValueError: unknown name, unknown parameter, or a value outside its range.
    """
    cls = get(name)
    fields = cls.parameter_names()
    unknown = sorted(set(parameters) - set(fields))
    if unknown:
        raise ValueError(f"estimator {name!r} has no parameter {unknown[0]!r}; it has: {', '.join(fields) or 'none'}")
    return cls(**parameters)


def _checked(cls: object, origin: str) -> type[RewardEstimator]:
    if not (isinstance(cls, type) and issubclass(cls, RewardEstimator)):
        raise ValueError(f"estimator {origin} is {cls!r}, not a subclass of estimators.RewardEstimator")
    return cls
