"""The command compare shows two runs side by side: held-out accuracy, and where the rollouts went.

Axes: P prompts of both runs.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import ALPHA, pass_at_k, stratified_t
from openrlhf_dbb.inspect.show import overview, status
from openrlhf_dbb.options import add_json
from openrlhf_dbb.storage import PosteriorStore, RunRecord
from openrlhf_dbb.storage.read import held_out, held_out_prompts
from openrlhf_dbb.terminal import json_text, print_facts, print_table, print_title

ONE_PAIR = "One run of each: this tells about these two models, not about the methods or estimators behind them."

_WHICH = ("first", "second")
_PLACES = ("start", "best", "last")
_CHANGE = ("difference", "low", "high")
_COSTS = (
    "name", "method", "estimator", "rollouts", "filtered", "mixed_groups", "rollouts_per_mixed_group",
    "zero_variance_share", "given_advantage_share",
)  # fmt: skip


def add_commands(add: Any) -> None:
    parser = add("compare", compare)
    for name in _WHICH:
        parser.add_argument(name, metavar="RUN", help="name, number or uuid")
    add_json(parser)


def compare(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    runs = store.find_run(arguments.first), store.find_run(arguments.second)
    accuracy = held_out_difference(store, *runs)
    numbers = [overview(store, run) for run in runs]
    if arguments.json:
        print(json_text({"runs": numbers, "held_out": accuracy}))
        return
    described = [f"{run.name}, {status(run)} at step {run.last_step}" for run in runs]
    print_facts(zip(_WHICH, described, strict=True))
    print_title("held-out accuracy")
    _print_held_out([run["held_out"] for run in numbers], accuracy)
    print_title("where the rollouts went")
    print_table([name.replace("_", " ") for name in _COSTS], [[run[name] for name in _COSTS] for run in numbers])


def held_out_difference(
    store: PosteriorStore, first: RunRecord, second: RunRecord, steps: tuple[int, int] | None = None
) -> dict[str, Any] | None:
    """Compare two runs' evaluations after these steps, by default the last; None unless some prompt is in both.

    Returns:
        first, second: accuracy over the shared prompts, benchmarks weighted equally.
        intervals: 95 % interval of either accuracy over prompts, NaN for a single prompt.
        steps: the evaluated step of each.
        samples: responses to each prompt, of each run.
        prompts: shared by both, of all shared benchmarks together.
        difference: second minus first, in [-1, 1]; low, high: its 95 % interval over prompts, NaN for a single prompt.
        p: of the paired t-test over prompts, two-sided; NaN for a single prompt.
        verdict: the result of the test in words.
        pass_at_k: the same for each k, see :func:`_pass_at_k`.
    """
    measured, other_measured = held_out(store, first), held_out(store, second)
    if measured is None or other_measured is None:
        return None
    steps = steps or (int(measured.step[-1]), int(other_measured.step[-1]))
    mine, other = held_out_prompts(store, first, steps[0]), held_out_prompts(store, second, steps[1])
    pairs, counts = [], []
    # Only prompts that both runs answered make a pair; a benchmark may have grown in between.
    for benchmark in sorted(mine.keys() & other.keys()):
        (ids, accuracy_P, counts_P), (other_ids, other_P, other_counts_P) = mine[benchmark], other[benchmark]
        _, at, at_other = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
        if len(at):
            pairs.append((accuracy_P[at], other_P[at_other]))
            counts.append((counts_P[at], other_counts_P[at_other]))
    if not pairs:
        return None
    tested = _tested(pairs)
    higher = "the second is higher" if tested["difference"] > 0 else "the second is lower"
    return {
        **tested,
        "intervals": [(of.low, of.high) for of in map(stratified_t, zip(*pairs, strict=True))],
        "steps": steps,
        "samples": (measured.samples, other_measured.samples),
        "prompts": sum(len(first_P) for first_P, _ in pairs),
        "verdict": higher if tested["p"] < ALPHA else "no difference shown",
        "pass_at_k": _pass_at_k(counts),
    }


def _tested(pairs: Sequence[Sequence[Floats]]) -> dict[str, float]:
    """Return the means of two models, their difference, its interval and p; benchmarks weigh equally."""
    first, second = np.mean([[values.mean() for values in pair] for pair in pairs], axis=0).tolist()
    test = stratified_t([second_P - first_P for first_P, second_P in pairs], two_sided=True)
    return {"first": first, "second": second, **{name: getattr(test, name) for name in (*_CHANGE, "p")}}


def _pass_at_k(counts: Sequence[tuple[Floats, Floats]]) -> list[dict[str, Any]]:
    """Return pass@k of two models for k = 2, 4, 8, ..., with the difference, its interval and p as of the accuracy.

    ``counts`` has for each benchmark the verified responses to each prompt and the sum of their scores, (P, 2), of
    either model. k ends at the fewest responses to any prompt. Scores other than 0 and 1 have no pass@k.
    """
    every = np.concatenate([counts_P for pair in counts for counts_P in pair])
    powers = [] if (every % 1).any() else [2**power for power in range(1, int(every[:, 0].min()).bit_length())]
    passed = {k: [[pass_at_k(of[:, 0], of[:, 1], k) for of in pair] for pair in counts] for k in powers}
    return [{"k": k, **_tested(pairs)} for k, pairs in passed.items()]


def _print_held_out(numbers: Sequence[Mapping[str, Any] | None], accuracy: Mapping[str, Any] | None) -> None:
    rows = [
        (which, *("-" if run is None else f"{100 * run[at]:.1f} % (step {run[f'{at}_step']})" for at in _PLACES))
        for which, run in zip(_WHICH, numbers, strict=True)
    ]
    print_table(("", *_PLACES), rows)
    if accuracy is None:
        print("not measured in both on the same prompts, so there is no test")
        return
    print(f"second - first, last evaluations: {difference_in_words(accuracy)}")
    print(accuracy["verdict"])
    print(ONE_PAIR)
    if accuracy["pass_at_k"]:
        print_title("held-out pass@k, %: last evaluations, prompts of both")
        cells = [
            (row["k"], *(f"{100 * row[name]:.1f}" for name in _WHICH), *(f"{100 * row[name]:+.1f}" for name in _CHANGE))
            for row in accuracy["pass_at_k"]
        ]
        print_table(("k", *_WHICH, "difference", "95 % from", "to"), cells)


def difference_in_words(accuracy: Mapping[str, Any]) -> str:
    """Return what :func:`held_out_difference` found, with its interval."""
    change, low, high = (f"{100 * accuracy[name]:+.1f}" for name in _CHANGE)
    samples = " and ".join(map(str, dict.fromkeys(accuracy["samples"])))
    return f"{change} points, 95 % interval {low} to {high} ({accuracy['prompts']} prompts x {samples} samples)"
