"""Text from a store, made safe to print or to show on a page: escaped, cut, aligned, without passwords."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_TEXT_WIDTH = 60
_PASSWORD = re.compile(r"(://[^\s/:@]*):[^\s/]*@")


def shown(value: object, width: int | None = _TEXT_WIDTH) -> str:
    r"""The text with unprintable characters escaped, cut to ``width`` characters unless that is None.

    Example:
        >>> shown("red \x1b[31m\n")
        'red \\x1b[31m\\n'
        >>> shown("0123456789", width=8)
        '01234...'
    """
    text = str(value)
    if width is not None:
        text = text[: width + 1]  # the rest would be cut anyway, and may be long
    escaped = "".join(map(_escaped, text))
    return escaped if width is None or len(escaped) <= width else escaped[: width - 3] + "..."


def readable(text: str) -> str:
    r"""Like :func:`shown` without a width, but line breaks stay.

    Example:
        >>> readable("one\ntwo \x07")
        'one\ntwo \\x07'
    """
    return "".join(character if character in "\n\t" else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def without_passwords(text: str) -> str:
    """The text with the password of every URL in it masked.

    Example:
        >>> without_passwords("reward http://ann:p@ss@host/score")
        'reward http://ann:***@host/score'
    """
    return _PASSWORD.sub(r"\1:***@", text)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned text: numbers right-aligned with 4 digits, None and NaN as "-".

    Example:
        >>> print(table(("name", "mse"), [("point", 0.0116), ("dbb 0.4", 0.00833333), ("auto", None)]))
        name          mse
        point      0.0116
        dbb 0.4  0.008333
        auto            -
    """
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    left = [any(isinstance(row[column], str) for row in rows) for column in range(len(header))]
    lines = (
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, left, strict=True)
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a :func:`table`."""
    print(table(header, rows))


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else shown(value)
