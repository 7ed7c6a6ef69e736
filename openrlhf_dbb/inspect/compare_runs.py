"""The command compare: two runs, by held-out accuracy first, then on the training prompts they share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from openrlhf_dbb.inspect.costs import COLUMNS, cost_rows, print_costs
from openrlhf_dbb.inspect.held_out import HeldOutDifference, held_out_difference
from openrlhf_dbb.inspect.overview import overview, status
from openrlhf_dbb.inspect.shared_training import print_training, shared_training
from openrlhf_dbb.options import add_json
from openrlhf_dbb.terminal import (
    WIDE_HELP,
    print_facts,
    print_json,
    print_line,
    print_table,
    print_title,
    records,
    shown,
)
from storage import PosteriorStore, RunRecord, StoreError

_WHICH = ("first", "second")
_PLACES = ("start", "best", "last")
ONE_PAIR = "One run of each: this tells about these two models, not about the methods or estimators behind them."


def add_commands(add: Any) -> None:
    """Declare the command; ``add`` is that of ``cli.main``."""
    parser = add("compare", compare)
    for name, default in (("first", "the run before it"), ("second", "the newest")):
        parser.add_argument(
            name, nargs="?", metavar="RUN", help=f"name, number or start of the uuid (default: {default})"
        )
    parser.add_argument("--wide", action="store_true", help=WIDE_HELP)
    add_json(parser)


def compare(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = _chosen(store, arguments.first, arguments.second)
    accuracy, training = held_out_difference(store, *runs), shared_training(store, *runs)
    numbers, spent = [overview(store, run) for run in runs], cost_rows(store, runs)
    if accuracy is None and training is None:
        raise StoreError(
            f"runs {runs[0].name!r} and {runs[1].name!r} have no prompt in common; compare runs on the same data set"
        )
    if arguments.json:
        held_out = None if accuracy is None else asdict(accuracy) | {"verdict": accuracy.verdict}
        costs = records(COLUMNS, spent)
        print_json({"runs": numbers, "held_out": held_out, "costs": costs, "training": training})
        return
    print_facts([(which, _described(run)) for which, run in zip(_WHICH, runs, strict=True)])
    print_title("held-out accuracy")
    _print_held_out([each["held_out"] for each in numbers], accuracy)
    print_title("where the rollouts went")
    print_costs(spent, wide=arguments.wide)
    if training is None:
        print_title("no training prompt in common")
    else:
        print_training(training)


def _chosen(store: PosteriorStore, first: str | None, second: str | None) -> tuple[RunRecord, RunRecord]:
    """The runs given; in place of the second, the newest other one; in place of both, the two newest.

    Raises:
        StoreError: there is no such run, or only one.
    """
    if first is not None and second is not None:
        return store.find_run(first), store.find_run(second)
    newest = store.runs()[::-1]
    if first is None:
        if len(newest) < 2:
            raise StoreError(f"{store.location} has {len(newest)} of the two runs to compare; train another one first")
        return newest[1], newest[0]
    found = store.find_run(first)
    others = [run for run in newest if run.run_id != found.run_id]
    if not others:
        raise StoreError(f"{store.location} has no run to compare {found.name!r} with; train another one first")
    return found, others[0]


def _described(run: RunRecord) -> str:
    parameters = ", ".join(f"{key} = {value}" for key, value in run.parameters.items())
    estimator = f"{run.estimator} ({parameters})" if parameters else run.estimator
    trained = f"{run.method}, {estimator}" if run.method else estimator
    return shown(f"{run.name} (number {run.run_id}), {status(run)} at step {run.last_step}; {trained}", width=None)


def _print_held_out(numbers: Sequence[Mapping[str, Any] | None], accuracy: HeldOutDifference | None) -> None:
    """Accuracy of both at the start, the best and the last, then the paired difference."""
    if not any(numbers):
        print_line("not measured in either")
        return
    rows = [
        (which, *("-" if each is None else f"{100 * each[at]:.1f} % (step {each[f'{at}_step']})" for at in _PLACES))
        for which, each in zip(_WHICH, numbers, strict=True)
    ]
    print_table(("", *_PLACES), rows)
    if accuracy is None:
        print_line("not measured in both on the same prompts, so there is no test")
        return
    low, high = (f"{100 * bound:+.1f}" for bound in (accuracy.low, accuracy.high))
    samples = " and ".join(map(str, dict.fromkeys(accuracy.samples)))
    print_line(
        f"second - first, last evaluations: {100 * accuracy.difference:+.1f} points, 95 % interval {low} to {high} "
        f"({accuracy.prompts} prompts x {samples} samples)"
    )
    print_line(accuracy.verdict, "bold")
    print_line(ONE_PAIR)
