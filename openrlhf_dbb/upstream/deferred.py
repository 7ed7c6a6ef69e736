"""Imports that leave out what a module only names.

The driver uses neither DeepSpeed nor vLLM, but OpenRLHF's trainer imports both to name their classes, which would take
longer than all else in the driver. Within :func:`deferring`, such a module is imported when something of it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def deferring(*modules: str) -> Iterator[None]:
    """Within the block, ``import`` of these modules makes stand-ins; names taken from them stay stand-ins afterwards.

    A stand-in becomes the real thing when it is called, when an attribute of it is read, when it is made a base class,
    and in the process that it is pickled to.

    Args:
        modules: packages and modules, their submodules included; one that has been imported before is not touched.
    """
    finder = _Finder({module for module in modules if module not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()


def _forget(within: str = "") -> None:
    """Take stand-ins out of ``sys.modules``, so that the next import is a real one."""
    # A copy: Ray starts, and imports, in a thread of its own.
    for name in [name for name, module in sys.modules.copy().items() if isinstance(module, _Module)]:
        if name.startswith(within):
            del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(name == module or name.startswith(module + ".") for module in self._modules):
            return ModuleSpec(name, self, is_package=True)
        return None

    def give_up(self, name: str) -> None:
        """From now on import what ``name`` belongs to."""
        for module in [m for m in self._modules if name == m or name.startswith(m + ".")]:
            self._modules.remove(module)
            _forget(module)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Stands in for a module; its attributes are stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return _version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(self.__name__, name)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


class _Name:
    """Stands in for a class, a function or a submodule."""

    def __init__(self, module: str, name: str) -> None:
        self.__module, self.__name = module, name

    def __real(self) -> Any:
        return _real(self.__module, self.__name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__real(), name)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self.__real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.__real())

    def __reduce__(self) -> Any:
        return _real, (self.__module, self.__name)


def _version(package: str) -> str:
    """As its distribution declares it; imported for it where no distribution does."""
    found = packages_distributions().get(package)
    return version(found[0]) if found else str(_real(package, "__version__"))


def _real(module: str, name: str) -> Any:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.give_up(module)
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
