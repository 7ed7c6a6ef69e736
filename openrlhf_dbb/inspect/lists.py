"""The command runs lists the runs of a store."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from openrlhf_dbb.inspect.overview import age, method, overview, status
from openrlhf_dbb.options import add_json
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.url import BadRow
from openrlhf_dbb.terminal import Styled, json_text, print_table, shown

_RUNS = ("#", "name", "status", "held-out accuracy", "step", "method", "rollouts", "age")


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is the function of ``cli.main``."""
    add_json(add("runs", list_runs))


def list_runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs, numbers = [], []
    for run in store.runs()[::-1]:
        try:
            numbers.append(overview(store, run))
            runs.append(run)
        except BadRow as error:
            store.report(error)
    if arguments.json:
        print(json_text(numbers))
    elif not runs:
        print(f"no runs in {shown(store.location, width=None)}")
    else:
        rows = [_row(run, values) for run, values in zip(runs, numbers, strict=True)]
        print_table(_RUNS, rows, cut=("name", "method"))


def _row(run: RunRecord, numbers: Mapping[str, Any]) -> tuple[Any, ...]:
    accuracy = _from_start_to_last(numbers["held_out"])
    row = (run.run_id, run.name, status(run), accuracy, run.last_step, method(run), numbers["rollouts"])
    return (*row, age(run.created_at))


def _from_start_to_last(held_out: Mapping[str, Any] | None) -> Styled | None:
    """Return held-out accuracy such as "39.6 -> 42.8 %"."""
    if held_out is None:
        return None
    start = "" if held_out["start_step"] == held_out["last_step"] else f"{100 * held_out['start']:.1f} -> "
    return Styled(f"{start}{100 * held_out['last']:.1f} %", "bold")
