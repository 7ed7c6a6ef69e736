"""The command completion: a script that completes commands and flags in the shell."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import shtab

from openrlhf_dbb.cli import main

_COMPLETED = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("completion", completion, opens_store=False)
    parser.epilog = f'bash: eval "$({main.PROGRAM} completion bash)", for example in ~/.bashrc'
    parser.add_argument(
        "shell", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS, help=", ".join(shtab.SUPPORTED_SHELLS)
    )


def completion(arguments: argparse.Namespace) -> None:
    """Print the script. It has the flags of ``train`` if OpenRLHF, most of whose they are, is installed."""
    parser = main.build(main.COMMANDS)
    commands = _commands(parser)
    if importlib.util.find_spec("openrlhf") is not None:
        from openrlhf_dbb.driver.flags import build_parser

        commands["train"] = build_parser()
    _complete_paths(parser)
    print(shtab.complete(parser, arguments.shell))


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return actions[0].choices if actions else {}


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.metavar in _COMPLETED:
            action.complete = _COMPLETED[action.metavar]  # type: ignore[attr-defined]
    for command in _commands(parser).values():
        _complete_paths(command)
