"""The parser of every command: a mistake ends in one line, with what was probably meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.spelling import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse's: errors are UsageErrors, flags are not abbreviated, the description becomes a sentence."""

    def __init__(self, *, description: str, **options: Any) -> None:
        sentence = description[0].upper() + description[1:].rstrip(".") + "."
        super().__init__(**(options | {"description": sentence, "allow_abbrev": False}))

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but nothing may be left over: a sub-parser's errors name its own command."""
        args = sys.argv[1:] if args is None else args
        self._refuse_unknown_flags(args)  # first: argparse would rather miss what a misspelt flag should have given
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _refuse_unknown_flags(self, args: Sequence[str]) -> None:
        known = self._option_string_actions
        for argument in args:
            if argument == "--" or (self._subparsers is not None and not argument.startswith("-")):
                return  # the rest is not this parser's flags
            flag = argument.partition("=")[0]
            if flag.startswith("--") and " " not in argument and flag not in known:
                self.error(f"unknown flag {flag}{did_you_mean(flag, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"unknown command {value!r}{did_you_mean(value, action.choices or ())}")
        super()._check_value(action, value)
