"""The test of fewer rollouts: does an arm reach the accuracy of GRPO at N = 8 with half of its rollouts?

All arms generate as many rollouts. Accuracies are those of policies saved on the way (points.csv).

Axes: E points of a curve, the first before training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from openrlhf_dbb.evaluation.formats import p_value
from openrlhf_dbb.evaluation.statistics import ALPHA, POWER, holm
from study import analysis
from study.analysis import Paired
from study.cells import (
    PLUS_MINUS,
    Table,
    concluded,
    detectable,
    difference,
    interval,
    percent,
    rollouts_needed,
)
from study.data import CONTROL_OF, FEWER_ARMS, Floats, Study


class Arm(NamedTuple):
    """An arm of the test: the end of its experiment's name, and its name there."""

    size: str
    name: str


TARGET = Arm("n8", "grpo")
LABELS = {
    TARGET: "GRPO, N = 8",
    Arm("n8-steps", "grpo"): "GRPO, N = 8, 4 x the updates",
    Arm("n2", "auto"): "auto, N = 2",
    **{Arm("n1", name): label for name, label in FEWER_ARMS.items()},
    Arm("n1", "drawn-exact"): "N = 1, drawn by the exact p",
    Arm("n1", "no-history"): "N = 1, no history",
    Arm("n1", "group-norm"): "N = 1, the form of GRPO",
}
"""Printed names of all arms, in the order of tables and figures. Updates are optimizer steps."""
QUESTIONS = (
    (Arm("n1", "single-hidden"), Arm("n1", "single")),  # the prior
    (Arm("n1", "drawn"), Arm("n1", "single-hidden")),  # the draw
    (Arm("n1", "drawn-weighted"), Arm("n1", "single-hidden")),  # the draw
    (Arm("n1", "drawn-exact"), Arm("n1", "single")),  # the draw
    (Arm("n1", "no-history"), Arm("n1", "single")),  # the history
    (Arm("n1", "group-norm"), Arm("n1", "single")),  # the form
)
"""Further differences: first and second arm."""
TESTS = {
    "few": "Fewer rollouts",
    "chain": "Fewer rollouts, the task with steps",
    f"{CONTROL_OF}few": "Fewer rollouts, the control",
}
"""Beginnings of the experiments' names, and titles."""

Curves = dict[int, tuple[Floats, Floats]]
"""Rollouts and accuracy, both (E,), by seed."""
Outcome = Callable[[Floats, Floats], float]


def at(rollouts_E: Floats, accuracy_E: Floats, share: float) -> float:
    """Accuracy after a share of the rollouts, on straight lines between the points."""
    return float(np.interp(share * rollouts_E[-1], rollouts_E, accuracy_E))


def area(rollouts_E: Floats, accuracy_E: Floats) -> float:
    """Mean accuracy over the rollouts: the area below the curve, over its width."""
    return float(np.diff(rollouts_E) @ (accuracy_E[1:] + accuracy_E[:-1]) / 2 / rollouts_E[-1])


HALF = partial(at, share=0.5)
OUTCOMES: dict[str, Outcome] = {
    "1/4": partial(at, share=0.25),
    "1/2": HALF,
    "3/4": partial(at, share=0.75),
    "all": partial(at, share=1.0),
    "area": area,
}
"""By column: accuracy after a part of the rollouts, and the area."""


def curves(study: Study, test: str) -> dict[Arm, Curves]:
    """The curves of each arm of a test that has any."""
    found = {arm: study.saved(f"{test}-{arm.size}", arm.name) for arm in LABELS}
    return {arm: each for arm, each in found.items() if each}


def compare(first: Curves, second: Curves, outcome: Outcome) -> Paired:
    """Paired test of an outcome, first - second, over their common seeds."""
    return analysis.paired(*({seed: outcome(*curve) for seed, curve in each.items()} for each in (first, second)))


def against_target(found: dict[Arm, Curves], outcome: Outcome) -> dict[Arm, tuple[Paired, float]]:
    """Each arm - GRPO at N = 8, after as many rollouts: the test, and its p-value with Holm's correction over arms."""
    tests = {arm: compare(each, found.get(TARGET, {}), outcome) for arm, each in found.items() if arm != TARGET}
    corrected = holm([test.p for test in tests.values()])
    return {arm: (test, float(p)) for (arm, test), p in zip(tests.items(), corrected, strict=True)}


def against_final(found: dict[Arm, Curves], arm: Arm) -> Paired:
    """The arm after half of the rollouts - GRPO at N = 8 after all of them."""
    return analysis.paired(
        {seed: HALF(*curve) for seed, curve in found[arm].items()},
        {seed: float(curve[1][-1]) for seed, curve in found.get(TARGET, {}).items()},
    )


def reached(found: dict[Arm, Curves], arm: Arm) -> analysis.Share | None:
    """Rollouts that an arm needs for the final accuracy of GRPO at N = 8, as a share of GRPO's."""
    return analysis.share_needed(found[arm], found.get(TARGET, {}))


def makers() -> dict[str, Callable[[Study], Table]]:
    """All tables of the test, by name."""
    made: dict[str, Callable[[Study], Table]] = {}
    for test in TESTS:
        made[f"{test}-differences"] = partial(_differences, test=test)
        made[f"{test}-target"] = partial(_target, test=test)
    return made | {"few-rates": partial(_rates, test="few"), "chain-rates": partial(_rates, test="chain")}


def verdict(study: Study) -> Iterator[str]:
    """One line for each arm of each test."""
    for test, title in TESTS.items():
        found = curves(study, test)
        for arm, (tested, corrected) in against_target(found, HALF).items():
            if tested.n < 2:
                continue
            yield (
                f"{title}: {LABELS[arm]} - {LABELS[TARGET]}, after half of the rollouts {difference(tested)} points "
                f"({concluded(tested, corrected)}); to the latter's end {difference(against_final(found, arm))}."
            )


def _differences(study: Study, test: str) -> Table:
    found = curves(study, test)
    tests = {name: against_target(found, outcome) for name, outcome in OUTCOMES.items()}
    rows = [
        [f"{LABELS[arm]} - {LABELS[TARGET]}", *_row({name: each[arm] for name, each in tests.items()})]
        for arm in found
        if arm != TARGET
    ]
    asked = [pair for pair in QUESTIONS if found.keys() >= set(pair)]
    pairs = {name: [compare(found[a], found[b], outcome) for a, b in asked] for name, outcome in OUTCOMES.items()}
    corrected = {name: holm([pair.p for pair in each]) for name, each in pairs.items()}
    for place, (first, second) in enumerate(asked):
        both = {name: (each[place], float(corrected[name][place])) for name, each in pairs.items()}
        rows.append([f"{LABELS[first]} - {LABELS[second]}", *_row(both)])
    header = ("difference", "n", *OUTCOMES, "at 1/2: 95 % interval", "detectable")
    note = (
        f"Accuracy in percentage points, mean {PLUS_MINUS} standard error over n seeds, paired; after a quarter, half, "
        "three quarters and all of the rollouts, and its mean over them (area). In brackets p: two-sided paired "
        "t-tests, Holm over the arms compared with GRPO at N = 8, and over the other differences. Detectable: the true "
        f"difference that gives p < {ALPHA:g}, uncorrected, with probability {POWER:g}."
    )
    return Table(f"{TESTS[test]}: after as many rollouts", header, rows if len(found) > 1 else [], note)


def _row(tests: dict[str, tuple[Paired, float]]) -> list[str]:
    half, _ = tests["1/2"]
    cells = [f"{difference(each)} ({p_value(p)})" if each.n > 1 else difference(each) for each, p in tests.values()]
    return [str(half.n), *cells, interval(half), detectable(half)]


def _target(study: Study, test: str) -> Table:
    found = curves(study, test)
    rows = []
    for arm, each in found.items():
        gain = [at(*curve, share=1.0) - float(curve[1][0]) for curve in each.values()]
        row = [LABELS[arm], str(len(each)), percent(*analysis.mean_and_error(gain))]
        half, needed = against_final(found, arm), reached(found, arm)
        row += [difference(half), interval(half)]
        ends = _ends_at_once(study, test, arm)
        most = f"{100 * max(ends):.2g}" if ends else "-"
        rows.append([*row, *rollouts_needed(needed), most])
    header = (
        "arm", "n", "gain", "1/2 vs. target", "95 % interval", "share of rollouts", "95 % interval",
        "ends at once, most %",
    )  # fmt: skip
    note = (
        "Gain: accuracy after all rollouts less that before training, in percentage points. Target: the same seed's "
        "GRPO at N = 8 after all rollouts; compared with the arm after half as many. Share of rollouts: where the "
        "arm's mean curve first reaches GRPO's mean final accuracy, over where GRPO's own mean curve does; bootstrap "
        f"over seeds, {analysis.DRAWS:,} draws. Ends at once: probability that the trained policy's first token is the "
        "end token, on the seed where it is largest."
    )
    return Table(f"{TESTS[test]}: the final accuracy of GRPO at N = 8", header, rows if len(found) > 1 else [], note)


def _ends_at_once(study: Study, test: str, arm: Arm) -> list[float]:
    """Of the trained policies, one for each seed."""
    experiment = f"{test}-{arm.size}"
    if not test.startswith(CONTROL_OF):
        return list(study.outcome(experiment, arm.name, "ends_at_once").values())
    of = experiment.removeprefix(CONTROL_OF)
    rows = [row for row in study.control if (row.experiment, row.arm) == (of, arm.name)]
    return [row.ends_at_once for row in rows if row.shortest == 0]


def _rates(study: Study, test: str) -> Table:
    rows = []
    for arm, label in LABELS.items():
        runs = study.at_end(f"pilot-{test}-{arm.size}", arm.name)
        for rate, values in runs.items():
            rows.append([label, f"{rate:g}", str(len(values)), percent(float(np.mean(values)), math.nan)])
    note = "Mean accuracy after all rollouts over n seeds, which nothing else uses and which differ widely."
    return Table(f"{TESTS[test]}: learning rates tried", ("arm", "learning rate", "n", "accuracy %"), rows, note)
