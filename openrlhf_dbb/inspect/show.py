"""The commands runs, show and history: one run, or one prompt, as text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf_dbb.inspect.costs import FATES, rollouts_per_group, tokens_per_group, usage_totals
from openrlhf_dbb.terminal import print_table, shown, without_passwords
from storage import PosteriorStore, RunRecord, StoreError
from storage.inspection import extremes, find_prompts, progress, prompt_history, shared_state

RUN_HELP = "name, number or start of the uuid (default: the latest run)"


def add_commands(add: Any) -> None:
    """Declare the commands; ``add`` is that of ``cli.posteriors``."""
    add("runs", list_runs, "list all runs")
    show = add("show", show_run, "configuration, lineage, progress and extreme prompts of a run")
    show.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    history = add("history", show_history, "every visit of one prompt")
    history.add_argument("prompt", metavar="PROMPT", help="id of the prompt, or a piece of its text")
    history.add_argument("--run", metavar="RUN", help=RUN_HELP)


def chosen(store: PosteriorStore, ref: str | None) -> RunRecord:
    """The run ``ref`` refers to, or the latest if None.

    Raises:
        StoreError: there is no such run.
    """
    if ref is not None:
        return store.find_run(ref)
    run = store.latest_run()
    if run is None:
        raise StoreError(f"there are no runs in {store.location}; start one first")
    return run


def list_runs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    header = (
        "number", "name", "status", "step", "method", "estimator", "generated", "trained on", "filtered out", "skipped",
        "replayed", "rollouts per informative group", "model", "data set", "started",
    )  # fmt: skip
    rows = [
        (
            run.run_id,
            run.name,
            run.status,
            run.last_step,
            run.method or None,
            run.estimator,
            *(used[name] for name in ("generated", *FATES)),
            rollouts_per_group(used),
            run.model,
            run.dataset,
            run.created_at[:19],
        )
        for run, used in ((run, usage_totals(store, run)) for run in store.runs())
    ]
    if rows:
        print_table(header, rows)
    else:
        print(f"no runs in {shown(store.location, width=None)}")


def show_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    for name, value in facts(store, run, progress(store, run)).items():
        print(f"{name + ':':<16}{value}")
    for title, hardest in (("hardest prompts", True), ("easiest prompts", False)):
        rows = extremes(store, run, hardest=hardest)
        if rows:
            print(f"\n{title}")
            print_table(
                ("prompt id", "mean", "variance", "visits", "text"),
                [(row["prompt_id"], row["mean"], row["variance"], row["visits"], row["prompt"]) for row in rows],
            )
    if run.config:
        print("\nconfiguration")
        for key, value in configuration(run):
            print(f"  {key}: {value}")


def facts(store: PosteriorStore, run: RunRecord, totals: Mapping[str, Any]) -> dict[str, str]:
    """What a run is and how far it got, as texts by name, safe to print.

    Args:
        totals: as ``storage.inspection.progress`` gives them.
    """
    parameters = ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
    found = {
        "run": f"{run.name} (number {run.run_id}, {run.uuid})",
        "database": store.location,
        "status": f"{run.status}, step {run.last_step}",
        "started": run.created_at,
        "last step": totals["last_step_at"] or "none yet",
        "checkpoint": "none yet" if totals["checkpoint"] is None else f"step {totals['checkpoint']}",
        "method": run.method or "not recorded",
        "estimator": f"{run.estimator} version {run.estimator_version}" + (f", {parameters}" if parameters else ""),
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})" if run.dataset_digest else run.dataset,
        "reward": run.reward,
        "began from": _lineage(run),
        "rollouts": f"{totals['rollouts']} in {totals['visits']} visits, {_rate(totals)} of the full reward",
        "prompts": f"{totals['prompts']} with a posterior, {totals['visited']} visited",
        "posterior mean": "none yet" if totals["mean"] is None else f"{totals['mean']:.4f}, over prompts",
    }
    if totals["generated"] is not None:
        found |= _usage(totals)
    run_wide = shared_state(store, run)
    if run_wide:
        found["run-wide state"] = ", ".join(
            f"{name} {_compact(values[0])}" if len(values) == 1 else f"{name} ({len(values)} values)"
            for name, values in run_wide.items()
        )
    if totals["probes"]:
        found["probes"] = f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"
    return {name: shown(without_passwords(value), width=None) for name, value in found.items()}


def _usage(totals: Mapping[str, Any]) -> dict[str, str]:
    """Where the rollouts went; for a run whose usage was recorded."""
    unused = totals["unused_rollouts"]
    found = {
        "generated": f"{totals['generated']} rollouts, {totals['generated_tokens']} tokens"
        + (f"; {unused} more unused at the end" if unused else ""),
        "trained on": f"{totals['trained']} rollouts, {totals['filtered']} filtered out; {totals['replayed']} replayed",
        "skipped": f"prompts {totals['skipped']} times, before generation",
        "informative": f"{totals['informative_groups']} of {totals['groups']} groups",
    }
    rollouts, tokens = rollouts_per_group(totals), tokens_per_group(totals)
    if rollouts is not None and tokens is not None:
        found["cost"] = f"{rollouts:.1f} rollouts, {tokens:.0f} tokens per informative group"
    return found


def configuration(run: RunRecord) -> Iterator[tuple[str, str]]:
    """The run's flags with their values as JSON, by name, safe to print."""
    for key in sorted(run.config):
        value = json.dumps(run.config[key], ensure_ascii=False)
        yield shown(key, width=None), shown(without_passwords(value), width=None)


def show_history(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = chosen(store, arguments.run)
    found = find_prompts(store, run, arguments.prompt)
    if len(found) > 1:
        matches = ", ".join(f"{row['prompt_id']} ({shown(row['prompt'], 30)})" for row in found)
        raise StoreError(f"{arguments.prompt!r} is in several prompts: {matches}; give the id of one")
    (prompt,) = found
    print(f"run {shown(run.name)}, prompt {prompt['prompt_id']}: {shown(prompt['prompt'], 200)}")
    print(f"label: {shown(prompt['label'], 200)}")
    columns = ("step", "rollouts", "successes", "alpha", "beta", "mean", "variance")
    rows = [tuple(row[column] for column in columns) for row in prompt_history(store, run, prompt["prompt_id"])]
    if rows:
        print_table(columns, rows)
    else:
        print("not visited in this run; its posterior comes from the warm start")


def _lineage(run: RunRecord) -> str:
    if run.parent is None:
        return "its prior"
    weight = "" if run.parent["weight"] == 1 else f", weight {run.parent['weight']:g}"
    return (
        f"run {run.parent['name']} at step {run.parent['step']}{weight} "
        f"({run.parent['uuid']} in {run.parent['database']})"
    )


def _compact(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.4g}"


def _rate(totals: Mapping[str, Any]) -> str:
    return f"{float(totals['successes']) / float(totals['rollouts']):.1%}" if totals["rollouts"] else "none"
