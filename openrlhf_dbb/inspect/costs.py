"""What a run spent in rollouts and what it got for them; the command costs: runs side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_dbb.csv_files import write_rows
from openrlhf_dbb.options import add_json
from openrlhf_dbb.terminal import WIDE_HELP, print_json, print_table, records, shown
from storage import PosteriorStore, RunRecord
from storage.inspection import usage_by_step

FATES = ("trained", "filtered", "skipped", "replayed")
"""What can become of a rollout or of a prompt, named as in ``storage.inspection.StepUsage``."""

COLUMNS = (
    "run", "method", "estimator", "rollouts", "tokens", "trained_on", "filtered_out", "skipped", "replayed",
    "zero_variance_share", "rescued_share", "informative_groups", "rollouts_per_group", "tokens_per_group",
)  # fmt: skip

_NARROW = (
    "run", "method", "estimator", "rollouts", "filtered_out", "zero_variance_share", "rescued_share",
    "rollouts_per_group", "tokens_per_group",
)  # fmt: skip


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("costs", costs)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="name, number or start of the uuid of each (default: all runs)"
    )
    parser.add_argument("--wide", action="store_true", help=WIDE_HELP)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("text", "csv"), default="text", help="default: text")
    add_json(form)


def costs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = [store.find_run(ref) for ref in arguments.runs] if arguments.runs else store.runs()
    rows = cost_rows(store, sorted(runs, key=lambda run: (run.method, run.name)))
    if arguments.json:
        print_json(records(COLUMNS, rows))
    elif arguments.format == "csv":
        write_rows(sys.stdout, COLUMNS, rows)
    elif rows:
        print_costs(rows, wide=arguments.wide)
    else:
        print(f"no runs in {shown(store.location, width=None)}")


def cost_rows(store: PosteriorStore, runs: Sequence[RunRecord]) -> list[tuple[Any, ...]]:
    """``COLUMNS`` of each run, safe to print.

    None where usage was not recorded, there is nothing to divide by, or a share is not defined at N = 1.
    """
    return [_cost_row(run, usage_totals(store, run)) for run in runs]


def _cost_row(run: RunRecord, totals: Mapping[str, Any]) -> tuple[Any, ...]:
    tokens = tokens_per_group(totals)
    alone = of_single_rollouts(totals)
    return (
        shown(run.name, None),
        shown(run.method, None) or None,
        shown(run.estimator, None),
        totals["generated"],
        totals["generated_tokens"],
        *(totals[fate] for fate in FATES),
        None if alone else ratio(totals["zero_variance"], totals["generated"]),
        None if alone else ratio(totals["rescued"], totals["zero_variance"]),
        totals["informative_groups"],
        rollouts_per_group(totals),
        None if tokens is None else round(tokens),
    )


def print_costs(rows: Sequence[Sequence[Any]], *, wide: bool = False) -> None:
    """Print ``cost_rows`` as a table, all columns if ``wide``."""
    names = COLUMNS if wide else _NARROW
    places = [COLUMNS.index(name) for name in names]
    header = [name.replace("_", " ") for name in names]
    print_table(header, [[row[place] for place in places] for row in rows], cut=() if wide else ("run", "estimator"))


def usage_totals(store: PosteriorStore, run: RunRecord) -> dict[str, Any]:
    """Sums of a run's rollout usage, named as in ``storage.inspection.progress``; all None if it was not recorded.

    Cheaper than ``progress``: reads the steps only, no posteriors.
    """
    by_step = vars(usage_by_step(store, run))
    recorded = len(by_step["step"]) > 0
    return {name: int(counts.sum()) if recorded else None for name, counts in by_step.items() if name != "step"}


def of_single_rollouts(totals: Mapping[str, Any]) -> bool:
    """Whether groups are of one rollout (fewer than two on average), so that zero variance says nothing: N = 1.

    Args:
        totals: as for :func:`rollouts_per_group`.
    """
    return bool(totals["groups"]) and totals["generated"] < 2 * totals["groups"]


def rollouts_per_group(totals: Mapping[str, Any]) -> float | None:
    """Rollouts generated per informative group (one in which some advantage is not 0), whatever became of them.

    Args:
        totals: as :func:`usage_totals` or ``storage.inspection.progress`` gives them.

    Example:
        >>> rollouts_per_group({"generated": 1024, "informative_groups": 40})
        25.6
    """
    return ratio(totals["generated"], totals["informative_groups"])


def tokens_per_group(totals: Mapping[str, Any]) -> float | None:
    """As :func:`rollouts_per_group`, in response tokens."""
    return ratio(totals["generated_tokens"], totals["informative_groups"])


def ratio(part: int | None, whole: int | None) -> float | None:
    """part / whole; None where one is unknown, or whole is 0."""
    return None if part is None or not whole else part / whole
