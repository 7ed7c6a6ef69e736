"""Record what happened to a run besides steps, and when."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import Connection

from storage import schema


def record_event(
    connection: Connection, run_id: int, kind: str, from_step: int, to_step: int, detail: dict[str, Any]
) -> int:
    """Record what happened to a run, for whoever asks later; the id of the event."""
    result = connection.execute(
        schema.event.insert().values(
            run_id=run_id,
            created_at=utc_now(),
            kind=kind,
            from_step=from_step,
            to_step=to_step,
            detail=json.dumps(detail),
        )
    )
    (event_id,) = result.inserted_primary_key or (0,)
    return int(event_id)


def utc_now() -> str:
    """Now in UTC, ISO 8601 with milliseconds: sorts as text, and is the same in every database."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
