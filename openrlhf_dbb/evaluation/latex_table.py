r"""A comparison in LaTeX, like the paper's Table 1: models by benchmark, then differences with their p-values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from openrlhf_dbb.evaluation.comparison_tables import measure_name
from openrlhf_dbb.evaluation.differences import AVERAGE, Column, Comparison, Difference
from openrlhf_dbb.evaluation.formats import p_value, points

_SPECIAL = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def latex(comparison: Comparison) -> str:
    """The table; needs the packages booktabs and graphicx. The best of each column is bold."""
    columns = comparison.columns
    groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table*}[t]",
        r"\centering",
        r"\scriptsize",
        r"\setlength{\tabcolsep}{2pt}",
        rf"\caption{{{_caption(comparison)}}}",
        r"\resizebox{\textwidth}{!}{",
        rf"\begin{{tabular}}{{l{'|'.join('c' * count for _, count in groups)}}}",
        r"\toprule",
        *_group_header(groups),
        _row(["Method", *(AVERAGE if column.is_average else _escaped(column.title) for column in columns)]),
        r"\midrule",
    ]
    best = [max(_mean(column, model) for model in comparison.models) for column in columns]
    for model in comparison.models:
        cells = [_accuracy(column, model, highest) for column, highest in zip(columns, best, strict=True)]
        lines.append(_row([_escaped(model), *cells]))
    lines.append(r"\midrule")
    alone = len({model for model, _ in comparison.pairs}) == 1
    for model, baseline in comparison.pairs:
        label = rf"$\Delta$ {'' if alone else _escaped(model) + ' '}w.r.t.\ {_escaped(baseline)}"
        lines.append(_row([label, *map(_difference, comparison.of((model, baseline)))]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", "}", r"\end{table*}"]) + "\n"


def _group_header(groups: Sequence[tuple[str, int]]) -> Iterator[str]:
    """The names of the groups over their columns; nothing if no group has a name."""
    if not any(group for group, _ in groups):
        return
    cells, rules, first = [""], [], 2
    for place, (group, count) in enumerate(groups):
        line = "|" if place < len(groups) - 1 else ""
        cells.append(rf"\multicolumn{{{count}}}{{c{line}}}{{\textbf{{{_escaped(group)}}}}}")
        rules.append(rf"\cmidrule(lr){{{first}-{first + count - 1}}}")
        first += count
    yield _row(cells)
    yield " ".join(rules)


def _mean(column: Column, model: str) -> float:
    """In percent, rounded as printed, so that all models with the best printed value are bold."""
    return round(100 * column.accuracy[model].mean, 2)


def _accuracy(column: Column, model: str, highest: float) -> str:
    mean, std = _mean(column, model), column.accuracy[model].std
    cell = rf"\textbf{{{mean:.2f}}}" if mean == highest else f"{mean:.2f}"
    return cell if math.isnan(std) else rf"{cell}{{\tiny$\pm${100 * std:.2f}}}"


def _difference(found: Difference) -> str:
    number = points(found.test.difference).replace("-", "$-$")
    p = p_value(found.test.p).replace("<", "$<$")
    return rf"{number}{{\tiny\,({p})}}"


def _caption(comparison: Comparison) -> str:
    runs, samples = set(comparison.runs.values()), set(comparison.samples.values())
    cells = f"{measure_name(comparison)} in \\%"
    if len(runs) == len(samples) == 1:
        run, sample = runs.pop(), samples.pop()
        cells += f" over {run} {'runs' if run > 1 else 'run'} ({run * sample} responses per prompt in total)"
    if max(comparison.runs.values()) > 1:
        cells += r"; cells are mean $\pm$ standard deviation over runs"
    return (
        rf"{cells}. $\Delta$ rows are absolute differences in percentage points with the $p$-value of a one-sided "
        rf"paired $t$-test over prompts ($H_1$: {_hypothesis(comparison)}), not corrected for the number of tests."
    )


def _hypothesis(comparison: Comparison) -> str:
    models, baselines = ({pair[which] for pair in comparison.pairs} for which in (0, 1))
    model = _escaped(models.pop()) if len(models) == 1 else "method"
    return f"{model} $>$ {_escaped(baselines.pop()) if len(baselines) == 1 else 'baseline'}"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _escaped(value: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in value)
