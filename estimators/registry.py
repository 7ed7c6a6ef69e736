"""Classes by name: ours by decorator, others by entry point or ``module:Class``.

``register`` makes an estimator known; every module of this package is imported on first use, so adding an estimator
means adding one file. Another distribution may declare the entry-point group ``openrlhf_dbb.estimators``
(``name = package.module:Class``); anything importable works as ``package.module:Class`` without being declared.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from estimators.base import RewardEstimator

_Base = TypeVar("_Base")
_Class = TypeVar("_Class", bound=type[Any])


class Registry(Generic[_Base]):
    """The classes of one kind; each has a class attribute ``name``, and dataclass fields as its parameters.

    Args:
        kind: what one of them is called in messages.
        base: the class that all of them derive from.
        package: each of its modules is imported on first use, so that its classes register themselves.
        group: the entry-point group in which other distributions declare theirs.
    """

    def __init__(self, kind: str, base: type[_Base], package: str, group: str) -> None:
        self._kind, self._base, self._package, self._group = kind, base, package, group
        self._classes: dict[str, type[_Base]] = {}

    def register(self, cls: _Class) -> _Class:
        """Class decorator: make ``cls`` known under ``cls.name``.

        Raises:
            ValueError: another class has that name already.
        """
        known = self._classes.setdefault(cls.name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{self._kind} name {cls.name!r} is taken by {known.__module__}:{known.__qualname__}")
        return cls

    def available(self) -> dict[str, type[_Base]]:
        """All named classes, by name: the package's and those of installed entry points."""
        for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        for point in self._declared:
            if point.name not in self._classes:
                cls = self._checked(point.load(), f"entry point {point.name!r}")
                if cls.name != point.name:  # type: ignore[attr-defined]
                    raise ValueError(f"{self._kind} entry point {point.name!r} is {cls!r}, whose name is another one")
                self._classes[point.name] = cls
        return dict(sorted(self._classes.items()))

    def get(self, name: str) -> type[_Base]:
        """The class called ``name``, or found at ``package.module:Class``.

        Raises:
            ValueError: no such class; the message lists the known ones.
        """
        if ":" in name:
            module, _, attribute = name.partition(":")
            try:
                return self._checked(getattr(importlib.import_module(module), attribute), name)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"{self._kind} {name!r} cannot be imported: {error}") from error
        known = self.available()
        if name not in known:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(known)}, or module:Class")
        return known[name]

    def build(self, name: str, **parameters: Any) -> _Base:
        """An object of the class by name, with its parameters.

        Raises:
            ValueError: unknown name, unknown parameter, or a value outside its range.
        """
        cls = self.get(name)
        fields = [field.name for field in parameter_fields(cls)]
        unknown = sorted(set(parameters) - set(fields))
        if unknown:
            raise ValueError(
                f"{self._kind} {name!r} has no parameter {unknown[0]!r}; it has: {', '.join(fields) or 'none'}"
            )
        return cls(**parameters)

    @functools.cached_property
    def _declared(self) -> list[EntryPoint]:
        """The entry points of the group; reading those of all distributions takes 10 ms, and a start asks often."""
        return list(entry_points(group=self._group))

    def _checked(self, cls: object, origin: str) -> type[_Base]:
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            raise ValueError(
                f"{self._kind} {origin} is {cls!r}, not a subclass of {self._package}.{self._base.__name__}"
            )
        if not hasattr(cls, "name"):
            raise ValueError(f"{self._kind} {origin} has no class attribute 'name'; its flags begin with it")
        return cls


def parameter_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """The parameters of a registered class: its dataclass fields, if it has any."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


ESTIMATORS: Registry[RewardEstimator] = Registry(
    "estimator",
    RewardEstimator,  # type: ignore[type-abstract]
    "estimators",
    "openrlhf_dbb.estimators",
)
register, available, get, build = ESTIMATORS.register, ESTIMATORS.available, ESTIMATORS.get, ESTIMATORS.build
