"""The command history: every visit of one prompt."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.terminal import Styled, print_facts, print_json, print_table, shown
from storage import PosteriorStore, StoreError
from storage.inspection import find_prompts, prompt_history

_COLUMNS = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance", "lag")
_BAR = 20
_LONGEST = 200


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("history", show_history)
    parser.add_argument("prompt", metavar="PROMPT", help="id of the prompt, or a piece of its text")
    add_run(parser)
    parser.add_argument("--wide", action="store_true", help="prompt and label in full")
    add_json(parser)


def show_history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    found = find_prompts(store, run, arguments.prompt)
    prompt, others = found[0], len(found) - 1
    if others and str(prompt["prompt_id"]) == arguments.prompt:
        print(f"{arguments.prompt} is taken as an id; it is also in the text of other prompts", file=sys.stderr)
    elif others:
        matches = ", ".join(f"{row['prompt_id']} ({shown(row['prompt'], 30)})" for row in found)
        raise StoreError(f"{arguments.prompt!r} is in several prompts: {matches}; give the id of one")
    visits = prompt_history(store, run, prompt["prompt_id"])
    if arguments.json:
        print_json({"run": run.name, **prompt, "visits": visits})
        return
    longest = None if arguments.wide else _LONGEST
    print_facts(
        [
            ("run", run.name),
            ("prompt", f"{prompt['prompt_id']}: {shown(prompt['prompt'], longest)}"),
            ("label", shown(prompt["label"], longest)),
        ]
    )
    if visits:
        columns = [name for name in _COLUMNS if name != "lag" or any(row["lag"] for row in visits)]
        print_table((*columns, ""), [(*(row[name] for name in columns), _bar(row["mean"])) for row in visits])
    else:
        print("not visited in this run; its posterior comes from the warm start")


def _bar(mean: float) -> str:
    """A bar as long as a mean in [0, 1]; none for another."""
    return Styled("#" * round(_BAR * mean) if 0 <= mean <= 1 else "", "cyan")
