"""What several evaluations share: the same benchmarks, prompt by prompt; differences are refused or noted.

Axes: R evaluation runs (seeds), P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.results import Evaluation, Results

_NOTABLE_MISSING = 0.01
_SETTINGS = {
    "n": "samples per prompt differ (Best@n and majority@n grow with n; accuracy does not)",
    "runs": "runs differ",
    "sampling": "sampling differs",
}
_SETTINGS_OF_BENCHMARK = {"verifier": "verifiers differ", "max_new_tokens": "limits on response length differ"}


@dataclass(frozen=True)
class Shared:
    """A benchmark of all evaluations, restricted to the prompts of which each has a verified sample.

    Attributes:
        benchmark: its name.
        title: as in tables.
        group: benchmarks that are averaged together; may be empty.
        results: of each evaluation, in their order; all have the same P prompts.
        left_out: prompts of which some evaluation has no verified sample.
    """

    benchmark: str
    title: str
    group: str
    results: list[Results]
    left_out: int

    @property
    def prompts(self) -> int:
        return len(self.results[0].ids)


def shared(evaluations: Sequence[Evaluation], chosen: Sequence[str] | None = None) -> list[Shared]:
    """The benchmarks to compare on.

    Args:
        evaluations: two or more.
        chosen: names of benchmarks; None for all that every evaluation has.

    Raises:
        UsageError: there is none, a chosen one is missing in an evaluation, or evaluations of a benchmark differ in
                their prompts.
    """
    everywhere = [name for name in evaluations[0].results if all(name in other.results for other in evaluations)]
    absent = [name for name in chosen or () if name not in everywhere]
    if absent or not everywhere:
        has = "; ".join(f"{evaluation.name} has {', '.join(evaluation.results)}" for evaluation in evaluations)
        what = (
            f"benchmark {absent[0]!r} is not in every evaluation" if absent else "no benchmark is in every evaluation"
        )
        raise UsageError(f"{what}: {has}")
    return [_cut(name, evaluations) for name in everywhere if chosen is None or name in chosen]


def notes(evaluations: Sequence[Evaluation], benchmarks: Sequence[Shared]) -> list[str]:
    """What readers should know before they rely on the numbers."""
    lines = []
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation.results):
        lacking = [evaluation.name for evaluation in evaluations if name not in evaluation.results]
        if lacking:
            lines.append(f"{name} is left out: not in {', '.join(lacking)}")
    for key, what in _SETTINGS.items():
        lines += _differing(what, evaluations, [evaluation.manifest.get(key) for evaluation in evaluations])
    for benchmark in benchmarks:
        about = [evaluation.about(benchmark.benchmark) for evaluation in evaluations]
        for key, what in _SETTINGS_OF_BENCHMARK.items():
            lines += _differing(f"{benchmark.title}: {what}", evaluations, [each.get(key) for each in about])
        lines += _about_prompts(evaluations, benchmark)
    return lines


def _differing(what: str, evaluations: Sequence[Evaluation], values: Sequence[object]) -> list[str]:
    shown = [json.dumps(value) for value in values]
    if len(set(shown)) == 1:
        return []
    return [f"{what}: " + ", ".join(f"{value} in {each.name}" for each, value in zip(evaluations, shown, strict=True))]


def _about_prompts(evaluations: Sequence[Evaluation], benchmark: Shared) -> list[str]:
    lines = []
    if len({results.prompts_digest for results in benchmark.results}) > 1:
        lines.append(f"{benchmark.title}: models saw different texts (questions, prompt template or chat template)")
    if benchmark.left_out:
        total = benchmark.left_out + benchmark.prompts
        lines.append(
            f"{benchmark.title}: {benchmark.left_out} of {total} prompts left out: some model has no verified sample"
        )
    for evaluation, results in zip(evaluations, benchmark.results, strict=True):
        missing = float(np.isnan(results.scores_R_P_N).mean())
        if missing >= _NOTABLE_MISSING:
            lines.append(f"{benchmark.title}: {missing:.1%} of the samples of {evaluation.name} could not be verified")
    return lines


def _cut(name: str, evaluations: Sequence[Evaluation]) -> Shared:
    first, *others = evaluations
    for other in others:
        for what in ("ids", "labels"):
            _check_same(name, what, first, other)
    results = [evaluation.results[name] for evaluation in evaluations]
    usable_P = np.all([(~np.isnan(each.scores_R_P_N)).any(axis=(0, 2)) for each in results], axis=0)
    if not usable_P.any():
        raise UsageError(f"{name}: no prompt has a verified sample of every model; leave it out with --benchmarks")
    about = first.about(name)
    return Shared(
        benchmark=name,
        title=str(about.get("title", name)),
        group=str(about.get("group", "")),
        results=results if usable_P.all() else [_restricted(each, usable_P) for each in results],
        left_out=int((~usable_P).sum()),
    )


def _check_same(name: str, what: str, first: Evaluation, other: Evaluation) -> None:
    """Refuse different prompts: differences of models and of prompts could not be told apart."""
    mine, theirs = (getattr(evaluation.results[name], what) for evaluation in (first, other))
    if mine == theirs:
        return
    if len(mine) != len(theirs):
        found = f"{len(mine)} prompts in {first.name}, {len(theirs)} in {other.name}"
    else:
        place = next(place for place, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        pair = f"{mine[place]!r} in {first.name}, {theirs[place]!r} in {other.name}"
        found = f"{what} differ, first at prompt {place}: {pair}"
    raise UsageError(f"{name}: {found}; evaluate both on the same data, or choose other benchmarks with --benchmarks")


def _restricted(results: Results, keep_P: NDArray[np.bool_]) -> Results:
    return replace(
        results,
        ids=[value for value, keep in zip(results.ids, keep_P, strict=True) if keep],
        labels=[value for value, keep in zip(results.labels, keep_P, strict=True) if keep],
        scores_R_P_N=results.scores_R_P_N[:, keep_P],
        answers_R_P_N=results.answers_R_P_N[:, keep_P],
        tokens_R_P_N=results.tokens_R_P_N[:, keep_P],
        truncated_R_P_N=results.truncated_R_P_N[:, keep_P],
    )
