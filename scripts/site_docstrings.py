"""Docstrings as the site's API reference shows them; loaded by mkdocstrings, see mkdocs.yml."""

import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Turns what Sphinx would read of a docstring into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _to_markdown(pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # not called for a package
        _to_markdown(obj)


def _to_markdown(obj: griffe.Object) -> None:
    if obj.docstring is None:
        return
    text = re.sub(r":(?:class|data|func|meth|mod):(?=`)", "", obj.docstring.value)
    for pattern, plain in ((r"::$", ":"), (r"^Class attributes:$", "Attributes:"), (r"^Example:$", "Examples:")):
        text = re.sub(pattern, plain, text, flags=re.MULTILINE)
    obj.docstring.value = text
