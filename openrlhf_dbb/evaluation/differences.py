"""Differences between models on shared benchmarks, with tests and intervals: the content of tables and figures.

Axes: M models, R evaluation runs (seeds), P prompts of a benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.evaluation import metrics
from openrlhf_dbb.evaluation import statistics as st
from openrlhf_dbb.evaluation.alignment import Shared
from openrlhf_dbb.evaluation.metrics import OverRuns, Summary

Floats = NDArray[np.float64]

AVERAGE = "Avg."


@dataclass(frozen=True)
class Column:
    """A benchmark, or the average of a group's benchmarks.

    Attributes:
        name: the benchmark's.
        title: as in tables; for an average "Avg." or "Avg. GROUP", which is also its name.
        group: benchmarks of one group stand together, before their average.
        is_average: of two or more benchmarks, with equal weights.
        prompts: P; for an average, of all its benchmarks.
        left_out: prompts that could not be compared.
        accuracy: Acc@N of each model.
    """

    name: str
    title: str
    group: str
    is_average: bool
    prompts: int
    left_out: int
    accuracy: dict[str, OverRuns]


@dataclass(frozen=True)
class Difference:
    """Acc@N of a model minus that of another one, in [-1, 1].

    Attributes:
        model, baseline: their names.
        column: the benchmark or average.
        low, high: two-sided 95 % interval of the t-test over prompts; NaN for a single prompt.
        test: paired t-test over prompts, H1: the model is better; its ``difference`` is the estimate.
        holm: the test's p, corrected for all tests of benchmarks, or of averages, in the comparison.
        better, worse: prompts on which the model's accuracy is higher, lower.
        detectable: the difference found with probability 0.8.
    """

    model: str
    baseline: str
    column: Column
    low: float
    high: float
    test: st.PairedTest
    holm: float
    better: int
    worse: int
    detectable: float


@dataclass(frozen=True)
class Comparison:
    """Everything that tables and figures show.

    Attributes:
        models: names, in the order given.
        samples: N, by model.
        runs: R, by model.
        columns: benchmarks by group, an average after each group of two or more.
        summaries: of each model on each benchmark.
        pairs: (model, baseline) compared.
        differences: by pair, then column.
        notes: what readers should know before they rely on the numbers.
    """

    models: list[str]
    samples: dict[str, int]
    runs: dict[str, int]
    columns: list[Column]
    summaries: dict[tuple[str, str], Summary]
    pairs: list[tuple[str, str]]
    differences: list[Difference]
    notes: list[str]

    def of(self, pair: tuple[str, str]) -> list[Difference]:
        """The differences of a pair, in the order of ``columns``."""
        return [found for found in self.differences if (found.model, found.baseline) == pair]


@dataclass(frozen=True)
class _Measured:
    """A benchmark's column, and each model's accuracy on every prompt over its runs (P,)."""

    column: Column
    accuracy_P: dict[str, Floats]


def compare_models(
    models: Sequence[str], benchmarks: Sequence[Shared], pairs: Sequence[tuple[str, str]], notes: Sequence[str] = ()
) -> Comparison:
    """Compare models on benchmarks that they share.

    Args:
        models: names, in the order of the results of each benchmark.
        benchmarks: those that all models share.
        pairs: (model, baseline) to compare.
        notes: shown with the comparison.
    """
    groups: dict[str, list[_Measured]] = {}
    summaries: dict[tuple[str, str], Summary] = {}
    for shared in benchmarks:
        own = {model: metrics.summarize(results) for model, results in zip(models, shared.results, strict=True)}
        summaries |= {(model, shared.benchmark): summary for model, summary in own.items()}
        groups.setdefault(shared.group, []).append(_measure(models, shared, own))
    columns: list[Column] = []
    found: list[Difference] = []
    for members in groups.values():
        columns += [member.column for member in members]
        found += [_difference(pair, members=[member], column=member.column) for member in members for pair in pairs]
        if len(members) > 1:
            average = _average(models, members, alone=len(groups) == 1)
            columns.append(average)
            found += [_difference(pair, members=members, column=average) for pair in pairs]
    order = {pair: place for place, pair in enumerate(pairs)}
    found.sort(key=lambda difference: order[difference.model, difference.baseline])  # columns stay in order
    shapes = {model: results.shape for model, results in zip(models, benchmarks[0].results, strict=True)}
    return Comparison(
        models=list(models),
        samples={model: shape[2] for model, shape in shapes.items()},
        runs={model: shape[0] for model, shape in shapes.items()},
        columns=columns,
        summaries=summaries,
        pairs=list(pairs),
        differences=_corrected(found),
        notes=list(notes),
    )


def _measure(models: Sequence[str], shared: Shared, summaries: dict[str, Summary]) -> _Measured:
    accuracies = [metrics.accuracy(results.scores_R_P_N) for results in shared.results]
    column = Column(
        name=shared.benchmark,
        title=shared.title,
        group=shared.group,
        is_average=False,
        prompts=shared.prompts,
        left_out=shared.left_out,
        accuracy={model: summary.accuracy for model, summary in summaries.items()},
    )
    by_prompt = map(st.prompt_means, accuracies)
    return _Measured(column, dict(zip(models, by_prompt, strict=True)))


def _average(models: Sequence[str], members: Sequence[_Measured], *, alone: bool) -> Column:
    columns = [member.column for member in members]
    group = columns[0].group
    title = AVERAGE if alone or not group else f"{AVERAGE} {group}"
    return Column(
        name=title,
        title=title,
        group=group,
        is_average=True,
        prompts=sum(column.prompts for column in columns),
        left_out=sum(column.left_out for column in columns),
        accuracy={model: metrics.macro_average([column.accuracy[model] for column in columns]) for model in models},
    )


def _difference(pair: tuple[str, str], members: Sequence[_Measured], column: Column) -> Difference:
    model, baseline = pair
    differences = [member.accuracy_P[model] - member.accuracy_P[baseline] for member in members]
    test = st.stratified_t(differences)
    low, high = st.t_interval(test)
    return Difference(
        model=model,
        baseline=baseline,
        column=column,
        low=low,
        high=high,
        test=test,
        holm=float("nan"),
        better=sum(int((difference_P > 0).sum()) for difference_P in differences),
        worse=sum(int((difference_P < 0).sum()) for difference_P in differences),
        detectable=st.minimum_detectable(test),
    )


def _corrected(differences: Sequence[Difference]) -> list[Difference]:
    """With Holm's correction, separately over benchmarks and over averages, which repeat what their benchmarks say."""
    corrected = list(differences)
    for is_average in (False, True):
        places = [place for place, found in enumerate(corrected) if found.column.is_average == is_average]
        for place, p in zip(places, st.holm([corrected[place].test.p for place in places]), strict=True):
            corrected[place] = replace(corrected[place], holm=float(p))
    return corrected
