"""The command show: what a run is, how far it got, its hardest and easiest prompts."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect.costs import groups_in_words
from openrlhf_dbb.inspect.overview import age, held_out_numbers, overview, state, status
from openrlhf_dbb.options import add_json, add_run, chosen
from openrlhf_dbb.terminal import (
    TEXT_WIDTH,
    Styled,
    print_facts,
    print_json,
    print_table,
    print_title,
    shown,
    without_passwords,
)
from storage import PosteriorStore, RunRecord
from storage.inspection import extremes, progress, shared_state


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("show", show_run)
    add_run(parser)
    parser.add_argument("--config", action="store_true", help="print the run's configuration instead, all flags")
    parser.add_argument("--prompts", type=int, default=5, metavar="K", help="hardest and easiest prompts (default: 5)")
    add_json(parser)


def show_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run, most = chosen(store, arguments.run), arguments.prompts
    if most < 0:
        raise UsageError(f"--prompts: {most} is below 0; give how many of the hardest and of the easiest to list")
    if arguments.json:
        print_json(_numbers(store, run, most))
    elif arguments.config:
        for key, value in configuration(run):
            print(f"{key}: {value}")
    else:
        print_facts(facts(store, run, progress(store, run)).items())
        for title, hardest in (("hardest prompts", True), ("easiest prompts", False)):
            _print_prompts(title, extremes(store, run, hardest=hardest, limit=most))


def _print_prompts(title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print_title(title)
    print_table(
        ("prompt id", "mean", "variance", "visits", "text"),
        [
            (row["prompt_id"], row["mean"], row["variance"], row["visits"], shown(row["prompt"], TEXT_WIDTH))
            for row in rows
        ],
        cut=("text",),
    )


def facts(store: PosteriorStore, run: RunRecord, totals: Mapping[str, Any]) -> dict[str, str]:
    """What a run is and how far it got, as texts by name, safe to print.

    Args:
        totals: as ``storage.inspection.progress`` gives them.
    """
    last, now = totals["last_step_at"], status(run)
    found = {
        "run": Styled(f"{run.name} (number {run.run_id})", "bold"),
        "held-out accuracy": Styled(_held_out(held_out_numbers(store, run)), "bold"),
        "status": Styled(f"{now}, step {run.last_step}", now.style),
        "started": run.created_at[:19] + ("" if last is None else f"; last step {age(last)} ago"),
        "training": f"{_rate(totals)} of the full reward, {totals['rollouts']} rollouts in {totals['visits']} visits",
    }
    if totals["generated"] is not None:
        found |= _usage(totals)
    found["posterior mean"] = "none yet"
    if totals["mean"] is not None:
        found["posterior mean"] = f"{totals['mean']:.4f} over {totals['prompts']} prompts, {totals['visited']} visited"
    run_wide = shared_state(store, run)
    if run_wide:
        found["run-wide state"] = ", ".join(
            f"{name} {_compact(values[0])}" if len(values) == 1 else f"{name} ({len(values)} values)"
            for name, values in run_wide.items()
        )
    if totals["probes"]:
        found["probes"] = f"{totals['samples']} rollouts of {totals['probes']} groups, never trained on"
    found |= {
        "checkpoint": "none yet" if totals["checkpoint"] is None else f"step {totals['checkpoint']}",
        "method": run.method or "not recorded",
        "estimator": _estimator(run),
        "model": run.model,
        "data set": f"{run.dataset} ({run.dataset_digest})" if run.dataset_digest else run.dataset,
        "reward": run.reward,
        "began from": _lineage(run),
        "uuid": run.uuid,
        "database": store.location,
    }
    if state(run) == "stale":
        found["to go on"] = f"the same training command with --resume {shlex.quote(run.name)}"
    return {name: _safe(value) for name, value in found.items()}


def _safe(value: str) -> str:
    safe = shown(without_passwords(value), width=None)
    return Styled(safe, value.style) if isinstance(value, Styled) else safe


def _held_out(numbers: Mapping[str, Any] | None) -> str:
    """Accuracy at the start, the best and the last; each step once."""
    if numbers is None:
        return "not measured; --eval.dataset of the training names held-out prompts"
    at = {numbers[f"{name}_step"]: numbers[name] for name in ("start", "best", "last")}
    points = [
        f"{100 * accuracy:.1f} % at step {step}" + (" (best)" if len(at) > 1 and step == numbers["best_step"] else "")
        for step, accuracy in at.items()
    ]
    asked = f"{numbers['prompts']} prompts x {numbers['samples']} samples"
    if numbers["benchmarks"] > 1:
        asked += f", mean of {numbers['benchmarks']} benchmarks"
    return f"{' -> '.join(points)}; {asked}"


def _estimator(run: RunRecord) -> str:
    parameters = ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
    return f"{run.estimator} version {run.estimator_version}" + (f", {parameters}" if parameters else "")


def _usage(totals: Mapping[str, Any]) -> dict[str, str]:
    """Where the rollouts went; for a run whose usage was recorded."""
    unused = totals["unused_rollouts"]
    found = {
        "rollouts": f"{totals['generated']} generated, {totals['trained']} trained on, {totals['filtered']} filtered "
        f"out, {totals['replayed']} replayed, {totals['skipped']} prompt skips"
        + (f"; {unused} more rollouts unused at the end" if unused else "")
    }
    words = groups_in_words(totals)
    if words:
        found["groups"] = "; ".join(words)
    return found


def configuration(run: RunRecord) -> Iterator[tuple[str, str]]:
    """The run's flags with their values as JSON, by name, safe to print."""
    for key in sorted(run.config):
        value = json.dumps(run.config[key], ensure_ascii=False)
        yield shown(key, width=None), shown(without_passwords(value), width=None)


def _numbers(store: PosteriorStore, run: RunRecord, most: int) -> dict[str, Any]:
    """What ``show --json`` prints."""
    totals = progress(store, run)
    parent = run.parent and run.parent | {"database": without_passwords(run.parent["database"])}
    return overview(store, run) | {
        "reward": without_passwords(run.reward),
        "checkpoint": totals["checkpoint"],
        "visits": totals["visits"],
        "training_rate": totals["successes"] / totals["rollouts"] if totals["rollouts"] else None,
        "posterior_mean": totals["mean"],
        "prompts": totals["prompts"],
        "prompts_visited": totals["visited"],
        "probes": totals["probes"],
        "began_from": parent,
        "database": store.location,
        "hardest": extremes(store, run, hardest=True, limit=most),
        "easiest": extremes(store, run, hardest=False, limit=most),
        "configuration": json.loads(without_passwords(json.dumps(run.config, ensure_ascii=False))),
    }


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
    return f"{100 * totals['successes'] / totals['rollouts']:.1f} %" if totals["rollouts"] else "none"
