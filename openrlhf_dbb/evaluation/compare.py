"""The command ``evaluate compare``: paired tests of models on the prompts that they share.

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation import results
from openrlhf_dbb.evaluation.metrics import (
    accuracy,
    holm,
    p_value,
    percent,
    stratified_t,
)
from openrlhf_dbb.evaluation.results import Evaluation, Results
from openrlhf_dbb.terminal import json_text, print_table, safe, shown

_EXPLAINED = (
    "accuracy (Acc@N) in %, mean and standard deviation over runs; "
    "missing samples are left out, not wrong\n"
    "p: one-sided paired t-test over prompts, H1: the model named first is better; "
    "the interval is two-sided\n"
    "p (Holm): corrected for all benchmarks and pairs; averages separately. "
    "Avg.: equal weights, stratified test"
)
Pair = tuple[str, str]
"""The names of a model and of the one that it is compared with."""

Tested = dict[str, Any]
"""A difference in numbers, see :func:`differences`."""

_MISSING_SHARE = 0.01  # of the samples, from which on a note tells of missing ones


class Shared(NamedTuple):
    """A benchmark of all evaluations: the prompts of which every model has a verified sample."""

    title: str
    group: str
    scores_R_P_N: dict[str, Floats]  # by model; NaN is missing
    left_out: int  # prompts


def add_command(commands: Any) -> None:
    """Declare the command below ``evaluate``."""
    summary = "test whether evaluations really differ, by paired t-tests over prompts"
    parser = commands.add_parser("compare", help=summary, description=summary)
    parser.set_defaults(command=compare)
    which = f"folders, or names under {results.FOLDER}/; all others are compared with the first"
    parser.add_argument("evaluations", nargs="+", metavar="EVALUATION", help=which)
    parser.add_argument(
        "--json", action="store_true", help="print JSON: differences and notes, all digits"
    )


def compare(arguments: argparse.Namespace) -> None:
    """Print the differences of all evaluations to the first.

    Raises:
        UsageError: fewer than two evaluations are named, or they cannot be compared.
    """
    evaluations = [results.read_evaluation(results.find(name)) for name in arguments.evaluations]
    names = [evaluation.name for evaluation in evaluations]
    if len(names) < 2 or len(set(names)) < len(names):
        listed = ", ".join(arguments.evaluations)
        raise UsageError(f"{listed}: name two or more evaluations with different names")
    benchmarks = shared(evaluations)
    pairs = [(name, names[0]) for name in names[1:]]
    tested = differences(list(benchmarks.values()), pairs)
    remarks = notes(evaluations, benchmarks)
    if arguments.json:
        print(json_text({"differences": tested, "notes": remarks}))
        return
    for pair in pairs:
        _print_pair(pair, tested)
    print(_EXPLAINED)
    for remark in remarks:
        print(f"note: {shown(remark, width=None)}")


def _pair(row: Tested) -> Pair:
    return row["model"], row["baseline"]


def shared(evaluations: Sequence[Evaluation]) -> dict[str, Shared]:
    """Return by name the benchmarks that all evaluations have.

    Raises:
        UsageError: there is none, or one has other prompts or no verified ones.
    """
    first = evaluations[0]
    benchmarks = {}
    for name in first.results:
        if all(name in evaluation.results for evaluation in evaluations):
            measured = {evaluation.name: evaluation.results[name] for evaluation in evaluations}
            about = first.settings["benchmarks"][name]
            benchmarks[name] = _shared(name, about, measured)
    if not benchmarks:
        lists = [f"{one.name} has {', '.join(one.results)}" for one in evaluations]
        raise UsageError(
            f"no benchmark is in every evaluation: {'; '.join(lists)}; "
            "evaluate all on one benchmark or more"
        )
    return benchmarks


def _shared(name: str, about: dict[str, Any], measured: dict[str, Results]) -> Shared:
    """Return one benchmark of several models; refuse other prompts, and one without verified."""
    first = next(iter(measured.values()))
    is_verified = []
    for model, of_model in measured.items():
        if (of_model.ids, of_model.labels) != (first.ids, first.labels):
            # Differences of models and of prompts could not be told apart.
            raise UsageError(
                f"{name}: {next(iter(measured))} and {model} have different prompts; "
                "evaluate both on the same data"
            )
        is_verified.append((~np.isnan(of_model.scores_R_P_N)).any(axis=(0, 2)))
    by_all_P = np.all(is_verified, axis=0)
    if not by_all_P.any():
        raise UsageError(
            f"{name}: no prompt has a verified sample of every model ({', '.join(measured)}); "
            "fix the verifier, and evaluate them on this benchmark again"
        )
    return Shared(
        about["title"],
        about["group"],
        {model: of_model.scores_R_P_N[:, by_all_P] for model, of_model in measured.items()},
        int((~by_all_P).sum()),
    )


def differences(benchmarks: Sequence[Shared], pairs: Sequence[Pair]) -> list[Tested]:
    """Return for each pair (model, baseline) its difference on each benchmark and group average.

    Acc@N is in [0, 1], ``accuracy`` and ``baseline_accuracy`` by run. ``better`` and ``worse``
    count prompts. Averages are corrected (``p_holm``) separately, as they repeat their benchmarks.
    """
    groups: dict[str, list[Shared]] = {}
    for benchmark in benchmarks:
        groups.setdefault(benchmark.group, []).append(benchmark)
    single = []
    average = []
    for members in groups.values():
        single += [[member] for member in members]
        if len(members) > 1:
            average.append(members)
    tested = []
    for family in (single, average):
        rows = []
        for pair in pairs:
            rows += [_difference(pair, members) for members in family]
        corrected = holm([row["p"] for row in rows])
        for row, p in zip(rows, corrected.tolist(), strict=True):
            tested.append(row | {"p_holm": p})
    return sorted(tested, key=lambda row: pairs.index(_pair(row)))


def _difference(pair: Pair, members: Sequence[Shared]) -> Tested:
    model, baseline = pair
    accuracies = []
    baselines = []
    by_prompt = []
    for member in members:
        scores = member.scores_R_P_N[model]
        others = member.scores_R_P_N[baseline]
        accuracies.append(accuracy(accuracy(scores)))
        baselines.append(accuracy(accuracy(others)))
        # Of each prompt over its runs.
        by_prompt.append(accuracy(accuracy(scores).T) - accuracy(accuracy(others).T))
    all_prompts = np.concatenate(by_prompt)
    name = members[0].title
    if len(members) > 1:
        name = f"Avg. {members[0].group}".strip()
    return {
        "model": model,
        "baseline": baseline,
        "benchmark": name,
        "prompts": len(all_prompts),
        "accuracy": np.mean(accuracies, axis=0).tolist(),
        "baseline_accuracy": np.mean(baselines, axis=0).tolist(),
        **stratified_t(by_prompt)._asdict(),
        "better": int((all_prompts > 0).sum()),
        "worse": int((all_prompts < 0).sum()),
    }


def notes(evaluations: Sequence[Evaluation], benchmarks: dict[str, Shared]) -> list[str]:
    """Return what a reader should know: different settings, missing samples."""
    different = []
    for key in ("n", "runs", "temperature", "top_p"):
        values = [evaluation.settings[key] for evaluation in evaluations]
        different += _different(key, values, evaluations)
    missing = []
    for name, benchmark in benchmarks.items():
        title = benchmark.title
        abouts = [evaluation.settings["benchmarks"][name] for evaluation in evaluations]
        for key in ("verifier", "max_new_tokens", "chat_template", "digest"):
            values = [about[key] for about in abouts]
            different += _different(f"{key} of {title}", values, evaluations)
        for evaluation in evaluations:
            share = np.isnan(evaluation.results[name].scores_R_P_N).mean()
            if share >= _MISSING_SHARE:
                missing.append(
                    f"{title}: {share:.1%} of the samples of {evaluation.name} are not verified"
                )
        if benchmark.left_out:
            missing.append(
                f"{title}: {benchmark.left_out} prompts left out, as a model has no verified sample"
            )
    return different + missing


def _different(setting: str, values: Sequence[Any], evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a note if the evaluations have different values of a setting."""
    if len(set(values)) == 1:
        return []
    pairs = zip(values, evaluations, strict=True)
    listed = ", ".join(f"{value} in {evaluation.name}" for value, evaluation in pairs)
    return [f"different {setting}: {listed}"]


def _print_pair(pair: Pair, tested: Sequence[Tested]) -> None:
    rows = []
    for row in tested:
        if _pair(row) == pair:
            cells = [
                row["benchmark"],
                str(row["prompts"]),
                percent(np.array(row["accuracy"])),
                percent(np.array(row["baseline_accuracy"])),
                f"{100 * row['difference']:+.2f}",
                f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}",
                p_value(row["p"]),
                p_value(row["p_holm"]),
                str(row["better"]),
                str(row["worse"]),
            ]
            rows.append(cells)
    print(safe(" - ".join(pair)))
    header = ("", "prompts", *pair, "difference", "95 % interval", "p", "p (Holm)")
    print_table((*header, "better", "worse"), rows)
    print()
