"""The parser of every command, and the options that several commands have."""

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from openrlhf_dbb.errors import UsageError, did_you_mean

if TYPE_CHECKING:  # the help does not wait for SQLAlchemy
    from openrlhf_dbb.storage import PosteriorStore, RunRecord

_STACK = ("torch", "ray", "vllm", "openrlhf")
RUN_HELP = "name, number or uuid (default: the latest run with a step)"


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations; an error is a UsageError of one line."""

    def __init__(self, *, description: str = "", **options: Any) -> None:
        sentence = description[:1].upper() + description[1:].rstrip(".") + "."
        super().__init__(**(options | {"description": sentence, "allow_abbrev": False}))

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the message and the command whose ``--help`` tells more."""
        raise UsageError(f"{message.removeprefix('argument ')} ({self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse itself hides that it cannot write

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is left over, so that the error of a sub-parser names its own command."""
        # Else its value, perhaps a secret, would be taken for the command
        self._refuse_unknown((args or [])[:1])
        namespace, left = super().parse_known_args(args, namespace)
        self._refuse_unknown(left)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return namespace, left

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        for flag in (
            argument.partition("=")[0]
            for argument in arguments
            if argument[2:] and argument.startswith("--")
        ):
            if flag not in self._option_string_actions:
                self.error(f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}")


def number(
    kind: type, least: float, most: float | None = None, *, above: bool = False
) -> Callable[[str], Any]:
    """Return an argparse type: a number from ``least`` (not itself if ``above``) to ``most``.

    The type raises ArgumentTypeError for another number, ValueError for what is no number.
    """
    allowed = (
        f"{least:g} or more" if most is None else f"in {'(' if above else '['}{least:g}, {most:g}]"
    )

    def convert(text: str) -> Any:
        value = kind(text)
        fits = (value > least if above else value >= least) and (most is None or value <= most)
        if not fits:
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
        return value

    convert.__name__ = kind.__name__  # argparse names the type in "invalid int value"
    return convert


def template_arguments(text: str) -> str:
    """Return a JSON object in one spelling; an argparse type, for the arguments of a chat template.

    Raises:
        argparse.ArgumentTypeError: the text is no JSON, or no object.
    """
    example = """give a JSON object, as in '{"enable_thinking": false}'"""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON: {error}; {example}") from None
    if not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no object; {example}")
    return json.dumps(arguments, sort_keys=True)


def require_stack(command: str) -> None:
    """Raise UsageError if the training stack is not installed; imports nothing."""
    for name in _STACK:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"{command} needs the training stack, which pip alone cannot install: run bash scripts/setup_env.sh in "
                f"the repository or the unpacked sdist, and use its .venv (here: no module named {name})"
            )


def add_run(parser: argparse._ActionsContainer) -> None:
    """Add the argument RUN, which may be left out."""
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)


def chosen(store: "PosteriorStore", ref: str | None) -> "RunRecord":
    """Return the run that ``ref`` names; None: the latest with a step, else the latest.

    Raises:
        StoreError: there is no such run, or its row cannot be read.
    """
    from openrlhf_dbb.storage import StoreError

    if ref is not None:
        return store.find_run(ref)
    runs = store.runs()
    if not runs:
        raise StoreError(f"there are no runs in {store.location}; start one first")
    return next((run for run in reversed(runs) if run.last_step), runs[-1]).checked()


def add_store(parser: argparse._ActionsContainer) -> None:
    """Add ``--store.url``. It has no default, because it may stand before the command too."""
    from openrlhf_dbb.storage import DEFAULT_URL, URL_VARIABLE

    url = f"the store (default: ${URL_VARIABLE}, else {DEFAULT_URL})"
    parser.add_argument(
        "--store.url", dest="store_url", metavar="URL", default=argparse.SUPPRESS, help=url
    )


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Add ``--trust_remote_code``, which is off by default."""
    text = "run the code that a model brings along; without this flag such a model is refused"
    parser.add_argument("--trust_remote_code", action="store_true", help=text)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``, which is off by default."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document; what is not known is null"
    )
