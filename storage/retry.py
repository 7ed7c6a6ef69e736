"""Repeat transactions that an outage cut short: a server that restarts, a lost connection, a lock."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from storage.errors import StoreError

LIMIT_S = 120.0
"""How long a transaction is repeated after its first failure, in seconds."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_log = logging.getLogger("storage")
_waits = ContextVar("waits", default=True)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Interrupted(StoreError):
    """A transaction was cut short by an outage that may pass; it may or may not have been committed."""


@contextmanager
def impatient() -> Iterator[None]:
    """In this block of this thread :func:`retried` repeats nothing: an outage is an :class:`Interrupted` at once."""
    before = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(before)


def retried(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: repeat a call that raises :class:`Interrupted`, with growing, random pauses.

    Only for calls of one transaction that may be made twice: an attempt may have been committed although its
    acknowledgement was lost. An outage is logged once, and once more when it is over. Errors that do not pass by
    themselves (a full disk, a refused value) are not repeated.

    Raises:
        StoreError: the outage lasted longer than ``LIMIT_S``.
    """

    @wraps(work)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return work(*args, **kwargs)
        except Interrupted as error:
            if not _waits.get():
                raise
            began = time.monotonic()
            _log.warning("%s; retrying for up to %g s", error, LIMIT_S)
        pause = _FIRST_PAUSE_S
        while True:
            left = began + LIMIT_S - time.monotonic()
            # Random, so that processes that failed together do not retry together.
            time.sleep(min(pause * random.uniform(0.5, 1.5), max(left, 0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                result = work(*args, **kwargs)
            except Interrupted as error:
                waited = time.monotonic() - began
                if waited >= LIMIT_S:
                    raise StoreError(f"{error}; gave up after {waited:.0f} s; resume when the outage is over") from None
            else:
                _log.info("the store is back after %.1f s; nothing was lost", time.monotonic() - began)
                return result

    return call
