"""The command runs lists the runs of a store."""

from __future__ import annotations

import argparse
from typing import Any

from openrlhf_dbb.inspect.overview import age, method, overview, status
from openrlhf_dbb.options import add_json
from openrlhf_dbb.storage import PosteriorStore
from openrlhf_dbb.storage.url import BadRow
from openrlhf_dbb.terminal import Styled, json_text, print_table, shown

_RUNS = ("#", "name", "status", "held-out accuracy", "step", "method", "rollouts", "age")


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is the function of ``cli.main``."""
    add_json(add("runs", list_runs))


def list_runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    found = []
    for run in store.runs()[::-1]:
        try:
            found.append((run, overview(store, run)))
        except BadRow as error:
            store.report(error)
    if arguments.json:
        print(json_text([numbers for _, numbers in found]))
    elif not found:
        print(f"no runs in {shown(store.location, width=None)}")
    else:
        rows = []
        for run, numbers in found:
            accuracy, measured = None, numbers["held_out"]
            if measured is not None:  # such as "39.6 -> 42.8 %"
                start = "" if measured["start_step"] == measured["last_step"] else f"{100 * measured['start']:.1f} -> "
                accuracy = Styled(f"{start}{100 * measured['last']:.1f} %", "bold")
            named = (run.run_id, run.name, status(run), accuracy, run.last_step, method(run))
            rows.append((*named, numbers["rollouts"], age(run.created_at)))
        print_table(_RUNS, rows, cut=("name", "method"))
