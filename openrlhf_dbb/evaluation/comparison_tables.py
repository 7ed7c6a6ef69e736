"""A comparison of models as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from openrlhf_dbb.evaluation import statistics as st
from openrlhf_dbb.evaluation.differences import Comparison, Difference
from openrlhf_dbb.evaluation.formats import mean_and_std, p_value, percent, points, runs_in_words
from openrlhf_dbb.evaluation.metrics import OverRuns, Summary
from openrlhf_dbb.terminal import json_text, records, shown, table


class Section(NamedTuple):
    """A table under a title; cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def text(comparison: Comparison) -> str:
    """Tables for a terminal: accuracy, other measures, the differences of each pair, and explanations."""
    parts = [f"{shown(part.title, width=None)}\n{table(part.header, part.rows)}" for part in _sections(comparison)]
    return "\n\n".join([*parts, "\n".join(shown(line, width=None) for line in explained(comparison))]) + "\n"


def as_json(comparison: Comparison) -> str:
    """Return the differences (fractions, not percent), each model's measures, and the notes as one JSON object."""
    document = {
        "differences": [_difference_row(difference, comparison) for difference in comparison.differences],
        "measures": records(_MEASURE_COLUMNS, _measure_rows(comparison)),
        "notes": comparison.notes,
    }
    return json_text(document) + "\n"


def measure_name(comparison: Comparison) -> str:
    """Acc@8, or Acc@N where N is not the same for all models."""
    samples = set(comparison.samples.values())
    return f"Acc@{samples.pop() if len(samples) == 1 else 'N'}"


def explained(comparison: Comparison) -> list[str]:
    """Explanations of the columns, then the comparison's notes."""
    averages = sum(found.column.is_average for found in comparison.differences)
    tests = len(comparison.differences) - averages
    lines = [
        "difference: in percentage points; missing samples are left out, not counted as wrong",
        "95 % interval: two-sided, of the t-test over prompts",
        "p: one-sided paired t-test over prompts, H1: the model named first is better",
        f"p (Holm): corrected for all {tests} tests of benchmarks" + (f", {averages} of averages" if averages else ""),
        "better, worse: prompts on which the model's accuracy is higher, lower",
        f"detectable: the true difference that gives p < {st.ALPHA:g} with probability {st.POWER:g}",
    ]
    if averages:
        lines.append("Avg.: every benchmark has the same weight; the t-test is stratified by benchmark")
    return [*lines, *(f"note: {note}" for note in comparison.notes)]


def _sections(comparison: Comparison) -> Iterator[Section]:
    yield _accuracies(comparison)
    yield _other_measures(comparison)
    for model, baseline in comparison.pairs:
        found = comparison.of((model, baseline))
        yield Section(
            f"{model} - {baseline} ({measure_name(comparison)})",
            ("", "prompts", "difference", "95 % interval", "p", "p (Holm)", "better", "worse", "detectable"),
            [_difference_cells(difference) for difference in found],
        )


def _accuracies(comparison: Comparison) -> Section:
    rows = [
        [column.title, str(column.prompts), *(mean_and_std(column.accuracy[model]) for model in comparison.models)]
        for column in comparison.columns
    ]
    title = f"accuracy ({measure_name(comparison)} in %, {runs_in_words(comparison.runs.values())})"
    return Section(title, ("", "prompts", *comparison.models), rows)


def _other_measures(comparison: Comparison) -> Section:
    rows = []
    for column in comparison.columns:
        for model in comparison.models if not column.is_average else ():
            found = comparison.summaries[model, column.name]
            shares = [percent(measure.mean) for measure in (found.best, found.majority, found.truncated, found.missing)]
            rows.append([column.title, model, str(found.samples), f"{found.length.mean:.0f}", *shares])
    header = ("", "model", "n", "tokens", "Best@n", "majority@n", "truncated", "missing")
    return Section("other measures (in %, means over runs)", header, rows)


def _difference_cells(found: Difference) -> list[str]:
    return [
        found.column.title,
        str(found.column.prompts),
        f"{points(found.test.difference):>6}",
        f"{points(found.low):>6} to {points(found.high):>6}",
        p_value(found.test.p),
        p_value(found.holm),
        str(found.better),
        str(found.worse),
        percent(found.detectable),
    ]


def _measures(summary: Summary) -> dict[str, OverRuns]:
    named = {f"Acc@{summary.samples}": summary.accuracy, f"Best@{summary.samples}": summary.best}
    named |= {f"pass@{k}": measure for k, measure in summary.pass_at.items()}
    named |= {f"majority@{summary.samples}": summary.majority, "tokens": summary.length}
    return named | {"truncated": summary.truncated, "missing": summary.missing}


_MEASURE_COLUMNS = ("benchmark", "model", "measure", "mean", "std", "runs")


def _measure_rows(comparison: Comparison) -> list[tuple[Any, ...]]:
    return [
        (benchmark, model, name, measure.mean, measure.std, len(measure.by_run))
        for (model, benchmark), summary in comparison.summaries.items()
        for name, measure in _measures(summary).items()
    ]


def _difference_row(found: Difference, comparison: Comparison) -> dict[str, Any]:
    column, test = found.column, found.test
    row: dict[str, Any] = {"model": found.model, "baseline": found.baseline, "benchmark": column.name}
    row |= {"group": column.group, "prompts": column.prompts, "prompts left out": column.left_out}
    for which, name in (("model", found.model), ("baseline", found.baseline)):
        row |= {f"{which} accuracy": column.accuracy[name].mean, f"{which} std": column.accuracy[name].std}
        row |= {f"{which} runs": comparison.runs[name], f"{which} n": comparison.samples[name]}
    row |= {"difference": test.difference, "interval low": found.low, "interval high": found.high}
    row |= {"standard error": test.error, "t": test.t, "degrees of freedom": test.degrees}
    row |= {"p": test.p, "p Holm": found.holm}
    return row | {"better": found.better, "worse": found.worse, "detectable": found.detectable}
