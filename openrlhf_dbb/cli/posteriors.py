"""The ``openrlhf-dbb`` command: inspect and maintain a posterior store; needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect import compare_runs, costs, export, history, maintenance, report, runs, show
from openrlhf_dbb.terminal import shown
from storage import DEFAULT_URL, URL_VARIABLE, StoreError, open_store


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if ``check`` found something; 2, with one line on stderr, if the request cannot be carried out.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.opens_store:
            with open_store(arguments.store_url, create=False) as store:
                code = arguments.command(store, arguments)
        else:
            code = arguments.command(arguments)
        sys.stdout.flush()
    except (UsageError, StoreError) as error:
        print(f"openrlhf-dbb: {shown(error, width=None)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe; the interpreter must not fail when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf-dbb", description="Inspect and maintain a store of reward posteriors."
    )
    url: dict[str, Any] = {
        "dest": "store_url",
        "metavar": "URL",
        "help": f"the store (default: ${URL_VARIABLE}, else {DEFAULT_URL})",
    }
    parser.add_argument("--store.url", default=None, **url)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[..., int | None], description: str, *, opens_store: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, description=description)
        # Suppressed: its default must not override an option given before the command.
        sub.add_argument("--store.url", default=argparse.SUPPRESS, **url)
        sub.set_defaults(command=command, opens_store=opens_store)
        return sub

    for module in (runs, show, history, compare_runs, costs, export, report, maintenance):
        module.add_commands(add)
    return parser


if __name__ == "__main__":
    sys.exit(main())
