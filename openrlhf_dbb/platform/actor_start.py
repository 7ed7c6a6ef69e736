"""Why an actor of Ray did not start, in one line, where vLLM writes the reason into a log alone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf_dbb.errors import RunError

_ENDED = re.compile(
    r"^\(\w+ pid=\d+\) ERROR .*?\] ([\w.]*(?:Error|Exception): .+)$",
    re.MULTILINE,
)


@contextmanager
def reason_of_failure() -> Iterator[None]:
    """Name the reason if vLLM does not start in the block, which an actor runs.

    On CUDA vLLM's engine is a process of its own. It writes the reason into the log of this actor
    and nowhere else.

    Raises:
        RunError: vLLM did not start, and the log says why.
    """
    try:
        yield
    except RuntimeError as error:
        log = Path("/proc/self/fd/1")
        ended = _ENDED.search(log.read_text(errors="replace")) if log.is_file() else None
        if ended is None:
            raise
        raise RunError(f"vLLM did not start: {ended[1]}") from error


@contextmanager
def started_actors() -> Iterator[None]:
    """Hand on the RunError of an actor that could not be made in the block.

    Raises:
        RunError: that of the actor. Ray hands over its text alone.
    """
    from ray.exceptions import RayActorError

    try:
        yield
    except RayActorError as error:
        mark = f"{RunError.__module__}.{RunError.__name__}: "
        _, raised, line = str(error).rpartition(mark)
        if not raised:
            raise
        raise RunError(line.strip()) from error
