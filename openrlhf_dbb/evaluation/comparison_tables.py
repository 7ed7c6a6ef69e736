"""A comparison of models as text, Markdown, CSV and JSON."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from openrlhf_dbb.csv_files import write_rows
from openrlhf_dbb.evaluation import statistics as st
from openrlhf_dbb.evaluation.differences import Comparison, Difference
from openrlhf_dbb.evaluation.formats import mean_and_std, p_value, percent, points, runs_in_words
from openrlhf_dbb.evaluation.metrics import OverRuns, Summary
from openrlhf_dbb.terminal import json_text, records, shown, table

SMALL = 50
"""With fewer prompts the signed-rank and the sign test are printed beside the t-test, which needs nearly normal means.
The number of prompts decides, before any p-value is known; the CSV always has all three."""


class Section(NamedTuple):
    """A table under a title; cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def text(comparison: Comparison) -> str:
    """Tables for a terminal: accuracy, other measures, the differences of each pair, and explanations."""
    parts = [f"{shown(part.title, width=None)}\n{table(part.header, part.rows)}" for part in _sections(comparison)]
    return "\n\n".join([*parts, "\n".join(shown(line, width=None) for line in explained(comparison))]) + "\n"


def markdown(comparison: Comparison) -> str:
    """The same tables in Markdown."""
    parts = [f"**{_escaped(part.title)}**\n\n{_markdown_table(part)}" for part in _sections(comparison)]
    return "\n\n".join([*parts, "\n".join(f"- {_escaped(line)}" for line in explained(comparison))]) + "\n"


def differences_csv(comparison: Comparison) -> str:
    """A row per pair and column with all digits; accuracies and differences are fractions, not percent."""
    rows = [_csv_row(difference, comparison) for difference in comparison.differences]
    return _csv(list(rows[0]), (list(row.values()) for row in rows))


def measures_csv(comparison: Comparison) -> str:
    """A row per benchmark, model and measure: mean and standard deviation over runs; shares are fractions of 1."""
    return _csv(_MEASURE_COLUMNS, _measure_rows(comparison))


def as_json(comparison: Comparison) -> str:
    """The rows of both CSV files, and the notes, as one JSON object."""
    document = {
        "differences": [_csv_row(difference, comparison) for difference in comparison.differences],
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
        f"95 % interval: two-sided, bootstrap over prompts and runs, {st.DRAWS} draws",
        "p: one-sided paired t-test over prompts, H1: the model named first is better",
        f"p (Holm): corrected for all {tests} tests of benchmarks" + (f", {averages} of averages" if averages else ""),
        "better, worse: prompts on which the model's accuracy is higher, lower",
        f"detectable: the true difference that gives p < {st.ALPHA:g} with probability {st.POWER:g}",
    ]
    if averages:
        lines.append("Avg.: every benchmark has the same weight; t-test and bootstrap are stratified by benchmark")
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
        small = [d for d in found if not d.column.is_average and d.column.prompts < SMALL]
        if small:
            yield Section(
                f"{model} - {baseline}, fewer than {SMALL} prompts: one-sided tests that do not assume normality",
                ("", "prompts", "p (t)", "p (signed-rank)", "p (sign)"),
                [[d.column.title, str(d.column.prompts), *map(p_value, (d.test.p, d.wilcoxon, d.sign))] for d in small],
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


def _markdown_table(part: Section) -> str:
    rows = [part.header, ["---"] * len(part.header), *part.rows]
    return "\n".join("| " + " | ".join(_escaped(cell.strip()) for cell in row) + " |" for row in rows)


def _escaped(value: str) -> str:
    return shown(value, width=None).replace("|", "\\|").replace("<", "&lt;")


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


def _csv_row(found: Difference, comparison: Comparison) -> dict[str, Any]:
    column, test = found.column, found.test
    row: dict[str, Any] = {"model": found.model, "baseline": found.baseline, "benchmark": column.name}
    row |= {"group": column.group, "prompts": column.prompts, "prompts left out": column.left_out}
    for which, name in (("model", found.model), ("baseline", found.baseline)):
        row |= {f"{which} accuracy": column.accuracy[name].mean, f"{which} std": column.accuracy[name].std}
        row |= {f"{which} runs": comparison.runs[name], f"{which} n": comparison.samples[name]}
    row |= {"difference": test.difference, "interval low": found.low, "interval high": found.high}
    row |= {"standard error": test.error, "t": test.t, "degrees of freedom": test.degrees}
    row |= {"p": test.p, "p Holm": found.holm, "p signed-rank": found.wilcoxon, "p sign": found.sign}
    return row | {"better": found.better, "worse": found.worse, "detectable": found.detectable}


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV text; NaN is an empty field."""
    file = io.StringIO()
    write_rows(file, header, ([None if value != value else value for value in row] for row in rows))
    return file.getvalue()
