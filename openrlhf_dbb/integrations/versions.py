"""Which releases of a trainer an integration is written for: it reaches into what the next release may change."""

from __future__ import annotations

import importlib.metadata

from packaging.specifiers import SpecifierSet

ALLOWED = {"trl": ">=1.16,<1.17", "verl": ">=0.9.1,<0.10"}
"""By distribution; setup.py's extras ask for the same."""


def check(distribution: str) -> None:
    """Refuse a release that the integration was not written for.

    Raises:
        ImportError: it is outside the range, or not installed.
    """
    wanted = f"{distribution}{ALLOWED[distribution]}"
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{distribution} is not installed; pip install '{wanted}'") from None
    if found not in SpecifierSet(ALLOWED[distribution]):
        raise ImportError(
            f"{distribution} {found} is installed, and openrlhf_dbb.integrations.{distribution} is written for "
            f"{ALLOWED[distribution]}; pip install '{wanted}'"
        )
