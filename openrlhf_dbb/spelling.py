"""What was probably meant by a name that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """``", did you mean NAME?"``, or "" if no known name is near.

    Example:
        >>> did_you_mean("dbbb", ["auto", "dbb"])
        ', did you mean dbb?'
        >>> did_you_mean("--lr", ["--actor.adam.lr", "--eval.steps"])
        ', did you mean --actor.adam.lr?'
        >>> did_you_mean("--colour", ["--eval.steps"])
        ''
    """
    known = list(known)
    last = [name for name in known if name.endswith("." + given.lstrip("-"))]
    near = last or difflib.get_close_matches(given, known, n=1)
    return f", did you mean {near[0]}?" if near else ""
