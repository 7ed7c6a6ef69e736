"""Checks the release of TRL that the benchmarks compare with, before minutes of measuring."""

import importlib.metadata

TRL = "1.16.0"


def check_trl() -> None:
    """Leave the program unless the compared release of TRL is installed.

    Raises:
        SystemExit: TRL is missing, or is another release.
    """
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != TRL:
        raise SystemExit(
            f"TRL {TRL} is needed, {installed} is installed: run scripts/setup_env.sh --test, "
            "or name with --only what does not start with trl"
        )
