"""Which Ray cluster a command joins."""

from __future__ import annotations

import os
from pathlib import Path

ALONE = "local"
"""Value of RAY_ADDRESS that keeps a command out of any cluster."""


def joined() -> str | None:
    """Address of the cluster that is joined: RAY_ADDRESS, or what ``ray start`` has noted on this host; None: none."""
    given = os.environ.get("RAY_ADDRESS")
    if given:
        return None if given == ALONE else given
    noted = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return noted.read_text().strip() or None if noted.is_file() else None
