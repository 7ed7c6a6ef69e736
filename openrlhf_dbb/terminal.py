"""Text from a store, made safe to print or to show on a page; tables, with colour where there is a terminal."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

TEXT_WIDTH = 60
"""Longer texts, such as prompts, are cut to it in tables."""

WIDE_HELP = "all columns, and no text cut to fit the terminal"

_LEAST = 12  # no text is cut to less to make a table fit
_GAP = 2
_PASSWORD = re.compile(r"(://[^\s/:@]*):[^\s/]*@")


def shown(value: object, width: int | None = TEXT_WIDTH) -> str:
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
    if text.replace("\n", "").replace("\t", "").isprintable():  # most are, and this is much faster
        return text
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


class Styled(str):
    """A text with one of rich's styles, such as "bold" or "yellow", which a terminal with colour shows."""

    style: str

    def __new__(cls, text: str, style: str) -> Styled:
        styled = super().__new__(cls, text)
        styled.style = style
        return styled


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None = TEXT_WIDTH) -> str:
    """Aligned text: numbers right-aligned with 4 digits, None and NaN as "-".

    Args:
        width: longer texts are cut to it; None: none is cut.

    Example:
        >>> print(table(("name", "mse"), [("point", 0.0116), ("dbb 0.4", 0.00833333), ("auto", None)]))
        name          mse
        point      0.0116
        dbb 0.4  0.008333
        auto            -
    """
    cells = [list(header), *([_cell(value, width) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = (
        "  ".join(
            cell.ljust(size) if text else cell.rjust(size)
            for cell, size, text in zip(row, widths, _are_texts(header, rows), strict=True)
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, cut: Collection[str] = ()) -> None:
    """Print a :func:`table` whose texts are complete, in colour on a terminal.

    Args:
        cut: columns whose texts are cut where the terminal is too narrow for the table, the widest most.
    """
    console = _console()
    if not console.is_terminal:
        print(table(header, rows, width=None))
        return
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [[_cell(value, None) for value in row] for row in rows]
    columns = list(zip(*cells, strict=True)) if cells else [()] * len(header)
    by_cells = [max(map(cell_len, column), default=0) for column in columns]
    widths = [max(width, cell_len(name)) for width, name in zip(by_cells, header, strict=True)]
    if _total(widths) > console.width:  # a header may take several lines
        by_words = (max(map(cell_len, name.split()), default=0) for name in header)
        widths = _fitted(header, list(map(max, by_cells, by_words)), console.width, cut)
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name, width, text in zip(header, widths, _are_texts(header, rows), strict=True):
        made.add_column(
            Text("\n".join(textwrap.wrap(name, max(width, 1)))), width=width, justify="left" if text else "right",
            no_wrap=True, overflow="ellipsis", vertical="bottom",
        )  # fmt: skip
    for row, texts in zip(rows, cells, strict=True):
        made.add_row(*(Text(text, getattr(value, "style", "")) for value, text in zip(row, texts, strict=True)))
    _console(_total(widths)).print(made)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names with their values; on a terminal, values longer than a line go on below themselves."""
    console, facts = _console(), list(facts)
    width = max(len(name) for name, _ in facts) + _GAP
    if not console.is_terminal:
        print("\n".join(f"{name + ':':<{width}}{shown(value, None)}" for name, value in facts))
        return
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, _GAP, 0, 0))
    made.add_column(width=width - _GAP, style="dim")
    made.add_column(overflow="fold")
    for name, value in facts:
        made.add_row(name, Text(shown(value, None), getattr(value, "style", "")))
    console.print(made)


def print_line(text: str = "", style: str = "") -> None:
    """Print a line, in one of rich's styles on a terminal with colour."""
    console = _console()
    if console.is_terminal:
        from rich.text import Text

        console.print(Text(shown(text, None), style))
    else:
        print(shown(text, None))


def print_title(text: str) -> None:
    """Print an empty line, then the title of what follows."""
    print_line()
    print_line(text, "bold")


def print_json(value: Any) -> None:
    """Print :func:`json_text`."""
    print(json_text(value))


def json_text(value: Any) -> str:
    """The value as one JSON document in ASCII; NaN becomes null."""
    return json.dumps(_without_nan(value), indent=2, allow_nan=False)


def records(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of a table as objects for :func:`print_json`.

    Example:
        >>> records(("name", "mse"), [("dbb", 0.5)])
        [{'name': 'dbb', 'mse': 0.5}]
    """
    return [dict(zip(header, row, strict=True)) for row in rows]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if value != value else value


def _console(least_width: int = 0) -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, least_width)
    return console


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _fitted(header: Sequence[str], needed: list[int], width: int, cut: Collection[str]) -> list[int]:
    """Widths of the columns: those in ``cut`` give up what the table is too wide, the widest first."""
    widths = needed.copy()
    may_shrink = [place for place, name in enumerate(header) if name in cut]
    for _ in range(_total(needed) - width):
        widest = max(may_shrink, key=lambda place: widths[place], default=None)
        if widest is None or widths[widest] <= _LEAST:
            break
        widths[widest] -= 1
    return widths


def _are_texts(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    return [any(isinstance(row[column], str) for row in rows) for column in range(len(header))]


def _cell(value: Any, width: int | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else shown(value, width)
