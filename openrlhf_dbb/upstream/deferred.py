"""Imports that leave out modules which are only named, and are imported when something of them is used.

OpenRLHF's trainer imports DeepSpeed and vLLM to name their classes. The driver uses neither, and their import takes
longer than all else in the driver.
"""

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
    """Let ``import`` of these modules make stand-ins within the block, whose code may only name them.

    Later a stand-in becomes the real thing when it is called, when an attribute is read, and in the process that it is
    pickled to. What was imported before stays.
    """
    finder = _Finder([module for module in modules if module not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        # A copy, because Ray imports in a thread of its own.
        for name, module in sys.modules.copy().items():
            if isinstance(module, _Module):
                del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    def __init__(self, modules: list[str]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        held = any(f"{name}.".startswith(f"{module}.") for module in self._modules)
        return ModuleSpec(name, self, is_package=True) if held else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Stands in for a module; its attributes are stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":  # OpenRLHF reads that of vLLM before it makes the engines
            return version(packages_distributions()[self.__name__][0])
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(self.__name__, name)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


class _Name:
    """Stands in for a class, a function or a submodule."""

    def __init__(self, *place: str) -> None:  # module and name
        self.__place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _real(*self.__place)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(*self.__place), name)

    def __reduce__(self) -> Any:
        return _real, self.__place


def _real(module: str, name: str) -> Any:
    imported = importlib.import_module(module)
    return getattr(imported, name) if hasattr(imported, name) else importlib.import_module(f"{module}.{name}")
