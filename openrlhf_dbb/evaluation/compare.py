"""The command ``evaluate compare``: paired tests of models on the benchmarks and prompts that they share.

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation import paired_tests, results
from openrlhf_dbb.evaluation.metrics import accuracy, percent
from openrlhf_dbb.evaluation.results import Evaluation
from openrlhf_dbb.terminal import json_text, shown, table

_SETTINGS = ("n", "runs", "temperature", "top_p")
_SETTINGS_OF_BENCHMARK = ("verifier", "max_new_tokens", "chat_template", "digest")
_EXPLAINED = """\
accuracy (Acc@N) in %, mean and standard deviation over runs; missing samples are left out, not wrong
p: one-sided paired t-test over prompts, H1: the model named first is better; the interval is two-sided
p (Holm): corrected for all benchmarks and pairs; averages separately. Avg.: equal weights, stratified test"""


@dataclass(frozen=True)
class Shared:
    """A benchmark of all evaluations; scores, by model, of the prompts of which every model has a verified sample."""

    title: str
    group: str
    scores_R_P_N: dict[str, Floats]
    left_out: int


def add_command(commands: Any) -> None:
    """Add ``compare`` to the sub-parsers of the evaluate command."""
    summary = "test whether differences between evaluations are real, by paired t-tests over prompts"
    parser = commands.add_parser("compare", help=summary, description=summary)
    parser.set_defaults(command=compare)
    which = f"folders, or names under {results.FOLDER}/; all others are compared with the first"
    parser.add_argument("evaluations", nargs="+", metavar="EVALUATION", help=which)
    parser.add_argument("--benchmarks", metavar="NAME,...", help="only these (default: all that the evaluations share)")
    parser.add_argument("--json", action="store_true", help="print JSON: differences and notes, all digits")


def compare(arguments: argparse.Namespace) -> None:
    """Print the differences between evaluations as tables or JSON."""
    read = [results.read_evaluation(results.find(name)) for name in arguments.evaluations]
    evaluations = {evaluation.name: evaluation for evaluation in read}
    first, *others = evaluations
    if len(evaluations) < len(arguments.evaluations) or not others:
        raise UsageError(f"{', '.join(arguments.evaluations)}: name two or more evaluations with different names")
    pairs = [(other, first) for other in others]
    chosen = None if arguments.benchmarks is None else arguments.benchmarks.split(",")
    benchmarks = shared(read, chosen)
    tested, remarks = differences(list(benchmarks.values()), pairs), notes(read, benchmarks)
    print(json_text({"differences": tested, "notes": remarks}) if arguments.json else as_text(tested, remarks))


def shared(evaluations: Sequence[Evaluation], chosen: Sequence[str] | None) -> dict[str, Shared]:
    """Return the benchmarks that all evaluations have, or those of ``chosen``; refuse other prompts."""
    everywhere = [name for name in evaluations[0].results if all(name in other.results for other in evaluations)]
    wanted = everywhere if chosen is None else chosen
    if not wanted or not set(wanted) <= set(everywhere):
        has = "; ".join(f"{evaluation.name} has {', '.join(evaluation.results)}" for evaluation in evaluations)
        problem = "no benchmark is" if chosen is None else f"--benchmarks {','.join(chosen)}: not all are"
        raise UsageError(f"{problem} in every evaluation: {has}")
    found, first = {}, evaluations[0]
    for name in wanted:
        measured = {evaluation.name: evaluation.results[name] for evaluation in evaluations}
        for model, other in measured.items():
            if (other.ids, other.labels) != (measured[first.name].ids, measured[first.name].labels):
                # Differences of models and of prompts could not be told apart.
                raise UsageError(
                    f"{name}: {first.name} and {model} have different prompts; evaluate both on the same data, "
                    "or choose other benchmarks with --benchmarks"
                )
        verified_P = np.all([(~np.isnan(each.scores_R_P_N)).any(axis=(0, 2)) for each in measured.values()], axis=0)
        if not verified_P.any():
            raise UsageError(f"{name}: no prompt has a verified sample of every model; leave it out with --benchmarks")
        about = first.settings["benchmarks"][name]
        scores = {model: each.scores_R_P_N[:, verified_P] for model, each in measured.items()}
        found[name] = Shared(about["title"], about["group"], scores, int((~verified_P).sum()))
    return found


def differences(benchmarks: Sequence[Shared], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return for each pair (model, baseline) its difference on each benchmark, and on average over each group.

    Acc@N is in [0, 1], ``accuracy`` and ``baseline_accuracy`` by run. ``better`` and ``worse`` count prompts. Averages
    are corrected (``p_holm``) separately, as they repeat their benchmarks.
    """
    groups: dict[str, list[Shared]] = {}
    for benchmark in benchmarks:
        groups.setdefault(benchmark.group, []).append(benchmark)
    single = [(pair, [member]) for pair in pairs for members in groups.values() for member in members]
    average = [(pair, members) for pair in pairs for members in groups.values() if len(members) > 1]
    tested = []
    for family in (single, average):
        rows = [_difference(pair, members) for pair, members in family]
        corrected = paired_tests.holm([row["p"] for row in rows])
        tested += [row | {"p_holm": float(p)} for row, p in zip(rows, corrected, strict=True)]
    return sorted(tested, key=lambda row: pairs.index((row["model"], row["baseline"])))


def _difference(pair: tuple[str, str], members: Sequence[Shared]) -> dict[str, Any]:
    model, baseline = ([member.scores_R_P_N[name] for member in members] for name in pair)
    # Of each prompt over its runs.
    by_prompt = [accuracy(accuracy(a).T) - accuracy(accuracy(b).T) for a, b in zip(model, baseline, strict=True)]
    test = paired_tests.stratified_t(by_prompt)
    all_prompts = np.concatenate(by_prompt)
    return {
        "model": pair[0],
        "baseline": pair[1],
        "benchmark": members[0].title if len(members) == 1 else f"Avg. {members[0].group}".strip(),
        "prompts": len(all_prompts),
        "accuracy": np.mean([accuracy(accuracy(scores)) for scores in model], axis=0).tolist(),
        "baseline_accuracy": np.mean([accuracy(accuracy(scores)) for scores in baseline], axis=0).tolist(),
        **test._asdict(),
        "better": int((all_prompts > 0).sum()),
        "worse": int((all_prompts < 0).sum()),
    }


def notes(evaluations: Sequence[Evaluation], benchmarks: dict[str, Shared]) -> list[str]:
    """Return what a reader should know: different settings, missing samples."""
    lines = [_differing(key, {each.name: each.settings[key] for each in evaluations}) for key in _SETTINGS]
    for name, benchmark in benchmarks.items():
        about = {each.name: each.settings["benchmarks"][name] for each in evaluations}
        for key in _SETTINGS_OF_BENCHMARK:
            lines.append(_differing(f"{key} of {benchmark.title}", {model: about[model][key] for model in about}))
        missing = {each.name: np.isnan(each.results[name].scores_R_P_N).mean() for each in evaluations}
        lines += [
            f"{benchmark.title}: {share:.1%} of the samples of {model} are not verified"
            for model, share in missing.items()
            if share >= 0.01
        ]
        if benchmark.left_out:
            lines.append(f"{benchmark.title}: {benchmark.left_out} prompts left out, as a model has no verified sample")
    return [line for line in lines if line]


def _differing(setting: str, values: dict[str, Any]) -> str:
    listed = ", ".join(f"{value} in {model}" for model, value in values.items())
    return f"different {setting}: {listed}" if len(set(values.values())) > 1 else ""


def as_text(tested: Sequence[dict[str, Any]], remarks: Sequence[str]) -> str:
    """Return a table for each pair of models, explanations, and the notes."""
    parts = []
    for pair in dict.fromkeys((row["model"], row["baseline"]) for row in tested):
        rows = [
            (
                row["benchmark"],
                str(row["prompts"]),
                *(percent(np.array(row[name])) for name in ("accuracy", "baseline_accuracy")),
                f"{100 * row['difference']:+.2f}",
                f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}",
                *(paired_tests.p_value(row[name]) for name in ("p", "p_holm")),
                str(row["better"]),
                str(row["worse"]),
            )
            for row in tested
            if (row["model"], row["baseline"]) == pair
        ]
        header = ("", "prompts", *pair, "difference", "95 % interval", "p", "p (Holm)", "better", "worse")
        parts.append(f"{' - '.join(pair)}\n{table(header, rows)}")
    return "\n\n".join([*parts, "\n".join([_EXPLAINED, *(f"note: {shown(remark, width=None)}" for remark in remarks)])])
