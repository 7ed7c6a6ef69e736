"""The command import makes a finished run of another trainer's log of rollouts.

Nothing is guessed in silence: it prints which columns it took, and where the steps come from.
"""

import argparse
from pathlib import Path
from typing import Any

from openrlhf_dbb.data.files import FILES
from openrlhf_dbb.inspect.log_files import files_of
from openrlhf_dbb.inspect.log_rollouts import COLUMNS, Log, read_log
from openrlhf_dbb.inspect.log_run import make_run
from openrlhf_dbb.options import add_store
from openrlhf_dbb.terminal import shown


def add_commands(add: Any) -> None:
    """Declare the command by ``cli.main``'s function."""
    parser = add("import", import_log, opens_store=False)
    text = f"files ({', '.join(FILES)}), or folders"
    parser.add_argument("log", metavar="LOG", nargs="+", type=Path, help=text)
    parser.add_argument("--run_name", required=True, metavar="NAME", help="name of the new run")
    for name, columns in COLUMNS.items():
        text = f"column of the {name} (default: the first of {', '.join(columns)}); a.b is a field"
        parser.add_argument(f"--{name}_key", metavar="COLUMN", help=text)
    add_store(parser)


def import_log(arguments: argparse.Namespace) -> None:
    """Make a run of a log, and print what was taken from where.

    Raises:
        UsageError: a file, a column or a value of the log cannot be used.
        StoreError: the run cannot be made.
    """
    keys = {name: getattr(arguments, f"{name}_key") for name in COLUMNS}
    log = read_log(files_of(arguments.log), keys)
    _print_columns(log)
    names = list(map(str, arguments.log))
    made = make_run(arguments.store_url, arguments.run_name, names, log)
    for line in made:
        print(line)


def _print_columns(log: Log) -> None:
    taken = []
    missing = []
    for name, column in log.columns.items():
        if column is not None:
            taken.append(f"{name} from {column}")
        elif name != "step":
            missing.append(f"no {name}")
    print(shown(f"columns: {', '.join(taken + missing)}", None))
    column = log.columns["step"]
    source = "the file names" if column is None else f"column {column}"
    steps = [rollout.step for rollout in log.rollouts]
    print(shown(f"steps from {source}: {min(steps)} to {max(steps)}", None))
