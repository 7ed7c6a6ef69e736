"""Docstrings as the site's API reference shows them; loaded by mkdocstrings, see mkdocs.yml."""

import itertools
import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Turns what Sphinx would read of a docstring into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _to_markdown(pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # not called for a package
        if obj.is_attribute and obj.docstring is None and (text := _comment(obj)):
            obj.docstring = griffe.Docstring(text, parent=obj)
        _to_markdown(obj)


def _comment(field: griffe.Object) -> str:
    """Return the comment behind a field of a class, or the comment lines above it."""
    if field.lineno is None or field.parent is None or not field.parent.is_class:
        return ""
    lines = field.lines_collection[field.filepath]
    if found := re.search(r"  # (?!type:|noqa)(.*)", lines[(field.endlineno or field.lineno) - 1]):
        return found[1]
    above = itertools.takewhile(
        lambda line: line.strip().startswith("# "), reversed(lines[: field.lineno - 1])
    )
    return " ".join(line.strip()[2:] for line in reversed(list(above)))


def _to_markdown(obj: griffe.Object) -> None:
    if obj.docstring is None:
        return
    text = re.sub(r":(?:class|data|func|meth|mod):(?=`)", "", obj.docstring.value)
    for pattern, plain in (
        (r"::$", ":"),
        (r"^Class attributes:$", "Attributes:"),
        (r"^Example:$", "Examples:"),
    ):
        text = re.sub(pattern, plain, text, flags=re.MULTILINE)
    obj.docstring.value = text
