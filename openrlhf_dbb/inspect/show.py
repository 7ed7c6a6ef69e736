"""The commands runs and show: a table of all runs, one run."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_dbb.inspect.facts import facts, read_view
from openrlhf_dbb.inspect.numbers import Numbers, in_numbers, overview, with_mixed_groups
from openrlhf_dbb.inspect.status import age, method, status
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.secrets import without_passwords, without_secrets
from openrlhf_dbb.storage import PosteriorStore, read
from openrlhf_dbb.terminal import (
    json_text,
    print_facts,
    print_rows,
    print_table,
    print_title,
    shown,
    without_shared,
)

_PROMPTS = 5  # hardest and easiest prompts that show lists
_HEADER = (
    "#",
    "name",
    "status",
    "held-out accuracy",
    "step",
    "method",
    "rollouts",
    "age",
)


def add_commands(add: Any) -> None:
    """Declare the commands by ``cli.main``'s function."""
    add_json(add("runs", list_runs))
    parser = add("show", show_run)
    add_run(parser)
    add_json(parser)


def list_runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Print all runs, newest first."""
    runs = store.runs()[::-1]
    numbers = [overview(store, run) for run in runs]
    if arguments.json:
        print(json_text(numbers))
    elif not runs:
        print(f"no runs in {shown(store.location, width=None)}")
    else:
        rows = []
        for run, of_run in zip(runs, numbers, strict=True):
            cells = [
                run.run_id,
                run.name,
                status(run),
                _accuracy(of_run["held_out"]),
                run.last_step,
                method(run),
                of_run["rollouts"],
                age(run.created_at),
            ]
            rows.append(cells)
        print_table(_HEADER, rows)


def _accuracy(measured: Numbers | None) -> str | None:
    """Return held-out accuracy at the start and the last step, such as "39.6 -> 42.8 %"."""
    if measured is None:
        return None
    last = f"{100 * measured['last']:.1f} %"
    if measured["start_step"] == measured["last_step"]:
        return last
    return f"{100 * measured['start']:.1f} -> {last}"


def show_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Print one run.

    Raises:
        StoreError: there is no such run, or a value of it cannot be read.
    """
    run = chosen(store, arguments.run)
    view = read_view(store, run)
    hardest = read.extremes(store, run, hardest=True, limit=_PROMPTS)
    easiest = read.extremes(store, run, hardest=False, limit=_PROMPTS)
    if arguments.json:
        more = {
            "progress": view.totals,
            "reward": without_passwords(run.reward),
            "began_from": without_secrets(run.parent),
            "database": view.database,
            "hardest": hardest,
            "easiest": easiest,
            "configuration": without_secrets(run.config),
        }
        numbers = in_numbers(run, with_mixed_groups(view.totals), view.held_out)
        print(json_text(numbers | more))
        return
    print_facts(facts(view).items())
    parts = {"hardest prompts": hardest, "easiest prompts": easiest}
    print_prompts(parts, ("prompt_id", "mean", "variance", "visits"))


def print_prompts(parts: Mapping[str, read.Rows], columns: Sequence[str]) -> None:
    """Print tables of prompts by title, texts without what they have in common."""
    shortened = without_shared([row["prompt"] for rows in parts.values() for row in rows])
    for title, rows in parts.items():
        if rows:
            for row in rows:
                row["text"] = shown(shortened[row["prompt"]])
            print_title(title)
            print_rows([*columns, "text"], rows)
