"""The command tasks lists the tasks of reasoning-gym."""

from __future__ import annotations

import argparse
from typing import Any

from openrlhf_dbb import tasks
from openrlhf_dbb.terminal import print_table, shown


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("tasks", command, opens_store=False)
    text = "only these, as chain_sum?max_terms=2 with settings (default: all)"
    parser.add_argument("--tasks", metavar="TASK,...", help=text)


def command(arguments: argparse.Namespace) -> None:
    """List the tasks with an example each. Raise UsageError if that is not possible."""
    rows = tasks.examples(arguments.tasks and arguments.tasks.split(","))
    print_table(("task", "answer", "question"), [(name, shown(a, 20), shown(q)) for name, a, q in rows])
