"""The laboratory's command: estimators measured without training; changes no store and needs no torch."""

from __future__ import annotations

import argparse
from typing import Any

from openrlhf_dbb.lab import calibration_command, mse_command, replay_command


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""

    def explain(arguments: argparse.Namespace) -> None:
        parser.print_help()

    parser = add("lab", explain, opens_store=False)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for module in (mse_command, replay_command, calibration_command):
        module.add_command(commands)
