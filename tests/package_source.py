"""What a Python package defines, read from its source without importing it: names, parameters, attributes."""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: a class, a function, an assignment, or the import of something foreign."""

    module: str
    node: ast.AST


class Package:
    """The source of one package.

    Args:
        folder: of its ``__init__.py``; its name is the package's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = functools.cache(self._parse)

    def find(self, module: str, name: str) -> Definition | None:
        """The definition of ``function``, ``Class`` or ``Class.member``; None if there is none.

        Names that the package itself re-exports are followed; members are looked for in base classes of the package.
        """
        owner, _, member = name.partition(".")
        found = self._find_in_module(module, owner)
        return self.members(found).get(member) if found and member else found

    def members(self, owner: Definition) -> dict[str, Definition]:
        """Methods, class attributes and attributes of ``self`` of a class, inherited ones included; of others, none."""
        if not isinstance(owner.node, ast.ClassDef):
            return {}
        members: dict[str, Definition] = {}
        for base in owner.node.bases:
            found = self._find_in_module(owner.module, base.id) if isinstance(base, ast.Name) else None
            if found:
                members |= self.members(found)
        inner = [node for node in ast.walk(owner.node) if isinstance(node, ast.Attribute)]
        members |= {
            node.attr: Definition(owner.module, node)
            for node in inner
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        return members | {name: Definition(owner.module, node) for node in owner.node.body for name in _names(node)}

    def _parse(self, module: str) -> ast.Module:
        path = self._path(module)
        return ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module([], [])

    def _path(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split(".")[1:])
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)

    def _find_in_module(self, module: str, name: str) -> Definition | None:
        for node in reversed(self.tree(module).body):
            if name in _names(node):
                source = self._imported_from(module, node)
                if source is None:
                    return Definition(module, node)
                [original] = [alias.name for alias in node.names if name in (alias.asname, alias.name)]  # type: ignore[attr-defined]
                return self._find_in_module(source, original)
        return None

    def _imported_from(self, module: str, node: ast.AST) -> str | None:
        """The module of this package that a ``from ... import`` reads."""
        if not isinstance(node, ast.ImportFrom):
            return None
        path = self._path(module)
        package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
        source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        return source if source.split(".")[0] == self.folder.name else None


def parameters(node: ast.AST) -> str | None:
    """A function's parameters in order, without ``self``: ``a, b, *, c, **rest``; None for anything else."""
    if not isinstance(node, Function) or any(_is(decorator, "property") for decorator in node.decorator_list):
        return None
    of = node.args
    names = [argument.arg for argument in of.posonlyargs] + ["/"] * bool(of.posonlyargs)
    names += [argument.arg for argument in of.args]
    if of.vararg or of.kwonlyargs:
        names.append(f"*{of.vararg.arg}" if of.vararg else "*")
    names += [argument.arg for argument in of.kwonlyargs]
    names += [f"**{of.kwarg.arg}"] if of.kwarg else []
    return ", ".join(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _names(node: ast.AST) -> list[str]:
    """What a statement gives a name to."""
    if isinstance(node, (ast.ClassDef, *Function)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
