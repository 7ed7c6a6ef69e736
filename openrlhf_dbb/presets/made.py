"""Makes the folder of a preset's model and data once, whole, whatever process comes first."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError


def cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openrlhf_dbb" / name


def make_once(folder: Path, stamp_name: str, wanted: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Fill the folder unless its stamp says that it holds what is wanted.

    The folder appears complete or not at all. If two processes call at once, one makes it and the other waits.
    ``write`` writes all files but the stamp into an empty folder. A folder with another stamp is replaced. One with
    files and no stamp is refused.
    """
    if _stamp(folder, stamp_name) == wanted:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also by a process that is killed
        stamp = _stamp(folder, stamp_name)
        if stamp == wanted:
            return
        if stamp is None and folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} has other files, without {stamp_name}; move them")
        building = folder.with_name(f".{folder.name}.building")
        shutil.rmtree(building, ignore_errors=True)  # a killed process may have left it
        building.mkdir()
        write(building)
        (building / stamp_name).write_text(json.dumps(wanted))
        if stamp is not None:
            shutil.rmtree(folder)
        building.rename(folder)


def _stamp(folder: Path, name: str) -> dict[str, Any] | None:
    return json.loads((folder / name).read_text()) if (folder / name).exists() else None
