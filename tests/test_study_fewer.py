"""The test of fewer rollouts: outcomes of curves by hand, paired differences, the target, tables and the figure."""

import math

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from study import fewer, figures, protocol, tables, verdict
from study.data import ControlRow, PointRow, RunRow, Study

ROLLOUTS, CURVE = np.array([0.0, 100.0, 200.0, 300.0, 400.0]), np.array([0.40, 0.44, 0.46, 0.47, 0.48])


def points(test, size, arm, curves, rate=2e-4, tried=""):
    """Rows of points.csv: five policies a run, 100 rollouts apart; curves by seed."""
    run = f"{test}-{size}-{arm}{tried}"
    return [
        PointRow(f"{run}-s{seed}", f"{test}-{size}", arm, 1, seed, rate, step, 100.0 * step, accuracy)
        for seed, curve in curves.items()
        for step, accuracy in enumerate(curve)
    ]


def made_up(test="few"):
    """GRPO's curve on both seeds; one arm with 1 and 3 points more from the first quarter on; one that never moves."""
    above = {21: [0.40, *(CURVE[1:] + 0.01)], 22: [0.40, *(CURVE[1:] + 0.03)]}
    rows = points(test, "n8", "grpo", {21: CURVE, 22: CURVE, 23: CURVE})
    rows += points(test, "n1", "single", above) + points(test, "n2", "auto", {21: [0.4] * 5, 22: [0.4] * 5})
    ends = dict.fromkeys(RunRow._fields, math.nan) | {"experiment": f"{test}-n1", "arm": "single"}
    runs = [RunRow(**(ends | {"seed": seed, "ends_at_once": share})) for seed, share in ((21, 0.001), (22, 0.002))]
    return Study(points=tuple(rows), runs=tuple(runs))


def row_of(table, label):
    return next(row for row in table.rows if row[0] == label)


def test_outcomes_of_a_curve():
    assert fewer.at(ROLLOUTS, CURVE, 0.5) == pytest.approx(0.46)
    assert fewer.at(ROLLOUTS, CURVE, 0.375) == pytest.approx(0.45)  # half-way between two points
    assert fewer.area(ROLLOUTS, CURVE) == pytest.approx((0.42 + 0.45 + 0.465 + 0.475) / 4)
    assert list(fewer.OUTCOMES) == ["1/4", "1/2", "3/4", "all", "area"]
    found = [outcome(ROLLOUTS, CURVE) for outcome in fewer.OUTCOMES.values()]
    assert found == pytest.approx([0.44, 0.46, 0.47, 0.48, 0.4525])


def test_arms_are_compared_after_as_many_rollouts_with_holms_correction():
    found = fewer.against_target(fewer.curves(made_up(), "few"), fewer.HALF)
    test, corrected = found[fewer.Arm("n1", "single")]
    # 1 and 3 points: mean 2, standard error 1, t = 2 with one degree of freedom, p = 1 - (2 / pi) atan(2) = 0.2952
    assert (test.n, test.mean, test.error) == (2, pytest.approx(0.02), pytest.approx(0.01))
    assert test.p == pytest.approx(0.2952, abs=5e-5)
    assert corrected == pytest.approx(2 * test.p)
    test, corrected = found[fewer.Arm("n2", "auto")]
    assert test.mean == pytest.approx(-0.06)
    assert test.p == 0.5  # no variance: both signs of two
    assert corrected == pytest.approx(2 * 0.2952, abs=1e-4)  # not below that of the smaller one
    assert fewer.against_final(fewer.curves(made_up(), "few"), fewer.Arm("n1", "single")).mean == pytest.approx(0.0)


def test_rollouts_until_the_final_accuracy_of_grpo():
    found = fewer.curves(made_up(), "few")
    # The arm's mean curve is at 0.46 after 100 and at 0.48 after 200 rollouts; GRPO's is at 0.48 after 400.
    # On seed 21 alone it takes 300; on seed 22 it is at 0.47 after 100 and at 0.49 after 200.
    needed = fewer.reached(found, fewer.Arm("n1", "single"))
    assert (needed.n, needed.share) == (2, pytest.approx(200 / 400))
    assert (needed.low, needed.high) == (pytest.approx(150 / 400), pytest.approx(300 / 400))
    assert fewer.reached(found, fewer.TARGET).share == 1
    assert fewer.reached(found, fewer.Arm("n2", "auto")).share == math.inf


def test_the_tables():
    made = tables.sections(made_up())
    row = row_of(made["few-differences"], "N = 1 - GRPO, N = 8")
    assert row[:3] == ["N = 1 - GRPO, N = 8", "2", "+2.00 ± 1.00 (0.5903)"]
    # the area: 1 and 3 points times 7/8, as the first quarter starts at 0; t_0.975 with one degree of freedom is 12.706
    assert (row[6][:5], row[7]) == ("+1.75", "-10.71 to +14.71")
    row = row_of(made["few-target"], "N = 1")
    assert row[:3] == ["N = 1", "2", "10.00 ± 1.00"]
    assert row[3:] == ["+0.00 ± 1.00", "-12.71 to +12.71", "0.50", "0.38 to 0.75", "0.2"]
    assert row_of(made["few-target"], "GRPO, N = 8")[-1] == "-"
    assert row_of(made["few-target"], "auto, N = 2")[5] == "not reached"
    assert row_of(made["few-target"], "GRPO, N = 8")[1] == "3"
    assert not {"chain-differences", "control-few-target"} & made.keys()


def test_the_control_ends_at_once_as_its_own_trainings_do():
    rows = points("control-few", "n8", "grpo", {21: CURVE, 22: CURVE})
    rows += points("control-few", "n1", "single", {21: CURVE, 22: CURVE})
    trained = [("few-n1", "single", 21, 0, 0.001), ("few-n1", "single", 22, 0, 0.003), ("few-n1", "single", 22, 1, 0.5)]
    control = [ControlRow(of, arm, 1, seed, 2e-4, least, 0.4, 0.4, 0.4, end) for of, arm, seed, least, end in trained]
    made = tables.sections(Study(points=tuple(rows), control=tuple(control)))["control-few-target"]
    assert row_of(made, "N = 1")[-1] == "0.3"
    assert row_of(made, "GRPO, N = 8")[-1] == "-"


def test_what_a_question_compares():
    level = {"single": 0.45, "single-hidden": 0.46, "drawn": 0.48, "drawn-exact": 0.5}
    rows = [row for arm, to in level.items() for row in points("few", "n1", arm, {21: [0.4, to], 22: [0.4, to + 0.01]})]
    made = tables.sections(Study(points=tuple(rows)))["few-differences"]
    asked = [row[0] for row in made.rows if row[1] == "2"]
    assert asked == [
        "N = 1, predicted - N = 1", "N = 1, predicted, drawn - N = 1, predicted", "N = 1, drawn by the exact p - N = 1"
    ]  # fmt: skip
    assert [row[5][:5] for row in made.rows if row[1] == "2"] == ["+1.00", "+2.00", "+5.00"]


def test_learning_rates_by_the_last_policy():
    rows = points("pilot-few", "n1", "single", {111: [0.4, 0.5], 112: [0.4, 0.52]}, 1e-4, "-lr0.0001")
    rows += points("pilot-few", "n1", "single", {111: [0.4, 0.49]}, 2e-4, "-lr0.0002")
    made = tables.sections(Study(points=tuple(rows)))["few-rates"]
    assert made.rows == [["N = 1", "0.0001", "2", "51.00"], ["N = 1", "0.0002", "1", "49.00"]]


def test_the_verdict_has_a_line_for_each_arm():
    auto, single = verdict.verdict(made_up())
    assert auto.startswith(
        "Fewer rollouts: auto, N = 2 - GRPO, N = 8, after half of the rollouts -6.00 ± 0.00 points (n"
    )
    assert "p (Holm) 0.5903: no difference shown (detectable: " in single
    assert single.endswith("); to the latter's end +0.00 ± 1.00.")


def test_the_figure_is_drawn_where_there_is_something_to_compare(tmp_path):
    assert [path.name for path in figures.draw(made_up("chain"), tmp_path)] == ["study_chain.png"]
    alone = Study(points=tuple(points("few", "n8", "grpo", {21: CURVE})))
    assert figures.draw(alone, tmp_path) == []
    assert "few-target" not in tables.build(alone)


@pytest.mark.parametrize("test", ["few", "chain"])
def test_the_arms_are_those_of_the_protocol(test):
    of_protocol = {
        fewer.Arm(run.experiment.removeprefix(f"{test}-"), run.arm)
        for run in protocol.load("fewer").runs
        if run.experiment.startswith(f"{test}-")
    }
    of_control = {fewer.Arm("n1", name) for name in ("drawn-exact", "no-history", "group-norm")}
    assert of_protocol == fewer.LABELS.keys() - of_control
