"""The command runs: all runs of a store, newest first."""

from __future__ import annotations

import argparse
from typing import Any

from openrlhf_dbb.inspect.costs import FATES
from openrlhf_dbb.inspect.overview import age, from_start_to_last, method, overview, status
from openrlhf_dbb.options import add_json
from openrlhf_dbb.terminal import WIDE_HELP, print_json, print_table, shown
from storage import PosteriorStore, RunRecord

_HEADER = ("#", "name", "status", "held-out accuracy", "step", "method", "rollouts", "age")
_MORE = ("trained", "filtered", "skipped", "replayed", "mixed groups", "model", "data set")


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("runs", list_runs)
    parser.add_argument("--wide", action="store_true", help=WIDE_HELP)
    add_json(parser)


def list_runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = store.runs()[::-1]
    numbers = [overview(store, run) for run in runs]
    if arguments.json:
        print_json(numbers)
    elif not runs:
        print(f"no runs in {shown(store.location, width=None)}")
    else:
        rows = [_row(run, each, arguments.wide) for run, each in zip(runs, numbers, strict=True)]
        header = (*_HEADER, *_MORE, "started") if arguments.wide else _HEADER
        print_table(header, rows, cut=() if arguments.wide else ("name", "method"))


def _row(run: RunRecord, numbers: dict[str, Any], wide: bool) -> tuple[Any, ...]:
    row = (
        run.run_id,
        run.name,
        status(run),
        from_start_to_last(numbers["held_out"]),
        run.last_step,
        method(run),
        numbers["rollouts"],
        age(run.created_at),
    )
    if not wide:
        return row
    more = ("mixed_groups", "model", "dataset")
    return (*row, *(numbers[name] for name in (*FATES, *more)), run.created_at[:19])
