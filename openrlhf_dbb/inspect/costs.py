"""What a run paid in rollouts and what it got for them; the command costs: runs side by side."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_dbb.terminal import print_table, shown
from storage import PosteriorStore, RunRecord
from storage.inspection import usage_by_step

COLUMNS = (
    "run", "method", "estimator", "rollouts", "tokens", "trained_on", "filtered_out", "skipped", "replayed",
    "zero_variance_share", "rescued_share", "informative_groups", "rollouts_per_group", "tokens_per_group",
)  # fmt: skip


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.posteriors``."""
    parser = add("costs", costs, "where the rollouts of each run went, and what an informative group cost, by method")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="name, number or start of the uuid of each (default: all runs)"
    )
    parser.add_argument("--format", choices=("text", "csv"), default="text", help="default: text")


def costs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = [store.find_run(ref) for ref in arguments.runs] if arguments.runs else store.runs()
    rows = cost_rows(store, sorted(runs, key=lambda run: (run.method, run.name)))
    if arguments.format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    elif rows:
        print_costs(rows)
    else:
        print(f"no runs in {shown(store.location, width=None)}")


def cost_rows(store: PosteriorStore, runs: Sequence[RunRecord]) -> list[tuple[Any, ...]]:
    """``COLUMNS`` of each run, safe to print; None where there is no rollout ledger or nothing to divide by."""
    return [_cost_row(run, ledger_totals(store, run)) for run in runs]


def _cost_row(run: RunRecord, found: Mapping[str, Any]) -> tuple[Any, ...]:
    tokens = tokens_per_group(found)
    return (
        shown(run.name),
        shown(run.method) or None,
        shown(run.estimator),
        found["generated"],
        found["generated_tokens"],
        found["trained"],
        found["filtered"],
        found["skipped"],
        found["replayed"],
        ratio(found["zero_variance"], found["generated"]),
        ratio(found["rescued"], found["zero_variance"]),
        found["informative_groups"],
        rollouts_per_group(found),
        None if tokens is None else round(tokens),
    )


def print_costs(rows: Sequence[Sequence[Any]]) -> None:
    """Print ``cost_rows`` as a table."""
    print_table([name.replace("_", " ") for name in COLUMNS], rows)


def ledger_totals(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Sums of a run's rollout ledger, named as in ``storage.inspection.progress``; all None if the run has none.

    Cheaper than ``progress``: only the steps are read, no posteriors.
    """
    by_step = vars(usage_by_step(store, run))
    has_ledger = len(by_step["step"]) > 0
    return {name: int(counts.sum()) if has_ledger else None for name, counts in by_step.items() if name != "step"}


def rollouts_per_group(found: Mapping[str, Any]) -> float | None:
    """Rollouts generated for each informative group (one in which some advantage is not 0), whatever became of them.

    Args:
        found: as :func:`ledger_totals` or ``storage.inspection.progress`` gives it.

    Example:
        >>> rollouts_per_group({"generated": 1024, "informative_groups": 40})
        25.6
    """
    return ratio(found["generated"], found["informative_groups"])


def tokens_per_group(found: Mapping[str, Any]) -> float | None:
    """As :func:`rollouts_per_group`, in response tokens."""
    return ratio(found["generated_tokens"], found["informative_groups"])


def ratio(part: int | None, whole: int | None) -> float | None:
    """part / whole; None where one is not known, or whole is 0."""
    return None if part is None or not whole else part / whole
