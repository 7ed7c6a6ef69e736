"""Presets: flag values as data, one TOML file each, and the paper's own values with their sources.

smollm2  the model and the data of preset smollm2, made from installed packages
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf_dbb.chosen import Values
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.toml_file import TOMLDecodeError, read_toml

FOLDER = Path(__file__).parent
NONE = "none"
DEFAULT = "default"
_PAPER = "paper"
_KEYS = ("description", "extends", "needs_cuda", "flags", "fp32", "gpus", "estimator")


@dataclass(frozen=True)
class Preset:
    """Flag values to start from, by flag without ``--``."""

    description: str  # one line for people; may be ""
    flags: dict[str, Any]  # those of the presets that it extends among them
    gpus: dict[str, Any]  # place the models on GPUs, on a machine with CUDA
    needs_cuda: bool
    # In place of those of ``flags`` where a processor trains in float32
    fp32: dict[str, Any] = field(default_factory=dict)
    # The preset that sets each flag: it or one it extends
    origin: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != _PAPER)


def load(name: str, estimator: str | None = None) -> Preset:
    """Return a preset by its name, "none", or the path of a ``.toml`` file, with an estimator's flags (None: its own).

    A file has ``[flags]``, ``[estimator.NAME]`` for one estimator only, ``[fp32]``, ``[gpus]``, and ``extends``, a
    preset's name. A flag that the file sets replaces the flag's value in float32 of a preset that it extends, too.
    """
    if name == NONE:
        return Preset("", {}, {}, False)
    table = _table(name)
    own = _flat(table.get("flags", {}))
    fp32 = _flat(table.get("fp32", {}))
    gpus = _flat(table.get("gpus", {}))
    estimator = estimator or own.get("estimator")
    beneath = table.get("extends")
    if beneath == _PAPER:
        parent = Preset("", paper(str(estimator)), {}, False)
    else:
        parent = load(beneath or NONE, estimator)
        estimator = estimator or parent.flags.get("estimator")
    own.update(_flat(table.get("estimator", {}).get(estimator, {})))
    origin = dict.fromkeys(parent.flags, name)
    origin.update(parent.origin)
    origin.update(dict.fromkeys([*own, *gpus], name))
    inherited = {flag: value for flag, value in parent.fp32.items() if flag not in own}
    return Preset(
        description=str(table.get("description", "")),
        flags=parent.flags | own,
        gpus=parent.gpus | gpus,
        needs_cuda=table.get("needs_cuda", parent.needs_cuda),
        fp32=inherited | fp32,
        origin=origin,
    )


def batch(run: Values, rollouts: int) -> None:
    """The default preset's batch becomes half of a step, of ``rollouts``, where it does not divide the step."""
    flag = "train.batch_size"
    is_default = run.origin.get(flag) == f"preset {DEFAULT}"
    if is_default and rollouts % run.values[flag]:
        size = rollouts if rollouts % 2 else rollouts // 2
        run.put({flag: size}, "half of a step's rollouts, as in the paper")


def paper(estimator: str) -> dict[str, Any]:
    """Return the paper's values for ``estimator`` that depend neither on the model nor on the method."""
    table = read_toml(FOLDER / f"{_PAPER}.toml")
    entries = table["flags"] | table["estimator"].get(estimator, {})
    return {flag: entry["value"] for flag, entry in entries.items()}


def _table(name: str) -> dict[str, Any]:
    path = Path(name)
    if not name.endswith(".toml"):
        path = FOLDER / f"{name}.toml"
        if name not in names():
            allowed = [*names(), NONE]
            raise UsageError(
                f"unknown --preset {name!r}{did_you_mean(name, allowed)}; "
                f"known: {', '.join(allowed)}, or a .toml file"
            )
    try:
        table = read_toml(path)
    except (OSError, TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--preset {name} cannot be read: {reason}") from error
    for key in table:
        if key not in _KEYS:
            raise UsageError(
                f"--preset {name} has {key!r}; "
                f"allowed: {', '.join(_KEYS)} (flags belong under [flags])"
            )
    return table


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by flag: in TOML, ``actor.adam.lr = 1e-6`` is a table in a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def cache(name: str) -> Path:
    """Return the folder ``name`` in this package's part of the user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "openrlhf_dbb" / name


def make_once(
    folder: Path, stamp_name: str, wanted: Mapping[str, Any], write: Callable[[Path], None]
) -> None:
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
    file = folder / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
