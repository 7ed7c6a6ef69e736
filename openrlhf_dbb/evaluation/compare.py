"""The command ``evaluate compare``: paired tests of models on the benchmarks and prompts that they share.

Axes: R evaluation runs, P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import results
from openrlhf_dbb.evaluation import statistics as st
from openrlhf_dbb.evaluation.metrics import Floats, OverRuns, accuracy, macro_average, over_runs
from openrlhf_dbb.evaluation.results import Evaluation
from openrlhf_dbb.terminal import json_text, shown, table

_NOTABLE_MISSING = 0.01
_SETTINGS = ("n", "runs", "temperature", "top_p")
_SETTINGS_OF_BENCHMARK = ("verifier", "max_new_tokens", "chat_template", "prompts_digest")


@dataclass(frozen=True)
class Shared:
    """A benchmark of all evaluations, restricted to the prompts of which every model has a verified sample.

    Attributes:
        scores_R_P_N: by model.
        left_out: prompts of which a model has no verified sample.
    """

    title: str
    group: str
    scores_R_P_N: dict[str, Floats]
    left_out: int


@dataclass(frozen=True)
class Difference:
    """Acc@N of a model minus that of a baseline, on a benchmark or on average over a group's benchmarks.

    Attributes:
        benchmark: title, or "Avg." with the group.
        prompts: P; for an average, of all its benchmarks.
        accuracy, baseline_accuracy: of the two models.
        test: one-sided paired t-test over prompts, H1: the model is better.
        p_holm: the test's p, corrected for all tests of benchmarks, or of averages, in the comparison.
        better, worse: prompts on which the model's accuracy is higher, lower.
    """

    model: str
    baseline: str
    benchmark: str
    is_average: bool
    prompts: int
    accuracy: OverRuns
    baseline_accuracy: OverRuns
    test: st.PairedTest
    p_holm: float
    better: int
    worse: int


def add_command(commands: Any) -> None:
    """Add ``compare`` to the sub-parsers of the evaluate command."""
    summary = "test whether differences between evaluations are real, by paired t-tests over prompts"
    parser = commands.add_parser("compare", help=summary, description=summary)
    parser.set_defaults(command=compare)
    parser.add_argument(
        "evaluations",
        nargs="+",
        metavar="EVALUATION",
        help=f"folders, or names under {results.FOLDER}/; all others are compared with the first",
    )
    parser.add_argument("--of", metavar="NAME", help="compare this one with all others, as in the paper's Table 1")
    parser.add_argument("--benchmarks", metavar="NAME,...", help="only these (default: all that the evaluations share)")
    parser.add_argument("--json", action="store_true", help="print JSON: differences and notes, all digits")


def compare(arguments: argparse.Namespace) -> None:
    """Print the differences between evaluations as tables or JSON.

    Raises:
        UsageError: an evaluation or a flag does not fit, or the evaluations have different prompts.
    """
    evaluations = [results.read_evaluation(results.find(name)) for name in arguments.evaluations]
    names = [evaluation.name for evaluation in evaluations]
    if len(names) < 2:
        raise UsageError(f"nothing to compare {names[0]} with; name at least two evaluations")
    if len(set(names)) < len(names):
        raise UsageError(f"two evaluations have the same name: {', '.join(names)}; rename the folder of one")
    if arguments.of is None:
        pairs = [(other, names[0]) for other in names[1:]]
    else:
        model = Path(arguments.of).resolve().name
        if model not in names:
            raise UsageError(f"--of {arguments.of} is not one of the evaluations: {', '.join(names)}")
        pairs = [(model, other) for other in names if other != model]
    chosen = None if arguments.benchmarks is None else arguments.benchmarks.split(",")
    benchmarks = shared(evaluations, chosen)
    found = differences(benchmarks, pairs)
    remarks = notes(evaluations, benchmarks)
    print(as_json(found, remarks) if arguments.json else as_text(found, remarks))


def shared(evaluations: Sequence[Evaluation], chosen: Sequence[str] | None = None) -> dict[str, Shared]:
    """Return the benchmarks that all evaluations have, or those of ``chosen``, by name.

    Raises:
        UsageError: there is none, an evaluation lacks a chosen one, or the prompts of a benchmark differ.
    """
    everywhere = [name for name in evaluations[0].results if all(name in other.results for other in evaluations)]
    wanted = everywhere if chosen is None else chosen
    absent = [name for name in wanted if name not in everywhere]
    if absent or not wanted:
        has = "; ".join(f"{evaluation.name} has {', '.join(evaluation.results)}" for evaluation in evaluations)
        raise UsageError(f"benchmark {absent[0] if absent else ''!r} is not in every evaluation: {has}")
    return {name: _shared(name, evaluations) for name in wanted}


def _shared(name: str, evaluations: Sequence[Evaluation]) -> Shared:
    first, *others = evaluations
    measured = [evaluation.results[name] for evaluation in evaluations]
    for other, theirs in zip(others, measured[1:], strict=True):
        if (theirs.ids, theirs.labels) != (measured[0].ids, measured[0].labels):
            # Differences of models and of prompts could not be told apart.
            raise UsageError(
                f"{name}: {first.name} and {other.name} have different prompts; evaluate both on the same data, "
                "or choose other benchmarks with --benchmarks"
            )
    verified_P = np.all([(~np.isnan(each.scores_R_P_N)).any(axis=(0, 2)) for each in measured], axis=0)
    if not verified_P.any():
        raise UsageError(f"{name}: no prompt has a verified sample of every model; leave it out with --benchmarks")
    about = first.settings["benchmarks"][name]
    return Shared(
        title=about["title"],
        group=about["group"],
        scores_R_P_N={each.name: each.results[name].scores_R_P_N[:, verified_P] for each in evaluations},
        left_out=int((~verified_P).sum()),
    )


def differences(benchmarks: dict[str, Shared], pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """Return the differences of each pair (model, baseline): its benchmarks by group, then the group's average."""
    groups: dict[str, list[Shared]] = {}
    for benchmark in benchmarks.values():
        groups.setdefault(benchmark.group, []).append(benchmark)
    tested = []
    for pair in pairs:
        for members in groups.values():
            tested += [_difference(pair, [member]) for member in members]
            if len(members) > 1:
                tested.append(_difference(pair, members))
    # Separately, as averages repeat what their benchmarks say.
    for is_average in (False, True):
        places = [place for place, found in enumerate(tested) if found.is_average == is_average]
        for place, p in zip(places, st.holm([tested[place].test.p for place in places]), strict=True):
            tested[place] = replace(tested[place], p_holm=float(p))
    return tested


def _difference(pair: tuple[str, str], members: Sequence[Shared]) -> Difference:
    models = [[member.scores_R_P_N[name] for member in members] for name in pair]
    means = [[accuracy(accuracy(scores).T) for scores in own] for own in models]  # of each prompt over its runs
    by_prompt = [own_P - baseline_P for own_P, baseline_P in zip(*means, strict=True)]
    own, baseline = (macro_average([over_runs(accuracy(scores)) for scores in own]) for own in models)
    is_average = len(members) > 1
    return Difference(
        model=pair[0],
        baseline=pair[1],
        benchmark=f"Avg. {members[0].group}".strip() if is_average else members[0].title,
        is_average=is_average,
        prompts=sum(len(difference_P) for difference_P in by_prompt),
        accuracy=own,
        baseline_accuracy=baseline,
        test=st.stratified_t(by_prompt),
        p_holm=float("nan"),
        better=sum(int((difference_P > 0).sum()) for difference_P in by_prompt),
        worse=sum(int((difference_P < 0).sum()) for difference_P in by_prompt),
    )


def notes(evaluations: Sequence[Evaluation], benchmarks: dict[str, Shared]) -> list[str]:
    """Return what a reader should know before relying on the numbers."""
    names = [evaluation.name for evaluation in evaluations]
    lines = []
    for key in _SETTINGS:
        lines += _differing(f"different {key}", names, [evaluation.settings[key] for evaluation in evaluations])
    for name, benchmark in benchmarks.items():
        about = [evaluation.settings["benchmarks"][name] for evaluation in evaluations]
        for key in _SETTINGS_OF_BENCHMARK:
            lines += _differing(f"{benchmark.title}: different {key}", names, [each[key] for each in about])
        if benchmark.left_out:
            lines.append(f"{benchmark.title}: {benchmark.left_out} prompts left out, as a model has no verified sample")
        for evaluation in evaluations:
            missing = float(np.isnan(evaluation.results[name].scores_R_P_N).mean())
            if missing >= _NOTABLE_MISSING:
                lines.append(f"{benchmark.title}: {missing:.1%} of the samples of {evaluation.name} are not verified")
    return lines


def _differing(setting: str, names: Sequence[str], values: Sequence[object]) -> list[str]:
    if all(value == values[0] for value in values):
        return []
    return [f"{setting}: " + ", ".join(f"{value} in {name}" for name, value in zip(names, values, strict=True))]


def as_text(found: Sequence[Difference], remarks: Sequence[str]) -> str:
    """Return a table for each pair of models, explanations, and the notes."""
    parts = []
    for pair in dict.fromkeys((difference.model, difference.baseline) for difference in found):
        rows = [_cells(difference) for difference in found if (difference.model, difference.baseline) == pair]
        header = ("", "prompts", *pair, "difference", "95 % interval", "p", "p (Holm)", "better", "worse")
        parts.append(f"{shown(' - '.join(pair), width=None)}\n{table(header, rows)}")
    explained = [
        "accuracy (Acc@N) in %, mean and standard deviation over runs; missing samples are left out, not wrong",
        "p: one-sided paired t-test over prompts, H1: the model named first is better; the interval is two-sided",
        "p (Holm): corrected for all benchmarks and pairs; averages separately. Avg.: equal weights, stratified test",
        *(f"note: {remark}" for remark in remarks),
    ]
    return "\n\n".join([*parts, "\n".join(shown(line, width=None) for line in explained)])


def _cells(difference: Difference) -> tuple[str, ...]:
    low, high = st.t_interval(difference.test)
    return (
        difference.benchmark,
        str(difference.prompts),
        difference.accuracy.percent,
        difference.baseline_accuracy.percent,
        f"{100 * difference.test.difference:+.2f}",
        f"{100 * low:+.2f} to {100 * high:+.2f}",
        st.p_value(difference.test.p),
        st.p_value(difference.p_holm),
        str(difference.better),
        str(difference.worse),
    )


def as_json(found: Sequence[Difference], remarks: Sequence[str]) -> str:
    """Return the differences (fractions, not percent) and the notes as one JSON object."""
    rows = []
    for difference in found:
        low, high = st.t_interval(difference.test)
        values = asdict(difference) | difference.test._asdict() | {"low": low, "high": high}
        del values["test"]
        rows.append(values)
    return json_text({"differences": rows, "notes": list(remarks)})
