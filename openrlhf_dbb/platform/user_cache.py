"""The user's folder for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Where this package keeps such files, by the XDG rules; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "openrlhf_dbb"
