import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

_Base = TypeVar("_Base")
_Class = TypeVar("_Class", bound=type[Any])


def parameter(default: Any, help: str, *, within: str = "", choices: Sequence[str] = ()) -> Any:
    """Return a dataclass field with a default, a help line and the values that it allows.

    Args:
        help: one line, without the default; the command line shows it.
        within: the allowed interval, such as "(0, 1]" or "[0, inf)". A round bracket excludes its end.
        choices: the allowed values, if the parameter is a text.
    """
    metadata = {"help": help, "within": within, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


def parameter_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the parameters of a class: its dataclass fields, if it has any."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def check(owner: Any) -> None:
    """Raise ValueError, "NAME.FIELD = VALUE is not in (0, 1]", for the first parameter out of its range."""
    for field in dataclasses.fields(owner):
        value, within, choices = (getattr(owner, field.name), *map(field.metadata.get, ("within", "choices")))
        if within:
            low, high = (float(end) for end in within[1:-1].split(","))
            inside = isinstance(value, (int, float)) and low <= value <= high  # False for NaN
            if not inside or (value == low and within[0] == "(") or (value == high and within[-1] == ")"):
                raise ValueError(f"{owner.name}.{field.name} = {value!r} is not in {within}")
        if choices and value not in choices:
            raise ValueError(f"{owner.name}.{field.name} = {value!r} is none of {', '.join(choices)}")


class Registry(Generic[_Base]):
    """The classes of one kind, by their class attribute ``name``; their dataclass fields are their parameters.

    Args:
        kind: the word for such a class in messages.
        package: its modules are imported on first use, so that their classes register themselves.
        group: the entry-point group in which other distributions declare theirs, ``name = package.module:Class``.
        renamed: names of before, and the present ones.
    """

    def __init__(self, kind: str, base: Any, package: str, group: str, **renamed: str) -> None:
        self._kind, self._base, self._package, self._group, self._renamed = kind, base, package, group, renamed
        self._classes: dict[str, type[_Base]] = {}
        self._declared: list[EntryPoint] | None = None

    def register(self, cls: _Class) -> _Class:
        """Class decorator: make ``cls`` known under ``cls.name``; ValueError if another class has the name."""
        known = self._classes.setdefault(cls.name, cls)  # a reloaded module registers its classes again
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{self._kind} name {cls.name!r} is taken by {known.__module__}:{known.__qualname__}")
        return cls

    def available(self) -> dict[str, type[_Base]]:
        """Return all named classes, by name: the package's and those of installed entry points."""
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
            importlib.import_module(f"{self._package}.{module.name}")
        if self._declared is None:  # reading the entry points of all distributions takes 10 ms
            self._declared = list(entry_points(group=self._group))
        for point in self._declared:
            if point.name not in self._classes:
                self._classes[point.name] = self._checked(point.load(), f"entry point {point.name!r}")
        return dict(sorted(self._classes.items()))

    def get(self, name: str) -> type[_Base]:
        """Return the class called ``name``, or found at ``package.module:Class``; ValueError if there is none."""
        if ":" in name:
            module, _, attribute = name.partition(":")
            try:
                return self._checked(getattr(importlib.import_module(module), attribute), name)
            except Exception as error:  # a module of somebody else may raise anything
                reason = f"{type(error).__name__}: {error} (PYTHONPATH may name its folder)"
                raise ValueError(f"{self._kind} {name!r} cannot be imported: {reason}") from error
        known, name = self.available(), self._renamed.get(name, name)
        if name not in known:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(known)}, or module:Class")
        return known[name]

    def check_stored(self, name: str) -> None:
        """Raise ValueError for a ``module:Class`` that is not imported: that runs its code."""
        module, colon, _ = name.partition(":")
        if colon and module not in sys.modules:
            raise ValueError(
                f"the database names {self._kind} {name!r}, which would be imported: if it is yours, give "
                f"--{self._kind} {name}, or import {module} first"
            )

    def build(self, name: str, /, **parameters: Any) -> _Base:
        """Return an object of the class by name; ValueError for an unknown name or parameter, or a bad value."""
        cls = self.get(name)
        fields = [field.name for field in parameter_fields(cls)]
        unknown = sorted(set(parameters) - set(fields))
        if unknown:
            raise ValueError(f"{self._kind} {name!r} has no parameter {unknown[0]!r}; it has: {', '.join(fields)}")
        return cls(**parameters)

    def _checked(self, cls: object, origin: str) -> type[_Base]:
        if not (isinstance(cls, type) and issubclass(cls, self._base) and hasattr(cls, "name")):
            raise ValueError(f"{self._kind} {origin} is {cls!r}, not a subclass of {self._base.__name__} with a name")
        return cls
