"""Two runs on the training prompts they share: posterior means, and success over the rollouts of each.

Axes: P training prompts of both runs, V visits (groups of rollouts) of these, B parts of the longer run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.terminal import TEXT_WIDTH, print_line, print_table, print_title, shown
from storage import PosteriorStore, RunRecord, StepLog, read_log
from storage.inspection import current_means, prompt_texts

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

_PARTS = 5
_SHOWN = 5
_CLEARLY = 0.1  # a difference of posterior means
_CURVES = ("success_first", "success_second", "mean_first", "mean_second")


def shared_training(store: PosteriorStore, first: RunRecord, second: RunRecord) -> dict[str, Any] | None:
    """Both runs on the training prompts they share, ready for JSON; None if there are none.

    Returns:
        prompts: how many are in both, only in the first, only in the second.
        posterior_mean: of both, and their difference, second minus first; None if a run has none yet.
        differ_most: prompts with the largest differences.
        curves: success rate and mean estimate of both over equal parts of the rollouts.
    """
    means = [current_means(store, run) for run in (first, second)]
    ids_P, *rows = np.intersect1d(means[0].prompt_id, means[1].prompt_id, assume_unique=True, return_indices=True)
    if not len(ids_P):
        return None
    first_P, second_P = (found.mean[row] for found, row in zip(means, rows, strict=True))
    return {
        "prompts": {
            "both": len(ids_P),
            "only_first": len(means[0].prompt_id) - len(ids_P),
            "only_second": len(means[1].prompt_id) - len(ids_P),
        },
        "posterior_mean": _means(first_P, second_P),
        "differ_most": _differences(store, ids_P, first_P, second_P),
        "curves": _curves([read_log(store, run) for run in (first, second)], ids_P),
    }


def print_training(numbers: Mapping[str, Any]) -> None:
    """Print what :func:`shared_training` found."""
    prompts, means = numbers["prompts"], numbers["posterior_mean"]
    print_title("training prompts in both")
    print_line(
        f"prompts: {prompts['both']} in both, {prompts['only_first']} only in the first, "
        f"{prompts['only_second']} only in the second"
    )
    if means is None:
        print_line("posterior mean: none yet")
    else:
        print_line(
            f"posterior mean: {means['first']:.4f} and {means['second']:.4f}, difference {means['difference']:+.4f}, "
            f"mean absolute {means['mean_absolute_difference']:.4f}"
        )
        print_line(f"more than {_CLEARLY:g} higher in the second: {means['higher']} prompts; lower: {means['lower']}")
    if numbers["differ_most"]:
        print_title("training prompts that differ most")
        names = ("prompt_id", "first", "second", "difference")
        rows = [(*(row[name] for name in names), shown(row["prompt"], TEXT_WIDTH)) for row in numbers["differ_most"]]
        print_table(("prompt id", *names[1:], "text"), rows, cut=("text",))
    if numbers["curves"]:
        print_title("learning curves by rollouts of the run")
        print_table(
            ("rollouts", "success first", "second", "mean first", "second"),
            [(f"{row['from']}-{row['to']}", *(row[name] for name in _CURVES)) for row in numbers["curves"]],
        )


def _means(first_P: Floats, second_P: Floats) -> dict[str, Any] | None:
    both = ~np.isnan(first_P - second_P)
    if not both.any():
        return None
    change_P = (second_P - first_P)[both]
    return {
        "first": float(first_P[both].mean()),
        "second": float(second_P[both].mean()),
        "difference": float(change_P.mean()),
        "mean_absolute_difference": float(np.abs(change_P).mean()),
        "higher": int((change_P > _CLEARLY).sum()),
        "lower": int((change_P < -_CLEARLY).sum()),
    }


def _differences(store: PosteriorStore, ids_P: Whole, first_P: Floats, second_P: Floats) -> list[dict[str, Any]]:
    change_P = np.nan_to_num(second_P - first_P)
    most = np.lexsort((ids_P, -np.abs(change_P)))[:_SHOWN]
    most = most[change_P[most] != 0]
    texts = {prompt_id: text for prompt_id, text, _, _ in prompt_texts(store, ids_P[most], length=100)}
    return [
        {
            "prompt_id": int(ids_P[at]),
            "first": float(first_P[at]),
            "second": float(second_P[at]),
            "difference": float(change_P[at]),
            "prompt": texts[int(ids_P[at])],
        }
        for at in most
    ]


def _curves(logs: list[StepLog], ids_P: Whole) -> list[dict[str, Any]]:
    """Success rate and mean estimate of both runs; a group is in the part in which its last rollout is."""
    used = [np.isin(log.prompt_id, ids_P) for log in logs]
    ends = [np.cumsum(log.rollouts)[use] for log, use in zip(logs, used, strict=True)]
    last = max((int(end[-1]) for end in ends if len(end)), default=0)
    edges = np.unique(np.linspace(0, last, _PARTS + 1).round().astype(np.int64))
    columns: list[list[Floats]] = [[], []]
    for end, log, use in zip(ends, logs, used, strict=True):
        part_V = np.searchsorted(edges, end, side="left") - 1
        sums = [
            np.bincount(part_V, values[use], minlength=len(edges) - 1)
            for values in (log.successes, log.rollouts, log.mean, np.ones(len(log.mean)))
        ]
        with np.errstate(invalid="ignore"):
            columns[0].append(sums[0] / sums[1])
            columns[1].append(sums[2] / sums[3])
    curves_B = np.stack(columns[0] + columns[1], axis=1).tolist()
    return [
        {"from": low + 1, "to": high} | dict(zip(_CURVES, values, strict=True))
        for (low, high), values in zip(pairwise(edges.tolist()), curves_B, strict=True)
    ]
