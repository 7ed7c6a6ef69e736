"""Prints the rows of requirements/openrlhf.toml whose source in OpenRLHF has changed, with the new digest.

Usage: python scripts/openrlhf_changes.py
"""

import ast
import hashlib
from pathlib import Path
from typing import NamedTuple

from openrlhf_dbb.toml_file import read_toml
from openrlhf_dbb.upstream import source_file


class Row(NamedTuple):
    """A name as ``module:name`` below ``openrlhf``; ``source`` is what decides how it works."""

    how: str
    name: str
    digest: str
    why: str
    source: str


def table() -> list[Row]:
    lists = read_toml(Path(__file__).parents[1] / "requirements/openrlhf.toml")
    rows = [(how, *row) for how, of_a_kind in lists.items() for row in of_a_kind]
    return [Row(how, name, seen, why, *source or [name]) for how, name, seen, why, *source in rows]


def digest(name: str) -> str:
    """Return a digest of the source of ``module:name`` or of ``module:``; "gone" if there is none."""
    module, _, path = name.partition(":")
    text = source_file(module).read_text(encoding="utf-8")
    node: ast.AST | None = ast.parse(text)
    for part in filter(None, path.split(".")):
        node = next(
            (child for child in getattr(node, "body", ()) if getattr(child, "name", None) == part),
            None,
        )
    if node is None:
        return "gone"
    segment = ast.get_source_segment(text, node) if path else text
    return hashlib.sha256((segment or "").encode()).hexdigest()[:8]


if __name__ == "__main__":
    for row in table():
        if (now := digest(row.source)) != row.digest:
            print(f"{now} was {row.digest}  {row.source}: {row.name} is {row.how}, {row.why}")
