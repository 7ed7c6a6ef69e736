"""Classes by name, ours and those of other distributions; what such a class declares of itself."""

import dataclasses
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from typing import Any, ClassVar, Generic, TypeVar

_Base = TypeVar("_Base")
_Class = TypeVar("_Class", bound=type[Any])
_Owner = TypeVar("_Owner", bound="Owner")

Refusal = str | None
"""One line that names the settings and says what to do; None: nothing is wrong."""

Rule = Callable[[Any, Any], Refusal]
"""Returns why an owner refuses a training; its docstring says what would go wrong."""


class Owner:
    """A part of a training that its user chooses: an estimator, an advantage form, a strategy.

    The class declares all that it asks of the user. Its flags are dataclass fields, made by
    :func:`parameter`. :meth:`derived` sets those that follow from the training. Its rules refuse a
    training. Every trainer asks it alike.

    Attributes:
        name: the word by which the user chooses it.
        rules: functions of the owner and the training. A class states its own; those of its bases
            are asked before.
    """

    name: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = ()

    def derived(self: _Owner, training: Any) -> _Owner:
        """Return the owner with the parameters that follow from a training, by default as it is.

        Args:
            training: :class:`openrlhf_dbb.estimators.base.Training`, with the parts of a trainer
                :class:`openrlhf_dbb.core.plan.Plan`.
        """
        return self

    def refusal(self, training: Any) -> Refusal:
        """Return the line of the first rule that refuses a training."""
        for cls in reversed(type(self).__mro__):
            for rule in vars(cls).get("rules", ()):
                line: Refusal = rule(self, training)
                if line is not None:
                    return line
        return None


def parameter(
    default: Any,
    help: str,
    *,
    within: str = "",
    choices: Sequence[str] = (),
) -> Any:
    """Return a dataclass field with a default, a help line and the values that it allows.

    Args:
        help: one line, without the default; the command line shows it.
        within: the allowed interval, such as "(0, 1]" or "[0, inf)"; a round bracket excludes its
            end.
        choices: the allowed values, if the parameter is a text.
    """
    metadata = {"help": help, "within": within, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


def parameter_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the parameters of a class: its dataclass fields, if it has any."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def differing(owner: Any, other: Any) -> dict[str, Any]:
    """Return the parameters of ``other`` that differ from those of an owner of the same class."""
    changed = {}
    for field in parameter_fields(type(owner)):
        value = getattr(other, field.name)
        if value != getattr(owner, field.name):
            changed[field.name] = value
    return changed


def check(owner: Any) -> None:
    """Check the parameters of an object of a registered class.

    Raises:
        ValueError: "NAME.FIELD = VALUE is not in (0, 1]", for the first one that is not allowed.
    """
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        within = field.metadata.get("within")
        choices = field.metadata.get("choices")
        problem = f"{owner.name}.{field.name} = {value!r} is"
        if within and not _is_within(value, within):
            raise ValueError(f"{problem} not in {within}")
        if choices and value not in choices:
            raise ValueError(f"{problem} none of {', '.join(choices)}")


def _is_within(value: Any, interval: str) -> bool:
    """Return whether a value is a number in an interval such as "(0, 1]"; False for NaN."""
    if not isinstance(value, (int, float)):
        return False
    low, high = interval[1:-1].split(",")
    if value == float(low):
        return interval.startswith("[")
    if value == float(high):
        return interval.endswith("]")
    return float(low) < value < float(high)


@dataclass(eq=False)
class Registry(Generic[_Base]):
    """The classes of one kind, by their class attribute ``name``.

    Their dataclass fields are their parameters.

    Attributes:
        kind: the word for such a class in messages, such as "estimator".
        base: the class that all of them subclass.
        package: its modules are imported on first use, so that their classes register themselves.
        group: the entry-point group in which other distributions declare theirs,
            ``name = package.module:Class``.
        renamed: former names, each with the present one.
    """

    kind: str
    base: Any
    package: str
    group: str
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _classes: dict[str, type[_Base]] = dataclasses.field(default_factory=dict, init=False)

    def register(self, cls: _Class) -> _Class:
        """Class decorator: make ``cls`` known under ``cls.name``.

        Raises:
            ValueError: another class has the name.
        """
        present = self._classes.setdefault(cls.name, cls)
        # By place, not by identity: a reloaded module registers its classes again.
        if _place(present) != _place(cls):
            raise ValueError(f"{self.kind} name {cls.name!r} is taken by {_place(present)}")
        return cls

    def available(self) -> dict[str, type[_Base]]:
        """Return all named classes, by name: the package's and those of installed entry points.

        Raises:
            ValueError: an entry point names something else than such a class.
        """
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
            importlib.import_module(f"{self.package}.{module.name}")
        for point in self._declared:
            if point.name not in self._classes:
                cls = self._checked(point.load(), f"entry point {point.name!r}")
                self._classes[point.name] = cls
        return dict(sorted(self._classes.items()))

    @functools.cached_property
    def _declared(self) -> EntryPoints:
        # Once: reading the entry points of all distributions takes 10 ms.
        return entry_points(group=self.group)

    def get(self, name: str) -> type[_Base]:
        """Return the class called ``name``, or the one at ``package.module:Class``.

        Raises:
            ValueError: there is none, or it cannot be imported.
        """
        if ":" in name:
            return self._imported(name)
        name = self.renamed.get(name, name)
        classes = self.available()
        if name not in classes:
            names = ", ".join(classes)
            raise ValueError(f"unknown {self.kind} {name!r}; known: {names}, or module:Class")
        return classes[name]

    def _imported(self, name: str) -> type[_Base]:
        module, _, attribute = name.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
            return self._checked(cls, name)
        except Exception as error:  # a module of somebody else may raise anything
            raise ValueError(
                f"{self.kind} {name!r} cannot be imported: "
                f"{type(error).__name__}: {error} (PYTHONPATH may name its folder)"
            ) from error

    def check_stored(self, name: str) -> None:
        """Refuse a ``module:Class`` that is not imported yet; importing it would run its code.

        Raises:
            ValueError: the module is not imported.
        """
        module, colon, _ = name.partition(":")
        if colon and module not in sys.modules:
            raise ValueError(
                f"the database names {self.kind} {name!r}, which would be imported: if it is "
                f"yours, give --{self.kind} {name}, or import {module} first"
            )

    def build(self, name: str, /, **parameters: Any) -> _Base:
        """Return an object of the class called ``name``, with these parameters.

        Raises:
            ValueError: the name or a parameter is unknown, or a value is not allowed.
        """
        cls = self.get(name)
        fields = [field.name for field in parameter_fields(cls)]
        for unknown in sorted(set(parameters) - set(fields)):
            raise ValueError(
                f"{self.kind} {name!r} has no parameter {unknown!r}; it has: {', '.join(fields)}"
            )
        return cls(**parameters)

    def _checked(self, cls: object, origin: str) -> type[_Base]:
        if isinstance(cls, type) and issubclass(cls, self.base) and hasattr(cls, "name"):
            return cls
        raise ValueError(
            f"{self.kind} {origin} is {cls!r}, not a subclass of {self.base.__name__} with a name"
        )


def _place(cls: type[Any]) -> str:
    """Return where a class is defined, as ``module:Class``."""
    return f"{cls.__module__}:{cls.__qualname__}"
