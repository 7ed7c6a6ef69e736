"""The laboratory's command: estimators measured without training; changes no store and needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from openrlhf_dbb import figures
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import calibration_command, mse_command, replay_command, simulate_command
from storage import StoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 with one line on stderr if it cannot be done."""
    arguments = _parser().parse_args(argv)
    try:
        figures.require_matplotlib()  # now, not after all the work
        arguments.command(arguments)
        sys.stdout.flush()
    except (UsageError, StoreError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, is done; the flush at exit must not fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openrlhf_dbb.cli.lab",
        description="Choose an estimator and a discount before training, or after it from a run's log.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (mse_command, simulate_command, replay_command, calibration_command):
        module.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
