"""Stand-ins for compiled modules that are imported but not called: flash-attn's, since the index has no wheel of it.

modules/  not a package but a folder, put at the end of the import path: a real module comes first
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent / "modules")


def add() -> None:
    """Let this process find them; Ray calls it in each worker."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)


def is_real(module: str) -> bool:
    """Whether a module can be found that is not one of these; it is not imported."""
    spec = importlib.util.find_spec(module)
    return spec is not None and not (spec.origin or "").startswith(FOLDER)
