"""The command ``openrlhf-dbb``. It imports the module of a command only when that command is called."""

import argparse
import importlib
import sys
from collections.abc import Callable, Collection, Sequence

import openrlhf_dbb
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.options import Parser, add_store, require_stack
from openrlhf_dbb.secrets import mask_process
from openrlhf_dbb.terminal import exit_code, prepare_streams, print_error

PROGRAM = "openrlhf-dbb"
REFUSED = 2
INTERRUPTED = 130

COMMANDS = {
    "train": (None, "train a model with GRPO and stored posteriors"),
    "evaluate": (
        "openrlhf_dbb.evaluation.command",
        "measure models on benchmarks and compare them",
    ),
    "tasks": (
        "openrlhf_dbb.cli.tasks",
        "list tasks that a program makes and verifies, or try a model on them",
    ),
    "lab": ("openrlhf_dbb.lab", "choose an estimator and a discount without training"),
    "runs": (
        "openrlhf_dbb.inspect.show",
        "list all runs, newest first, with their held-out accuracy",
    ),
    "show": ("openrlhf_dbb.inspect.show", "a run: held-out accuracy, progress, cost, lineage"),
    "history": ("openrlhf_dbb.inspect.explain", "every visit of one prompt"),
    "explain": ("openrlhf_dbb.inspect.explain", "the arithmetic of each advantage of one group"),
    "prompts": (
        "openrlhf_dbb.inspect.prompts",
        "prompts that are never, always or no longer solved",
    ),
    "import": ("openrlhf_dbb.cli.import_log", "make a run of another trainer's log of rollouts"),
    "compare": (
        "openrlhf_dbb.inspect.compare_runs",
        "two runs: held-out accuracy with a paired test, and costs",
    ),
    "serve": ("openrlhf_dbb.watch.serve", "a live page about all runs, in the browser"),
    "report": ("openrlhf_dbb.watch.report", "one HTML page about some runs that opens offline"),
}
"""The module of each command (None: it reads its own arguments), and its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 if a training failed, 2 if the request is refused, 130 if interrupted."""
    prepare_streams()
    mask_process()
    if "" not in sys.path:  # the working folder, for module:Class; "python -m" adds it too
        sys.path.append("")
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _with_error_line(arguments))


def _with_error_line(argv: list[str]) -> int:
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        from openrlhf_dbb.storage import StoreError  # here: the help does not wait for SQLAlchemy

        if not isinstance(error, (UsageError, StoreError, RunError)):
            raise
        print_error(f"error: {error}")
        return 1 if isinstance(error, RunError) else REFUSED


def _run(argv: list[str]) -> int:
    first = _place_of_command(argv)
    if argv[first : first + 1] == ["train"]:
        from openrlhf_dbb.cli import train_grpo

        require_stack(f"{PROGRAM} train")
        train_grpo.command(argv[:first] + argv[first + 1 :])
    parser = build([name for name in COMMANDS if name in argv])
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if not arguments.opens_store:
        return arguments.command(arguments) or 0
    from openrlhf_dbb.storage import open_store
    from openrlhf_dbb.storage.decode import naming_damage

    with open_store(arguments.store_url, create=False) as store, naming_damage(store.location):
        return arguments.command(store, arguments) or 0


def _place_of_command(argv: list[str]) -> int:
    """Return where the command stands: it may follow ``--store.url URL`` or ``--store.url=URL``."""
    if argv[:1] == ["--store.url"]:
        return 2
    return int(bool(argv) and argv[0].startswith("--store.url="))


def build(names: Collection[str]) -> Parser:
    """Return the parser with all commands, and with the arguments of the commands in ``names``."""
    parser = Parser(
        prog=PROGRAM,
        description="GRPO with stored reward posteriors: train, look into a store of posteriors, evaluate models.",
        epilog=f"{PROGRAM} COMMAND --help explains a command.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {openrlhf_dbb.__version__}"
    )
    parser.add_argument(
        "--store.url", dest="store_url", metavar="URL", help="the store; also after the command"
    )
    parser.set_defaults(command=None, opens_store=False)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    parsers = {}
    for name, (_, text) in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=text, description=text)

    def add(
        name: str, command: Callable[..., int | None], *, opens_store: bool = True
    ) -> argparse.ArgumentParser:
        """Declare the function of a command, and return the command's parser for its arguments."""
        parsers[name].set_defaults(command=command, opens_store=opens_store)
        if opens_store:
            add_store(parsers[name])
        return parsers[name]

    for module in dict.fromkeys(COMMANDS[name][0] for name in names):
        if module is not None:
            importlib.import_module(module).add_commands(add)
    return parser
