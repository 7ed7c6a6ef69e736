"""Whether a run goes on, how old it is, and by what it was trained, in short texts."""

from datetime import datetime, timezone

from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.storage import RunRecord
from openrlhf_dbb.storage.decode import instant
from openrlhf_dbb.storage.owner import SILENT_S

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def state(run: RunRecord) -> str:
    """Return "finished", "running", "stale" or "damaged".

    A stale run is not finished, and its owner seems to have ended: a killed process cannot write
    that its run has ended.
    """
    if run.damage:
        return "damaged"
    is_silent = seconds_since(run.heartbeat_at) > SILENT_S and not run.owner.is_local
    if run.status == "running" and (is_silent or run.owner.is_gone):
        return "stale"
    return run.status


def status(run: RunRecord) -> str:
    """Return the state; a stale run's has the time since its last write, such as "stale 3 h"."""
    name = state(run)
    return f"{name} {age(run.heartbeat_at)}" if name == "stale" else name


def age(moment: str) -> str:
    """Return the time since a moment (UTC, ISO 8601) in its largest unit, such as "3 h"."""
    seconds = max(seconds_since(moment), 0)
    for name, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return "0 s"


def seconds_since(moment: str) -> float:
    """Return the time since a moment (UTC, ISO 8601), in seconds."""
    return (datetime.now(timezone.utc) - instant(moment)).total_seconds()


def method(run: RunRecord) -> str:
    """Return method and estimator of a run, such as "dapo+dbb"; "import" for one of a log."""
    if run.method == IMPORTED:
        return run.method
    return f"{run.method}+{run.estimator}" if run.method else run.estimator


def parameters(run: RunRecord) -> str:
    """Return the estimator's parameters, such as "discount = 0.5, prior_alpha = 1.0"."""
    return ", ".join(f"{name} = {value}" for name, value in run.parameters.items())
