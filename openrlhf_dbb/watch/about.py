"""Facts, configuration, lineage and events of a run, as texts that are safe to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.inspect.overview import status
from openrlhf_dbb.inspect.show import configuration, facts
from openrlhf_dbb.terminal import shown, without_passwords
from storage import PosteriorStore, RunRecord
from storage.inspection import events


def about(store: PosteriorStore, run: RunRecord, runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return facts, configuration, lineage and events of a run.

    Args:
        runs: all runs of the store.
    """
    return {
        "facts": [[name, str(value)] for name, value in facts(store, run).items()],
        "config": [list(pair) for pair in configuration(run)],
        "lineage": _lineage(run, runs),
        "events": [[row["created_at"], row["kind"], row["from_step"], row["to_step"]] for row in events(store, run)],
    }


def _lineage(run: RunRecord, runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return relation, name and text of the ancestors, oldest first, of the run itself and of its descendants."""
    by_uuid = {other.uuid: other for other in runs}
    rows: list[list[Any]] = []
    parent = run.parent
    while parent is not None:
        here = by_uuid.get(parent["uuid"])
        place = "" if here else f", in {without_passwords(parent['database'])}"
        rows.insert(0, ["ancestor", parent["name"], f"its step {parent['step']}, weight {parent['weight']:g}{place}"])
        parent = here.parent if here else None
    rows.append(["this run", run.name, f"{status(run)}, step {run.last_step}"])
    rows += [
        ["descendant", other.name, f"from step {other.parent['step']}, weight {other.parent['weight']:g}"]
        for other in by_uuid.values()
        if other.parent is not None and other.parent["uuid"] == run.uuid
    ]
    return [[shown(cell, width=None) for cell in row] for row in rows]
