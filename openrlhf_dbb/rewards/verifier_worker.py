"""The program of a verifier process: one JSON request per line on stdin, one JSON reply per line on stdout.

Request: ``{"label": text, "answer": text}``. Reply: ``{"correct": true}`` or ``false``;
``{"unverified": reason}`` if Math-Verify failed on the answer; ``{"bad_label": reason}`` if it cannot read
the label. A request without an answer asks for the label alone: the reply is ``{}`` if it can be read.
The first line is ``{"ready": true}``. Run by path, so it imports nothing of its own package.

Usage: python verifier_worker.py SECONDS   (the time a request may take before the process ends itself)
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 * 1024**3


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # Math-Verify's own time limits need the main thread's alarm; the parent process has the limit.
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


@functools.lru_cache(maxsize=1024)
def _parse_label(text: str) -> list[Any]:
    return _parse(text)


def reply_to(label: str, answer: str | None = None) -> dict[str, Any]:
    """The reply to one request, as described at the top of this file."""
    from math_verify import verify

    try:
        gold = _parse_label(label)
    except MemoryError:
        raise
    except Exception as error:
        return {"bad_label": repr(error)}
    # Strings alone: an answer was found but not understood.
    if all(isinstance(part, str) for part in gold):
        return {"bad_label": f"understood as {gold}"}
    if answer is None:
        return {}
    try:
        return {"correct": bool(verify(gold, _parse(answer), timeout_seconds=None, raise_on_error=True))}
    except MemoryError:
        raise  # this process cannot be trusted any more: end it
    except Exception as error:
        return {"unverified": repr(error)}


def main() -> None:
    """Serve requests until stdin closes, which it also does when the parent is killed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # the time limit bounds long numbers
    # Only replies may go into the pipe; whatever a library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    seconds = float(sys.argv[1])
    import math_verify  # noqa: F401  (an import error shows before the first request)

    logging.disable(logging.WARNING)  # Math-Verify warns that it has no time limit
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The signal is not handled, so that it ends even a computation in C; for when the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply = reply_to(**request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
