"""The results in words, one line per main comparison."""

from __future__ import annotations

from collections.abc import Iterator

from study import analysis, fewer
from study.cells import concluded, difference, plain_difference
from study.data import ARMS, EXPERIMENTS, Study

REPEATED = {"long-n2": range(4, 9)}
"""Experiments to which seeds were added after a look at the first ones; the added seeds, also tested alone."""


def verdict(study: Study) -> list[str]:
    """What the study found, one line per main comparison, with its n."""
    return [*_accuracy(study), *fewer.verdict(study), *_gradients(study), *_errors(study)]


def repeated_title(experiment: str) -> str:
    """Of the added seeds of an experiment."""
    seeds = REPEATED[experiment]
    return f"{EXPERIMENTS[experiment]}, seeds {seeds[0]} to {seeds[-1]} alone"


def _accuracy(study: Study) -> Iterator[str]:
    added = {name: study.of_seeds(seeds) for name, seeds in REPEATED.items()}
    parts = [(study, experiment, title) for experiment, title in EXPERIMENTS.items()]
    parts += [(part, name, repeated_title(name)) for name, part in added.items()]
    for part, experiment, title in parts:
        looked = part is study and experiment in added and added[experiment].arms(experiment)
        note = "; p does not allow for the look before seeds were added" if looked else ""
        for (arm, baseline), (test, corrected) in analysis.contrasts(part, experiment, "accuracy").items():
            if (arm, baseline) in analysis.PRIMARY:
                found = f"{difference(test)} points ({concluded(test, corrected)}{note})"
                yield f"{title}: {ARMS[arm]} - {ARMS[baseline]} {found}."


def _gradients(study: Study) -> Iterator[str]:
    for n in study.rollouts_of_gradients():
        found = analysis.alignments(study, n)
        if "dbb_0.5" in found and found["dbb_0.5"].minus_point.n:
            test = found["dbb_0.5"].minus_point
            yield (
                f"Gradients at a frozen policy, N = {n}: cosine {found['point'].cosine:.3f} with point, "
                f"{found['dbb_0.5'].cosine:.3f} with DBB 0.5 ({plain_difference(test)}, n = {test.n} batches)."
            )


def _errors(study: Study) -> Iterator[str]:
    for n in study.rollouts_of_errors():
        curves = analysis.errors(study, n)
        if "dbb" in curves:
            least = analysis.best(curves["dbb"])
            runs = "1 run" if least.n == 1 else f"{least.n} runs"
            yield (
                f"MSE of the estimates, N = {n}: DBB at its best discount {least.discount:g} has {least.ratio:.2f} "
                f"times that of point (n = {runs} with probes)."
            )
