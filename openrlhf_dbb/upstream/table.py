"""Reads ``table.toml``: what of OpenRLHF this package relies on beyond its interface, and which of it has changed."""

import ast
import functools
import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from openrlhf_dbb.presets import read_toml


class Row(NamedTuple):
    """A name as ``module:name`` below ``openrlhf``; ``source`` is what decides how it works."""

    how: str
    name: str
    digest: str
    why: str
    source: str


@functools.cache
def table() -> tuple[Row, ...]:
    lists = read_toml(Path(__file__).with_name("table.toml"))
    rows = [(how, *row) for how, of_a_kind in lists.items() for row in of_a_kind]
    return tuple(Row(how, name, seen, why, *source or [name]) for how, name, seen, why, *source in rows)


def source_file(module: str) -> Path:
    """Return the file of a module of OpenRLHF. OpenRLHF is not imported."""
    spec = find_spec("openrlhf")
    assert spec is not None and spec.origin is not None, "upstream.check_version has passed"
    return Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py")


def digest(name: str) -> str:
    """Return a digest of the source of ``module:name`` or of ``module:``; "gone" if there is none."""
    module, _, path = name.partition(":")
    text = source_file(module).read_text(encoding="utf-8")
    node: ast.AST | None = ast.parse(text)
    for part in filter(None, path.split(".")):
        node = next((child for child in getattr(node, "body", ()) if getattr(child, "name", None) == part), None)
    if node is None:
        return "gone"
    segment = ast.get_source_segment(text, node) if path else text
    return hashlib.sha256((segment or "").encode()).hexdigest()[:8]
