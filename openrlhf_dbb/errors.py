"""The exceptions that end a command with one line.

Every other exception is a fault of ours and ends in a traceback, or in a line that asks to report it
where a stored value that was edited may have caused it.
"""

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """The user can fix this; exit code 2. Names the thing, the value found, what is allowed and what to do next."""


class RunError(Exception):
    """A run that has begun cannot go on; exit code 1. Names the thing, what was found, and what to do next."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``", did you mean NAME?"``, or "" if no known name is near.

    Example:
        >>> did_you_mean("dbbb", ["auto", "dbb"]), did_you_mean("--lr", ["--actor.adam.lr", "--eval.steps"])
        (', did you mean dbb?', ', did you mean --actor.adam.lr?')
    """
    known = list(known)
    last = [name for name in known if name.endswith("." + given.lstrip("-"))]
    near = last or difflib.get_close_matches(given, known, n=1)
    return f", did you mean {near[0]}?" if near else ""
