"""The command compare shows two runs: held-out accuracy, and where the rollouts went.

Axes: P prompts of both runs.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import ALPHA, pass_at_k, stratified_t
from openrlhf_dbb.inspect.numbers import Numbers, overview
from openrlhf_dbb.inspect.status import status
from openrlhf_dbb.options import add_json
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.read import held_out, held_out_prompts
from openrlhf_dbb.terminal import json_text, print_facts, print_rows, print_table, print_title

ONE_PAIR = """\
One run of each: this tells about these two models, \
not about the methods or estimators behind them."""

Pair = tuple[Floats, Floats]
"""The same column of the first and of the second run, of the prompts of one benchmark."""

_WHICH = ("first", "second")
_PLACES = ("start", "best", "last")
_CHANGE = ("difference", "low", "high")
_COSTS = (
    "name",
    "method",
    "estimator",
    "rollouts",
    "filtered",
    "mixed_groups",
    "rollouts_per_mixed_group",
    "zero_variance_share",
    "given_advantage_share",
)


def add_commands(add: Any) -> None:
    """Declare the command by ``cli.main``'s function."""
    parser = add("compare", compare)
    for name in _WHICH:
        parser.add_argument(name, metavar="RUN", help="name, number or uuid")
    add_json(parser)


def compare(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    """Print two runs side by side.

    Raises:
        StoreError: there is no such run, or a value cannot be read.
    """
    first = store.find_run(arguments.first)
    second = store.find_run(arguments.second)
    accuracy = held_out_difference(store, first, second)
    numbers = [overview(store, first), overview(store, second)]
    if arguments.json:
        print(json_text({"runs": numbers, "held_out": accuracy}))
        return
    print_facts([("first", _described(first)), ("second", _described(second))])
    print_title("held-out accuracy")
    _print_held_out([run["held_out"] for run in numbers], accuracy)
    print_title("where the rollouts went")
    print_rows(_COSTS, numbers)


def _described(run: RunRecord) -> str:
    return f"{run.name}, {status(run)} at step {run.last_step}"


def held_out_difference(
    store: PosteriorStore,
    first: RunRecord,
    second: RunRecord,
    steps: tuple[int, int] | None = None,
) -> Numbers | None:
    """Compare two runs' evaluations after these steps, by default the last.

    Returns:
        None unless some prompt is in both; else by name
        first, second: accuracy over the shared prompts, benchmarks weighted equally.
        intervals: 95 % interval of either accuracy over prompts, NaN for a single prompt.
        steps: the evaluated step of each.
        samples: responses to each prompt, of each run.
        prompts: shared by both, of all shared benchmarks together.
        difference: second minus first, in [-1, 1].
        low, high: its 95 % interval over prompts, NaN for a single prompt.
        p: of the paired t-test over prompts, two-sided; NaN for a single prompt.
        verdict: the result of the test in words.
        pass_at_k: the same for each k, see :func:`_pass_at_k`.
    """
    measured = held_out(store, first)
    other_measured = held_out(store, second)
    if measured is None or other_measured is None:
        return None
    if steps is None:
        steps = (int(measured.step[-1]), int(other_measured.step[-1]))
    pairs, counts = _shared(
        held_out_prompts(store, first, steps[0]),
        held_out_prompts(store, second, steps[1]),
    )
    if not pairs:
        return None
    tested = _tested(pairs)
    verdict = "no difference shown"
    if tested["p"] < ALPHA:
        verdict = f"the second is {'higher' if tested['difference'] > 0 else 'lower'}"
    tests = [stratified_t(accuracies) for accuracies in zip(*pairs, strict=True)]
    return {
        **tested,
        "intervals": [(test.low, test.high) for test in tests],
        "steps": steps,
        "samples": (measured.samples, other_measured.samples),
        "prompts": sum(len(accuracy_P) for accuracy_P, _ in pairs),
        "verdict": verdict,
        "pass_at_k": _pass_at_k(counts),
    }


def _shared(mine: dict[str, Any], others: dict[str, Any]) -> tuple[list[Pair], list[Pair]]:
    """Return the accuracy (P,), and the counts (P, 2), of the prompts of both runs.

    A benchmark may have grown in between. Both are as of storage.read.held_out_prompts.
    """
    pairs = []
    counts = []
    for benchmark in sorted(mine.keys() & others.keys()):
        ids, accuracy_P, counts_P = mine[benchmark]
        other_ids, other_P, other_counts_P = others[benchmark]
        _, at, at_other = np.intersect1d(
            ids,
            other_ids,
            assume_unique=True,
            return_indices=True,
        )
        if len(at):
            pairs.append((accuracy_P[at], other_P[at_other]))
            counts.append((counts_P[at], other_counts_P[at_other]))
    return pairs, counts


def _tested(pairs: Sequence[Pair]) -> Numbers:
    """Return the means of two models, their difference, its interval and p.

    Benchmarks weigh equally.
    """
    test = stratified_t([second_P - first_P for first_P, second_P in pairs], two_sided=True)
    return {
        "first": float(np.mean([first_P.mean() for first_P, _ in pairs])),
        "second": float(np.mean([second_P.mean() for _, second_P in pairs])),
        **test._asdict(),
    }


def _pass_at_k(counts: Sequence[Pair]) -> list[Numbers]:
    """Return pass@k of two models for k = 2, 4, 8, ..., tested as the accuracy is.

    k ends at the fewest responses to any prompt. Scores other than 0 and 1 have no pass@k.

    Args:
        counts: (P, 2) of either model: the verified responses to each prompt, and the sum of their
            scores; for each benchmark.
    """
    every = np.concatenate([*map(np.concatenate, counts)])
    if (every % 1).any():
        return []
    rows = []
    k = 2
    while k <= every[:, 0].min():
        passed = [(_passed(first, k), _passed(second, k)) for first, second in counts]
        rows.append({"k": k, **_tested(passed)})
        k *= 2
    return rows


def _passed(counts_P: Floats, k: int) -> Floats:
    return pass_at_k(counts_P[:, 0], counts_P[:, 1], k)


def _print_held_out(numbers: Sequence[Numbers | None], accuracy: Numbers | None) -> None:
    rows = []
    for which, run in zip(_WHICH, numbers, strict=True):
        rows.append([which, *(_cell(run, place) for place in _PLACES)])
    print_table(("", *_PLACES), rows)
    if accuracy is None:
        print("not measured in both on the same prompts, so there is no test")
        return
    print(f"second - first, last evaluations: {difference_in_words(accuracy)}")
    print(accuracy["verdict"])
    print(ONE_PAIR)
    if accuracy["pass_at_k"]:
        print_title("held-out pass@k, %: last evaluations, prompts of both")
        rows = []
        for row in accuracy["pass_at_k"]:
            accuracies = [f"{100 * row[name]:.1f}" for name in _WHICH]
            rows.append([row["k"], *accuracies, *_change(row)])
        print_table(("k", *_WHICH, "difference", "95 % from", "to"), rows)


def _cell(run: Numbers | None, place: str) -> str:
    if run is None:
        return "-"
    return f"{100 * run[place]:.1f} % (step {run[f'{place}_step']})"


def _change(numbers: Numbers) -> list[str]:
    """Return a difference and the ends of its interval, in points."""
    return [f"{100 * numbers[name]:+.1f}" for name in _CHANGE]


def difference_in_words(accuracy: Numbers) -> str:
    """Return what :func:`held_out_difference` found, with its interval."""
    change, low, high = _change(accuracy)
    samples = " and ".join(map(str, dict.fromkeys(accuracy["samples"])))
    measured = f"{accuracy['prompts']} prompts x {samples} samples"
    return f"{change} points, 95 % interval {low} to {high} ({measured})"
