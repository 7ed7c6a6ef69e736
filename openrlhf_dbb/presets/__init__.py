"""Presets: flag values as data, one TOML file each, and the paper's own values with their sources."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.spelling import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
NONE = "none"
DEFAULT = "default"
_PAPER = "paper"
_KEYS = ("description", "extends", "needs_cuda", "expects", "flags", "gpus", "estimator")


@dataclass(frozen=True)
class Preset:
    """Flag values to start from.

    Attributes:
        description: what it is, in one line; "" if it does not say.
        flags: by flag without ``--``, those of its parents beneath.
        gpus: flags that place the models on GPUs, for a machine with CUDA.
        needs_cuda: whether it is of no use without CUDA.
        expects: the machine it is made for and the time it takes there, in one line; "" if it does not say.
    """

    description: str
    flags: dict[str, Any]
    gpus: dict[str, Any]
    needs_cuda: bool
    expects: str = ""


@dataclass(frozen=True)
class PaperValue:
    """A value of the paper and where it stands."""

    value: Any
    source: str


def names() -> list[str]:
    """Presets that can be asked for by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != _PAPER)


def load(name: str, estimator: str | None = None) -> Preset:
    """Preset ``name``, or that of a file.

    Args:
        name: one of :func:`names`, "none", or the path of a ``.toml`` file: ``[flags]``, ``[estimator.NAME]`` for the
            flags of one estimator only, ``[gpus]``, and ``extends`` with the name of a preset to start from.
        estimator: whose flags are taken; None: the preset's own.

    Raises:
        UsageError: no such preset, or a file that cannot be read as one.
    """
    if name == NONE:
        return Preset("", {}, {}, False)
    table = _table(name)
    own = table.get("flags", {})
    estimator = estimator or own.get("estimator")
    beneath = table.get("extends")
    if beneath == _PAPER:
        values = {flag: entry.value for flag, entry in paper(str(estimator)).items()}
        parent = Preset("", values, {}, False)
    else:
        parent = load(beneath or NONE, estimator)
        estimator = estimator or parent.flags.get("estimator")
    flags = parent.flags | own | table.get("estimator", {}).get(estimator, {})
    gpus = parent.gpus | table.get("gpus", {})
    needs_cuda, expects = table.get("needs_cuda", parent.needs_cuda), str(table.get("expects", ""))
    return Preset(str(table.get("description", "")), flags, gpus, needs_cuda, expects)


def paper(estimator: str) -> dict[str, PaperValue]:
    """The paper's values that depend neither on the model nor on the method, for ``estimator``."""
    table = read_toml(FOLDER / f"{_PAPER}.toml")
    entries = table["flags"] | table["estimator"].get(estimator, {})
    return {flag: PaperValue(**entry) for flag, entry in entries.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _table(name: str) -> dict[str, Any]:
    """The preset's file, with flags by their names: ``actor.adam.lr = 1e-6`` need not be quoted."""
    path = FOLDER / f"{name}.toml"
    if name.endswith(".toml"):
        path = Path(name)
    elif name not in names():
        known = [*names(), NONE]
        raise UsageError(
            f"unknown --preset {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}, or a .toml file"
        )
    try:
        table = read_toml(path)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--preset {name} cannot be read: {reason}") from error
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(f"--preset {name} has {key!r}; allowed: {', '.join(_KEYS)} (flags belong under [flags])")
        nested = list(value.values()) if key == "estimator" and isinstance(value, dict) else []
        if key in ("flags", "gpus", "estimator") and not all(isinstance(each, dict) for each in (value, *nested)):
            raise UsageError(f"--preset {name}: {key} = {value!r} is no table; write [{key}] and the flags below it")
    if table.get("extends", _PAPER) not in (_PAPER, *names()):
        raise UsageError(f"--preset {name} extends {table['extends']!r}; known: {', '.join(names())}")
    flat = {key: _flat(table[key]) for key in ("flags", "gpus") if key in table}
    by_estimator = {which: _flat(values) for which, values in table.get("estimator", {}).items()}
    return table | flat | {"estimator": by_estimator}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
