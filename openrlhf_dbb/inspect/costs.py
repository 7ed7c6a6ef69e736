"""Sum up what runs spent in rollouts and how many of their groups were mixed; the command costs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_dbb.options import add_json
from openrlhf_dbb.terminal import WIDE_HELP, print_json, print_table, records, shown
from storage import PosteriorStore, RunRecord, read_usage

FATES = ("trained", "filtered", "skipped", "replayed")
"""What can become of a rollout or of a prompt, named as in ``storage.UsageLog``."""

COLUMNS = (
    "run", "method", "estimator", "rollouts", "tokens", "trained_on", "filtered_out", "skipped", "replayed",
    "groups", "mixed_groups", "rollouts_per_mixed_group", "tokens_per_mixed_group", "zero_variance_share",
    "given_advantage_share",
)  # fmt: skip

_NARROW = (
    "run", "method", "estimator", "rollouts", "filtered_out", "mixed_groups", "rollouts_per_mixed_group",
    "zero_variance_share", "given_advantage_share",
)  # fmt: skip


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("costs", costs)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="name, number or start of the uuid of each (default: all runs)"
    )
    parser.add_argument("--wide", action="store_true", help=WIDE_HELP)
    add_json(parser)


def costs(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = [store.find_run(ref) for ref in arguments.runs] if arguments.runs else store.runs()
    rows = cost_rows(store, sorted(runs, key=lambda run: (run.method, run.name)))
    if arguments.json:
        print_json(records(COLUMNS, rows))
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
    tokens = tokens_per_mixed_group(totals)
    alone = of_single_rollouts(totals)
    mixed = mixed_groups(totals)
    return (
        shown(run.name, None),
        shown(run.method, None) or None,
        shown(run.estimator, None),
        totals["generated"],
        totals["generated_tokens"],
        *(totals[fate] for fate in FATES),
        totals["groups"],
        None if mixed is None else round(mixed),
        rollouts_per_mixed_group(totals),
        None if tokens is None else round(tokens),
        None if alone else ratio(totals["zero_variance"], totals["generated"]),
        None if alone else ratio(totals["rescued"], totals["zero_variance"]),
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
    by_step = vars(read_usage(store, run))
    recorded = len(by_step["step"]) > 0
    return {name: int(counts.sum()) if recorded else None for name, counts in by_step.items() if name != "step"}


def of_single_rollouts(totals: Mapping[str, Any]) -> bool:
    """Whether groups are of one rollout (fewer than two on average), so that zero variance says nothing: N = 1.

    Args:
        totals: as for :func:`mixed_groups`.
    """
    return bool(totals["groups"]) and totals["generated"] < 2 * totals["groups"]


def mixed_groups(totals: Mapping[str, Any]) -> float | None:
    """Return how many groups had different rewards, some rollouts right and some wrong; None at N = 1.

    The store counts the rollouts of the other groups, so this is exact where all groups have the same size.

    Args:
        totals: as :func:`usage_totals` or ``storage.inspection.progress`` gives them.

    Example:
        >>> mixed_groups({"generated": 1024, "zero_variance": 704, "groups": 128})
        40.0
    """
    if totals["generated"] is None or of_single_rollouts(totals):
        return None
    share = ratio(totals["generated"] - totals["zero_variance"], totals["generated"])
    return None if share is None else share * float(totals["groups"])


def rollouts_per_mixed_group(totals: Mapping[str, Any]) -> float | None:
    """Return the rollouts generated for each mixed group, whatever became of them; None without such a group.

    Args:
        totals: as for :func:`mixed_groups`.

    Example:
        >>> rollouts_per_mixed_group({"generated": 1024, "zero_variance": 704, "groups": 128})
        25.6
    """
    return ratio(totals["generated"], mixed_groups(totals))


def tokens_per_mixed_group(totals: Mapping[str, Any]) -> float | None:
    """Return the response tokens generated for each mixed group, as :func:`rollouts_per_mixed_group`."""
    return ratio(totals["generated_tokens"], mixed_groups(totals))


def groups_in_words(totals: Mapping[str, Any]) -> list[str]:
    """Return what a run's groups were, mixed ones first; empty where zero variance says nothing (N = 1).

    Zero-variance groups that were given an advantage are only counted: whether they help, their number does not say.
    """
    mixed = mixed_groups(totals)
    if not totals["groups"] or mixed is None:
        return []
    flat, given = totals["zero_variance"], totals["rescued"]
    lines = [f"{mixed:.0f} of {totals['groups']} mixed (some rollouts right, some wrong)"]
    if flat:
        share = "none of them were" if not given else "all were" if given == flat else f"{given / flat:.0%} were"
        lines.append(
            f"{totals['groups'] - mixed:.0f} with zero variance (all rewards the same); {share} given an advantage"
        )
    return lines


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where one is unknown, or whole is 0."""
    return None if part is None or not whole else part / whole
