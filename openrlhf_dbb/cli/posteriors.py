"""The ``openrlhf-dbb`` command: look into a posterior store; changes nothing and needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from storage import DEFAULT_URL, URL_VARIABLE, PosteriorStore, RunRecord, StoreError, open_store
from storage.inspection import extremes, find_prompts, progress, prompt_history, shared_state

_TEXT_WIDTH = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 with one line on stderr if the store cannot answer."""
    arguments = _parser().parse_args(argv)
    try:
        with open_store(arguments.store_url, create=False) as store:
            arguments.command(store, arguments)
    except StoreError as error:
        print(f"openrlhf-dbb: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openrlhf-dbb", description="Look into a store of reward posteriors.")
    url: dict[str, Any] = {
        "dest": "store_url",
        "metavar": "URL",
        "help": f"the store (default: ${URL_VARIABLE}, else {DEFAULT_URL})",
    }
    parser.add_argument("--store.url", default=None, **url)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, description=description)
        # Suppressed: its default must not undo an option given before the command.
        sub.add_argument("--store.url", default=argparse.SUPPRESS, **url)
        sub.set_defaults(command=command)
        return sub

    run_help = "name, number or start of the uuid (default: the latest run)"
    add("runs", _runs, "list all runs")
    show = add("show", _show, "configuration, lineage, progress and extreme prompts of a run")
    show.add_argument("run", nargs="?", metavar="RUN", help=run_help)
    history = add("history", _history, "every visit of one prompt")
    history.add_argument("prompt", metavar="PROMPT", help="number of the prompt, or a piece of its text")
    history.add_argument("--run", metavar="RUN", help=run_help)
    return parser


def _runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    header = ("number", "name", "status", "step", "estimator", "model", "data set", "started")
    rows = [
        (
            run.run_id,
            run.name,
            run.status,
            run.last_step,
            run.estimator,
            run.model,
            run.dataset,
            run.created_at[:19],
        )
        for run in store.runs()
    ]
    if rows:
        _print_table(header, rows)
    else:
        print(f"no runs in {shown(store.location, width=None)}")


def _show(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = _chosen(store, arguments.run)
    totals = progress(store, run)
    parameters = ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
    facts = {
        "run": f"{run.name} (number {run.run_id}, {run.uuid})",
        "database": store.location,
        "status": f"{run.status}, step {run.last_step}",
        "started": run.created_at,
        "last step": totals["last_step_at"] or "none yet",
        "checkpoint": "none yet" if totals["checkpoint"] is None else f"step {totals['checkpoint']}",
        "estimator": f"{run.estimator} version {run.estimator_version}" + (f", {parameters}" if parameters else ""),
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})" if run.dataset_digest else run.dataset,
        "reward": run.reward,
        "began from": _lineage(run),
        "rollouts": f"{totals['rollouts']} in {totals['visits']} visits, {_rate(totals)} of the full reward",
        "prompts": f"{totals['prompts']} with a posterior, {totals['visited']} trained on",
        "posterior mean": "none yet" if totals["mean"] is None else f"{totals['mean']:.4f}, over prompts",
    }
    run_wide = shared_state(store, run)
    if run_wide:
        facts["run-wide state"] = ", ".join(
            f"{name} {values[0]:.4g}" if len(values) == 1 else f"{name} ({len(values)} numbers)"
            for name, values in run_wide.items()
        )
    if totals["probes"]:
        facts["probes"] = f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"
    for name, value in facts.items():
        print(f"{name + ':':<16}{shown(value, width=None)}")
    for title, hardest in (("hardest prompts", True), ("easiest prompts", False)):
        rows = extremes(store, run, hardest=hardest)
        if rows:
            print(f"\n{title}")
            _print_table(
                ("number", "mean", "variance", "visits", "text"),
                [(row["prompt_id"], row["mean"], row["variance"], row["visits"], row["prompt"]) for row in rows],
            )
    if run.config:
        print("\nconfiguration")
        for key in sorted(run.config):
            value = json.dumps(run.config[key], ensure_ascii=False)
            print(f"  {shown(key, width=None)}: {shown(value, width=None)}")


def _history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = _chosen(store, arguments.run)
    found = find_prompts(store, run, arguments.prompt)
    if len(found) > 1:
        numbers = ", ".join(f"{row['prompt_id']} ({shown(row['prompt'], 30)})" for row in found)
        raise StoreError(f"{arguments.prompt!r} is in several prompts: {numbers}; give the number of one")
    (prompt,) = found
    print(f"run {shown(run.name)}, prompt {prompt['prompt_id']}: {shown(prompt['prompt'], 200)}")
    print(f"label: {shown(prompt['label'], 200)}")
    columns = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance")
    rows = [tuple(row[column] for column in columns) for row in prompt_history(store, run, prompt["prompt_id"])]
    if rows:
        _print_table(columns, rows)
    else:
        print("not trained on in this run; its posterior comes from the warm start")


def _chosen(store: PosteriorStore, ref: str | None) -> RunRecord:
    if ref is not None:
        return store.find_run(ref)
    run = store.latest_run()
    if run is None:
        raise StoreError(f"there are no runs in {store.location}; start one first")
    return run


def _lineage(run: RunRecord) -> str:
    if run.parent is None:
        return "its prior"
    weight = "" if run.parent["weight"] == 1 else f", weight {run.parent['weight']:g}"
    return (
        f"run {run.parent['name']} at step {run.parent['step']}{weight} "
        f"({run.parent['uuid']} in {run.parent['database']})"
    )


def _rate(totals: dict[str, Any]) -> str:
    return f"{float(totals['successes']) / float(totals['rollouts']):.1%}" if totals["rollouts"] else "none"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [
        all(value is None or isinstance(value, (int, float)) for value in column) for column in zip(*rows, strict=True)
    ]
    for row in cells:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        print("  ".join(aligned).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def shown(value: object, width: int | None = _TEXT_WIDTH) -> str:
    r"""Text from a store as it may go to a terminal: unprintable characters escaped, long text cut.

    Example:
        >>> shown("red \x1b[31m\n")
        'red \\x1b[31m\\n'
        >>> shown("0123456789", width=8)
        '01234...'
    """
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(value)
    )
    return escaped if width is None or len(escaped) <= width else escaped[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
