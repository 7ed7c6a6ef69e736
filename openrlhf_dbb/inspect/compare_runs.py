"""The command compare: two runs on the prompts they share.

Axes: P prompts of both runs, V visits (groups of rollouts) of these.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.inspect.costs import cost_rows, print_costs
from openrlhf_dbb.terminal import print_table, shown
from storage import PosteriorStore, RunRecord, StepLog, StoreError, read_log
from storage.inspection import current_means, prompt_texts

_PARTS = 10
_SHOWN = 10
_CLEARLY = 0.1  # a difference of posterior means


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.posteriors``."""
    parser = add("compare", compare, "posterior means and learning curves of two runs on the prompts they share")
    for name in ("first", "second"):
        parser.add_argument(name, metavar="RUN", help="name, number or start of the uuid")


def compare(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = [store.find_run(ref) for ref in (arguments.first, arguments.second)]
    means = [current_means(store, run) for run in runs]
    ids_P, *rows = np.intersect1d(means[0].prompt_id, means[1].prompt_id, assume_unique=True, return_indices=True)
    if not len(ids_P):
        raise StoreError(
            f"runs {runs[0].name!r} and {runs[1].name!r} have no prompt in common; compare runs on the same data set"
        )
    for which, run in zip(("first", "second"), runs, strict=True):
        print(f"{which + ':':<9}{_described(run)}")
    print(
        f"prompts: {len(ids_P)} in both, {len(means[0].prompt_id) - len(ids_P)} only in the first, "
        f"{len(means[1].prompt_id) - len(ids_P)} only in the second"
    )
    print("\nwhere the rollouts went")
    print_costs(cost_rows(store, runs))
    print()
    mean_P = [found.mean[row] for found, row in zip(means, rows, strict=True)]
    _print_means(*mean_P)
    _print_differences(store, ids_P, *mean_P)
    logs = [read_log(store, run) for run in runs]
    used = [np.isin(log.prompt_id, ids_P) for log in logs]
    print("\nlearning curves by step, prompts in both")
    _print_curves("steps", [log.step[use] for log, use in zip(logs, used, strict=True)], logs, used)
    print("\nlearning curves by rollouts of the run, prompts in both")
    _print_curves("rollouts", [np.cumsum(log.rollouts)[use] for log, use in zip(logs, used, strict=True)], logs, used)


def _described(run: RunRecord) -> str:
    parameters = ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
    estimator = f"{run.estimator} ({parameters})" if parameters else run.estimator
    trained = f"{run.method}, {estimator}" if run.method else estimator
    return shown(f"{run.name} (number {run.run_id}), {run.status} at step {run.last_step}; {trained}", width=None)


def _print_means(first_P: NDArray[np.float64], second_P: NDArray[np.float64]) -> None:
    both = ~np.isnan(first_P - second_P)
    if not both.any():
        print("posterior mean: none yet")
        return
    first_P, second_P = first_P[both], second_P[both]
    change_P = second_P - first_P
    print(
        f"posterior mean over these: {first_P.mean():.4f} and {second_P.mean():.4f}, "
        f"difference {change_P.mean():+.4f}; mean absolute difference {np.abs(change_P).mean():.4f}"
    )
    print(
        f"prompts more than {_CLEARLY:g} higher in the second: {int((change_P > _CLEARLY).sum())}; "
        f"more than {_CLEARLY:g} lower: {int((change_P < -_CLEARLY).sum())}"
    )


def _print_differences(
    store: PosteriorStore, ids_P: NDArray[np.int64], first_P: NDArray[np.float64], second_P: NDArray[np.float64]
) -> None:
    change_P = np.nan_to_num(second_P - first_P)
    most = np.lexsort((ids_P, -np.abs(change_P)))[:_SHOWN]
    most = most[change_P[most] != 0]
    if not len(most):
        return
    texts = {prompt_id: text for prompt_id, text, _, _ in prompt_texts(store, ids_P[most], length=100)}
    print("\nprompts that differ most")
    print_table(
        ("prompt id", "first", "second", "difference", "text"),
        [
            (int(ids_P[i]), float(first_P[i]), float(second_P[i]), float(change_P[i]), texts[int(ids_P[i])])
            for i in most
        ],
    )


def _print_curves(axis: str, at: list[NDArray[np.int64]], logs: list[StepLog], used: list[NDArray[np.bool_]]) -> None:
    """Success rate and mean estimate of both runs over equal parts of ``axis``.

    Args:
        axis: its name.
        at: of each run, (V,) where its groups lie on the axis.
        used: of each run, (groups of the log,) which of its groups these are.
    """
    end = max((int(where[-1]) for where in at if len(where)), default=0)
    if not end:
        print("no steps yet")
        return
    edges = np.unique(np.linspace(0, end, _PARTS + 1).round().astype(np.int64))
    columns = []
    for where, log, use in zip(at, logs, used, strict=True):
        part_V = np.searchsorted(edges, where, side="left") - 1
        sums = [
            np.bincount(part_V, values[use], minlength=len(edges) - 1)
            for values in (log.successes, log.rollouts, log.mean, np.ones(len(log.mean)))
        ]
        with np.errstate(invalid="ignore"):
            columns += [sums[0] / sums[1], sums[2] / sums[3]]
    print_table(
        (axis, "success first", "second", "posterior mean first", "second"),
        [
            (
                f"{low + 1}-{high}" if high > low + 1 else str(high),
                *map(float, (columns[0][i], columns[2][i], columns[1][i], columns[3][i])),
            )
            for i, (low, high) in enumerate(pairwise(edges))
        ],
    )
