"""A run in numbers, as runs, show and compare print it: held-out accuracy, whether it still runs, what it spent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from openrlhf_dbb.inspect.costs import (
    FATES,
    mixed_groups,
    rollouts_per_mixed_group,
    tokens_per_mixed_group,
    usage_totals,
)
from openrlhf_dbb.terminal import Styled, without_passwords
from storage import PosteriorStore, RunRecord
from storage.held_out import held_out
from storage.owner import has_ended

_STYLES = {"running": "green", "stale": "yellow", "finished": ""}
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def overview(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """A run in numbers by name, ready for JSON; None where something is not known."""
    totals = usage_totals(store, run)
    return {
        "number": run.run_id,
        "name": run.name,
        "uuid": run.uuid,
        "status": state(run),
        "step": run.last_step,
        "held_out": held_out_numbers(store, run),
        "method": run.method or None,
        "estimator": run.estimator,
        "parameters": run.parameters,
        "rollouts": totals["generated"],
        "tokens": totals["generated_tokens"],
        **{name: totals[name] for name in FATES},
        "groups": totals["groups"],
        "mixed_groups": mixed_groups(totals),
        "rollouts_per_mixed_group": rollouts_per_mixed_group(totals),
        "tokens_per_mixed_group": tokens_per_mixed_group(totals),
        "model": without_passwords(run.model),
        "dataset": without_passwords(run.dataset),
        "started": run.created_at,
        "last_write": run.heartbeat_at,
    }


def held_out_numbers(store: PosteriorStore, run: RunRecord) -> dict[str, Any] | None:
    """Held-out accuracy of a run at its start, its best and its last, with steps; None if it was not measured."""
    found = held_out(store, run)
    if found is None:
        return None
    numbers: dict[str, Any] = {}
    for name, place in (("start", 0), ("best", found.best), ("last", -1)):
        numbers |= {name: float(found.accuracy[place]), f"{name}_step": int(found.step[place])}
    return numbers | {"prompts": found.prompts, "samples": found.samples, "benchmarks": found.benchmarks}


def from_start_to_last(numbers: Mapping[str, Any] | None) -> Styled | None:
    """Held-out accuracy in a table.

    Example:
        >>> from_start_to_last({"start": 0.3964, "start_step": 0, "last": 0.4277, "last_step": 64})
        '39.6 -> 42.8 %'
    """
    if numbers is None:
        return None
    start, last = 100 * numbers["start"], 100 * numbers["last"]
    before = "" if numbers["start_step"] == numbers["last_step"] else f"{start:.1f} -> "
    return Styled(f"{before}{last:.1f} %", "bold")


def state(run: RunRecord) -> str:
    """ "finished", "running", or "stale": not finished, and its owner seems to have ended."""
    stale = run.status == "running" and has_ended(run.owner, seconds_since(run.heartbeat_at))
    return "stale" if stale else run.status


def status(run: RunRecord) -> Styled:
    """The state of a run, with the time since its last write if it is stale, such as "stale 3 h"."""
    found = state(run)
    return Styled(f"{found} {age(run.heartbeat_at)}" if found == "stale" else found, _STYLES[found])


def age(moment: str) -> str:
    """The time since a moment (UTC, ISO 8601) in its largest unit, such as "3 h"."""
    seconds = max(seconds_since(moment), 0)
    name, size = next((unit for unit in _UNITS if seconds >= unit[1]), _UNITS[-1])
    return f"{int(seconds // size)} {name}"


def method(run: RunRecord) -> str:
    """What the run was trained with, such as "dapo+dbb"."""
    return f"{run.method}+{run.estimator}" if run.method else run.estimator


def seconds_since(moment: str) -> float:
    """The time since a moment (UTC, ISO 8601), in seconds."""
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()
