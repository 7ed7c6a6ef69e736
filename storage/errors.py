"""StoreError, and the repetition of what an outage has cut short."""

import logging
import random
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

RETRY_LIMIT_S = 120.0  # that a transaction is repeated after its first failure

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__package__)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class StoreError(Exception):
    """A store cannot do what was asked. The message is one line, holds no secrets, and says what to do."""


class Interrupted(StoreError):
    """An outage cut a transaction short. The transaction may or may not have been committed."""


def retried(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a call of one transaction that may be made twice: repeat it for ``RETRY_LIMIT_S`` after an outage.

    Other errors (a full disk, a refused value) are not repeated, and neither are those of a read-only store.
    """

    @wraps(work)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        began = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return work(*args, **kwargs)
            except Interrupted as error:
                waited = time.monotonic() - began
                if waited >= RETRY_LIMIT_S:
                    raise StoreError(
                        f"{error}; gave up after {waited:.0f} s; resume when the outage is over"
                    ) from None
                if pause == _FIRST_PAUSE_S:
                    _log.warning("%s; retrying for up to %g s", error, RETRY_LIMIT_S)
            # Random, so that processes that failed together do not retry together.
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    return call
