"""The test of fewer rollouts: does an arm reach the accuracy of GRPO at N = 8 with half of its rollouts?

All arms generate as many rollouts. Accuracies are those of policies saved on the way (points.csv).

Axes: E points of a curve, the first before training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import p_value
from study import analysis
from study.analysis import ALPHA, POWER, Curves, Difference
from study.cells import PLUS_MINUS, Table, detectable, difference, interval, needed, percent
from study.rows import CONTROL_OF, FEWER_ARMS, Study


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
    # A second task, whose runs this version cannot repeat.
    "chain": "Fewer rollouts, the task with steps (withdrawn: GRPO's learning rate was chosen on weaker starts)",
    f"{CONTROL_OF}few": "Fewer rollouts, the control",
}
"""Beginnings of the experiments' names, and titles."""

Outcome = Callable[[Floats, Floats], float]


def at(rollouts_E: Floats, accuracy_E: Floats, share: float) -> float:
    """Return the accuracy after a share of the rollouts, on straight lines between the points."""
    return float(np.interp(share * rollouts_E[-1], rollouts_E, accuracy_E))


def area(rollouts_E: Floats, accuracy_E: Floats) -> float:
    """Return the mean accuracy over the rollouts: the area below the curve, over its width."""
    return float(np.trapezoid(accuracy_E, rollouts_E) / rollouts_E[-1])


HALF = partial(at, share=0.5)
OUTCOMES: dict[str, Outcome] = {
    "1/4": partial(at, share=0.25),
    "1/2": HALF,
    "3/4": partial(at, share=0.75),
    "all": partial(at, share=1.0),
    "area": area,
}
"""By column: accuracy after a part of the rollouts, and the area."""


def all_curves(study: Study, test: str) -> dict[Arm, Curves]:
    """Return the curves of each arm of a test that has any."""
    every = {arm: analysis.curves(study.points, f"{test}-{arm.size}", arm.name) for arm in LABELS}
    return {arm: curves for arm, curves in every.items() if curves}


def compare(
    first: Curves, second: Curves, outcome: Outcome, second_outcome: Outcome | None = None
) -> Difference:
    """Test an outcome, first - second, over their common seeds."""
    outcomes = (outcome, second_outcome or outcome)
    return analysis.paired(
        *(pd.Series({seed: one(*curve) for seed, curve in curves.items()}, dtype=float)
          for one, curves in zip(outcomes, (first, second), strict=True))
    )  # fmt: skip


def against_target(
    curves: Mapping[Arm, Curves], outcome: Outcome
) -> dict[Arm, tuple[Difference, float]]:
    """Test each arm against GRPO at N = 8 after as many rollouts, with Holm's correction over the arms."""
    target = curves.get(TARGET, {})
    return analysis.with_holm(
        {arm: compare(mine, target, outcome) for arm, mine in curves.items() if arm != TARGET}
    )


def tables(study: Study) -> dict[str, Table]:
    """Return all tables of the test by name. A table without data has no rows."""
    made = {}
    for test in TESTS:
        curves = all_curves(study, test)
        made[f"{test}-differences"] = _differences(curves, test)
        made[f"{test}-target"] = _target(curves, test)
    return made | {f"{test}-rates": _rates(study, test) for test in ("few", "chain")}


def _differences(curves: Mapping[Arm, Curves], test: str) -> Table:
    tests = {name: against_target(curves, outcome) for name, outcome in OUTCOMES.items()}
    rows = [
        [
            f"{LABELS[arm]} - {LABELS[TARGET]}",
            *_row({name: of_arm[arm] for name, of_arm in tests.items()}),
        ]
        for arm in curves
        if arm != TARGET
    ]
    asked = [pair for pair in QUESTIONS if curves.keys() >= set(pair)]
    answers = {
        name: analysis.with_holm(
            {pair: compare(curves[pair[0]], curves[pair[1]], outcome) for pair in asked}
        )
        for name, outcome in OUTCOMES.items()
    }
    for first, second in asked:
        row = _row({name: of_pair[first, second] for name, of_pair in answers.items()})
        rows.append([f"{LABELS[first]} - {LABELS[second]}", *row])
    header = ("difference", "n", *OUTCOMES, "at 1/2: 95 % interval", "detectable")
    note = (
        f"Accuracy in percentage points, mean {PLUS_MINUS} standard error over n seeds, paired; after a quarter, half, "
        "three quarters and all of the rollouts, and its mean over them (area). In brackets p: two-sided paired "
        "t-tests, Holm over the arms compared with GRPO at N = 8, and over the other differences. Detectable: the true "
        f"difference that gives p < {ALPHA:g}, uncorrected, with probability {POWER:g}."
    )
    return Table(
        f"{TESTS[test]}: after as many rollouts", header, rows if len(curves) > 1 else [], note
    )


def _row(tests: Mapping[str, tuple[Difference, float]]) -> list[str]:
    half, _ = tests["1/2"]
    cells = [
        f"{difference(test)} ({p_value(p)})" if test.n > 1 else difference(test)
        for test, p in tests.values()
    ]
    return [str(half.n), *cells, interval(half), detectable(half)]


def _target(curves: Mapping[Arm, Curves], test: str) -> Table:
    rows = []
    target = curves.get(TARGET, {})
    for arm, mine in curves.items():
        begun = 100 * np.mean([accuracy_E[0] for _, accuracy_E in mine.values()])
        gain = [at(*curve, share=1.0) - float(curve[1][0]) for curve in mine.values()]
        half = compare(mine, target, HALF, OUTCOMES["all"])
        shares = needed(analysis.share_needed(mine, target))
        gained = [f"{begun:.1f}", percent(*analysis.mean_and_error(gain))]
        rows.append(
            [LABELS[arm], str(len(mine)), *gained, difference(half), interval(half), *shares]
        )
    header = (
        "arm",
        "n",
        "before %",
        "gain",
        "1/2 vs. target",
        "95 % interval",
        "share of rollouts",
        "95 % interval",
    )
    note = (
        "Gain: accuracy after all rollouts less that before training, in percentage points. Target: the same seed's "
        "GRPO at N = 8 after all rollouts; compared with the arm after half as many. Share of rollouts: where the "
        "arm's mean curve first reaches GRPO's mean final accuracy, over where GRPO's own mean curve does; bootstrap "
        f"over seeds, {analysis.DRAWS:,} draws."
    )
    return Table(
        f"{TESTS[test]}: the final accuracy of GRPO at N = 8",
        header,
        rows if len(curves) > 1 else [],
        note,
    )


def _rates(study: Study, test: str) -> Table:
    rows = []
    for arm, label in LABELS.items():
        points = study.points
        mine = points[(points.experiment == f"pilot-{test}-{arm.size}") & (points.arm == arm.name)]
        last = mine.sort_values("step").groupby("run").last()
        begun = percent(mine.accuracy[mine.step == 0].mean(), np.nan)
        for rate, part in last.groupby("learning_rate"):
            rows.append(
                [label, f"{rate:g}", str(len(part)), begun, f"{100 * part.accuracy.mean():.2f}"]
            )
    header = ("arm", "learning rate", "n", "before %", "accuracy %")
    note = "Mean accuracy after all rollouts over n seeds, which nothing else uses and which differ widely."
    return Table(f"{TESTS[test]}: learning rates tried", header, rows, note)
