"""Makes texts of a store safe to show, and prints: tables, error lines, any text on any stream."""

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from openrlhf_dbb.secrets import without_passwords

_common_start = os.path.commonprefix
_LONG_END = 20  # characters; a shorter end, such as " = ?", is shown
_LONGEST_WORD = 30
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
FAILED = 1


def prepare_streams() -> None:
    """Let this process print every text, also where the output is closed or is not in UTF-8.

    A character that a stream's encoding lacks is escaped. A closed stream becomes the null device:
    its number would go to the next file that is opened, such as the database.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_code(command: Callable[[], int]) -> int:
    """Call a command and return its exit code; 1, after a line, if its output cannot be written.

    Where the reader has closed the output, as ``head`` does, the code is 0.
    """
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        drop(sys.stdout)
        print_error(f"error: the output cannot be written: {error.strerror}; send it elsewhere")
        return FAILED


def print_error(line: str) -> None:
    """Print a line on stderr, safe to show. There is no place to say that stderr takes nothing."""
    try:
        print(safe(line), file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def say(text: str) -> None:
    """Print a text of a training, which goes on if the output cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        drop(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print_error(f"warning: the output cannot be written: {error.strerror}")


def drop(stream: TextIO) -> None:
    """Send what is left for a stream nowhere; else the interpreter fails to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shown(value: object, width: int | None = 60) -> str:
    r"""Return the text with unprintable characters escaped, cut to ``width`` characters.

    It is not cut if ``width`` is None.

    Example:
        >>> shown("red \x1b[31m\n")
        'red \\x1b[31m\\n'
        >>> shown("0123456789", width=8)
        '01234...'
    """
    text = str(value)
    if width is not None:
        text = text[: width + 1]  # the rest is cut anyway, and may be long
    escaped = "".join(map(_escaped, text))
    if width is None or len(escaped) <= width:
        return escaped
    return escaped[: width - 3] + "..."


def readable(text: object) -> str:
    r"""Return a text with unprintable characters escaped; line breaks stay."""
    text = str(text)  # somebody may have put bytes into the database
    if text.replace("\n", "").replace("\t", "").isprintable():  # most are, and this is much faster
        return text
    return "".join(character if character in "\n\t" else _escaped(character) for character in text)


def template_of(texts: Sequence[str]) -> tuple[str, str]:
    """Return the start and the end that all texts share, such as a chat template's."""
    if len(texts) < 2:
        return "", ""
    # Not in the middle of a line: its first words belong to the question even if all questions
    # share them.
    start = re.sub(r"[^>\n]*\Z", "", _common_start(texts))
    backwards = [text[len(start) :][::-1] for text in texts]
    end = re.sub(r"\A[^<\n]*", "", _common_start(backwards)[::-1])
    return start, end


def without_shared(texts: Sequence[str], width: int = 60) -> dict[str, str]:
    """Return each text without what texts like it share.

    Its first ``width`` characters then tell it apart. Texts are alike that begin with the same
    ``width // 2`` characters; "..." stands for the start and the end that they share.

    Example:
        >>> asked = "State the final answer to the following arithmetic problem: "
        >>> list(without_shared([f"{asked}12 + 9", f"{asked}13 + 9"]).values())
        ['...12 + 9', '...13 + 9']
    """
    distinct = list(dict.fromkeys(texts))
    start, end = template_of(distinct)
    alike: dict[str, dict[str, str]] = {}
    for text in distinct:
        question = text.removeprefix(start).removesuffix(end)
        alike.setdefault(question[: width // 2], {})[text] = question
    shortened = {}
    for questions in alike.values():
        shortened.update(_shortened(questions, width))
    return shortened


def _shortened(questions: dict[str, str], width: int) -> dict[str, str]:
    longest = max(len(question) for question in questions.values())
    if len(questions) < 2 or longest <= width:
        return questions
    start = _whole_words(_common_start(list(questions.values())))
    rests = {text: question.removeprefix(start) for text, question in questions.items()}
    end = _whole_words(_common_start([rest[::-1] for rest in rests.values()]))[::-1]
    if len(end) < _LONG_END:
        return {text: f"...{rest}" for text, rest in rests.items()}
    return {text: f"...{rest.removesuffix(end)}..." for text, rest in rests.items()}


def _whole_words(shared: str) -> str:
    """Return a shared start without the piece of a word or a number that it may end with."""
    words = max(shared.rfind(" "), shared.rfind("\n")) + 1
    # Chinese, for example, has no spaces.
    return shared[:words] if words > len(shared) - _LONGEST_WORD else shared


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def safe(text: str) -> str:
    """Return the whole text with passwords masked and unprintable characters escaped."""
    return shown(without_passwords(text), width=None)


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print aligned columns: numbers with 4 digits at the right, None and NaN as "-".

    A terminal that is too narrow cuts the longest texts.
    """
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(header):
        is_text = any(isinstance(row[place], str) for row in rows)
        grid.add_column(Text(name), justify="left" if is_text else "right", vertical="bottom")
    for row in rows:
        grid.add_row(*(Text(_cell(value), no_wrap=True, overflow="ellipsis") for value in row))
    _print(grid)


def print_rows(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table of the values with these names; the header has spaces for underscores."""
    cells = []
    for row in rows:
        cells.append([row[name] for name in names])
    print_table([name.replace("_", " ") for name in names], cells)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names with their values; on a terminal, long values go on below themselves."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"{name}:", Text(shown(value, None)))
    _print(grid)


def _print(content: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(content)
        return
    console.width = 10_000  # a pipe gets whole texts
    with console.capture() as printed:
        console.print(content)
    # Rich fills the last column up.
    lines = [line.rstrip() for line in printed.get().splitlines()]
    print("\n".join(lines))


def print_title(text: str) -> None:
    """Print a line behind an empty one; on a terminal it is bold."""
    from rich.text import Text

    print()
    _print(Text(text, "bold"))


def json_text(value: Any) -> str:
    """Return the value as one JSON document in ASCII; NaN and infinity become null."""
    text = json.dumps(value, default=str)
    finite = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(finite, indent=2)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else shown(value, None)
