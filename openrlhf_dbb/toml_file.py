"""Reads a TOML file with Python 3.10 and later."""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOMLDecodeError = tomllib.TOMLDecodeError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a file. Raise OSError, TOMLDecodeError or UnicodeDecodeError."""
    return tomllib.loads(path.read_text(encoding="utf-8"))
