"""What several processes of a training of TRL do together: all of them call these functions."""

from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object


def on_first(work: Callable[[], Any]) -> Any:
    """Run ``work`` on the first process and return its result on all; if it fails there, all fail.

    Raises:
        RuntimeError: ``work`` has failed; on the first process its own error is raised.
    """
    result = None
    error: Exception | None = None
    if PartialState().is_main_process:
        try:
            result = work()
        except Exception as failure:
            error = failure
    outcome = [result, None if error is None else str(error)]
    broadcast_object_list(outcome)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise RuntimeError(f"the first process cannot go on: {outcome[1]}")
    return outcome[0]


def gathered(work: Callable[[], list[Any]]) -> list[Any]:
    """Return what ``work`` returns on all processes, joined; if it fails on one, all fail.

    Raises:
        RuntimeError: ``work`` has failed on another process; on that one its own error is raised.
    """
    rows: list[Any] = []
    error: Exception | None = None
    try:
        rows = work()
    except Exception as failure:
        error = failure
    outcomes = gather_object(
        [(rows, None if error is None else f"{type(error).__name__}: {error}")]
    )
    if error is not None:
        raise error
    for _, failed in outcomes:
        if failed is not None:
            raise RuntimeError(f"another process cannot go on: {failed}")
    return [row for rows, _ in outcomes for row in rows]
