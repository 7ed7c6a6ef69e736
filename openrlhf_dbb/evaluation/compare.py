"""The command ``evaluate compare``: paired tests of models on the benchmarks and prompts that they share.

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation import results
from openrlhf_dbb.evaluation.metrics import accuracy, holm, p_value, percent, stratified_t
from openrlhf_dbb.evaluation.results import Evaluation
from openrlhf_dbb.terminal import json_text, print_table, safe, shown

_EXPLAINED = """\
accuracy (Acc@N) in %, mean and standard deviation over runs; missing samples are left out, not wrong
p: one-sided paired t-test over prompts, H1: the model named first is better; the interval is two-sided
p (Holm): corrected for all benchmarks and pairs; averages separately. Avg.: equal weights, stratified test"""


class Shared(NamedTuple):
    """A benchmark of all evaluations; scores, by model, of the prompts of which every model has a verified sample."""

    title: str
    group: str
    scores_R_P_N: dict[str, Floats]
    left_out: int


def add_command(commands: Any) -> None:
    summary = "test whether differences between evaluations are real, by paired t-tests over prompts"
    parser = commands.add_parser("compare", help=summary, description=summary)
    parser.set_defaults(command=compare)
    which = f"folders, or names under {results.FOLDER}/; all others are compared with the first"
    parser.add_argument("evaluations", nargs="+", metavar="EVALUATION", help=which)
    parser.add_argument("--json", action="store_true", help="print JSON: differences and notes, all digits")


def compare(arguments: argparse.Namespace) -> None:
    read = [results.read_evaluation(results.find(name)) for name in arguments.evaluations]
    first, *others = dict.fromkeys(evaluation.name for evaluation in read)
    if len(others) + 1 < len(read) or not others:
        raise UsageError(f"{', '.join(arguments.evaluations)}: name two or more evaluations with different names")
    benchmarks = shared(read)
    tested = differences(list(benchmarks.values()), [(other, first) for other in others])
    remarks = notes(read, benchmarks)
    if arguments.json:
        print(json_text({"differences": tested, "notes": remarks}))
        return
    for pair in dict.fromkeys((row["model"], row["baseline"]) for row in tested):
        _print_pair(pair, [row for row in tested if (row["model"], row["baseline"]) == pair])
    print("\n".join([_EXPLAINED, *(f"note: {shown(remark, width=None)}" for remark in remarks)]))


def shared(evaluations: Sequence[Evaluation]) -> dict[str, Shared]:
    """Return the benchmarks that all evaluations have; refuse other prompts."""
    found, first = {}, evaluations[0]
    names = [name for name in first.results if all(name in other.results for other in evaluations)]
    if not names:
        has = "; ".join(f"{evaluation.name} has {', '.join(evaluation.results)}" for evaluation in evaluations)
        raise UsageError(f"no benchmark is in every evaluation: {has}; evaluate all on one benchmark or more")
    for name in names:
        measured = {evaluation.name: evaluation.results[name] for evaluation in evaluations}
        same = first.results[name].ids, first.results[name].labels
        other = next((model for model, each in measured.items() if (each.ids, each.labels) != same), None)
        if other is not None:  # differences of models and of prompts could not be told apart
            raise UsageError(f"{name}: {first.name} and {other} have different prompts; evaluate both on the same data")
        verified_P = np.all([(~np.isnan(each.scores_R_P_N)).any(axis=(0, 2)) for each in measured.values()], axis=0)
        if not verified_P.any():
            models = ", ".join(measured)
            raise UsageError(
                f"{name}: no prompt has a verified sample of every model ({models}); fix the verifier, "
                "and evaluate them on this benchmark again"
            )
        about = first.settings["benchmarks"][name]
        scores = {model: each.scores_R_P_N[:, verified_P] for model, each in measured.items()}
        found[name] = Shared(about["title"], about["group"], scores, int((~verified_P).sum()))
    return found


def differences(benchmarks: Sequence[Shared], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return for each pair (model, baseline) its difference on each benchmark, and on average over each group.

    Acc@N is in [0, 1], ``accuracy`` and ``baseline_accuracy`` by run. ``better`` and ``worse`` count prompts. Averages
    are corrected (``p_holm``) separately, as they repeat their benchmarks.
    """
    names = dict.fromkeys(benchmark.group for benchmark in benchmarks)
    groups = [[benchmark for benchmark in benchmarks if benchmark.group == name] for name in names]
    single = [[member] for members in groups for member in members]
    average = [members for members in groups if len(members) > 1]
    tested = []
    for family in (single, average):
        rows = [_difference(pair, members) for pair in pairs for members in family]
        corrected = holm([row["p"] for row in rows])
        tested += [row | {"p_holm": float(p)} for row, p in zip(rows, corrected, strict=True)]
    return sorted(tested, key=lambda row: pairs.index((row["model"], row["baseline"])))


def _difference(pair: tuple[str, str], members: Sequence[Shared]) -> dict[str, Any]:
    model, baseline = ([member.scores_R_P_N[name] for member in members] for name in pair)
    # Of each prompt over its runs.
    by_prompt = [accuracy(accuracy(a).T) - accuracy(accuracy(b).T) for a, b in zip(model, baseline, strict=True)]
    all_prompts = np.concatenate(by_prompt)
    return {
        "model": pair[0],
        "baseline": pair[1],
        "benchmark": members[0].title if len(members) == 1 else f"Avg. {members[0].group}".strip(),
        "prompts": len(all_prompts),
        "accuracy": np.mean([accuracy(accuracy(scores)) for scores in model], axis=0).tolist(),
        "baseline_accuracy": np.mean([accuracy(accuracy(scores)) for scores in baseline], axis=0).tolist(),
        **stratified_t(by_prompt)._asdict(),
        "better": int((all_prompts > 0).sum()),
        "worse": int((all_prompts < 0).sum()),
    }


def notes(evaluations: Sequence[Evaluation], benchmarks: dict[str, Shared]) -> list[str]:
    """Return what a reader should know: different settings, missing samples."""
    settings = {key: [each.settings[key] for each in evaluations] for key in ("n", "runs", "temperature", "top_p")}
    missing = []
    for name, (title, _, _, left_out) in benchmarks.items():
        about = [each.settings["benchmarks"][name] for each in evaluations]
        for key in ("verifier", "max_new_tokens", "chat_template", "digest"):
            settings[f"{key} of {title}"] = [each[key] for each in about]
        for each in evaluations:
            share = np.isnan(each.results[name].scores_R_P_N).mean()
            if share >= 0.01:
                missing.append(f"{title}: {share:.1%} of the samples of {each.name} are not verified")
        if left_out:
            missing.append(f"{title}: {left_out} prompts left out, as a model has no verified sample")
    different = []
    for setting, values in settings.items():
        if len(set(values)) > 1:
            listed = (f"{value} in {each.name}" for value, each in zip(values, evaluations, strict=True))
            different.append(f"different {setting}: {', '.join(listed)}")
    return different + missing


def _print_pair(pair: tuple[str, str], tested: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            row["benchmark"],
            str(row["prompts"]),
            *(percent(np.array(row[name])) for name in ("accuracy", "baseline_accuracy")),
            f"{100 * row['difference']:+.2f}",
            f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}",
            *(p_value(row[name]) for name in ("p", "p_holm")),
            *(str(row[name]) for name in ("better", "worse")),
        )
        for row in tested
    ]
    print(safe(" - ".join(pair)))
    print_table(("", "prompts", *pair, "difference", "95 % interval", "p", "p (Holm)", "better", "worse"), rows)
    print()
