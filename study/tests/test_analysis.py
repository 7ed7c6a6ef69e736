"""The study's statistics, tables and files: values by hand, and the committed tables from the committed rows."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from study import __main__ as command
from study import analysis, draws, measured, tables
from study.rows import COLUMNS, Study

PROMPTS = 2048


def frame(name, made):
    """Rows of a file as a frame; columns that a row does not name are empty."""
    return pd.DataFrame(made).reindex(columns=list(COLUMNS[name]))


def runs(accuracy, experiment="n2", n=2, **more):
    """Rows of runs.csv from accuracies by arm and seed (from 1)."""
    return frame("runs", [
        {"run": f"{experiment}-{arm}-s{seed}", "experiment": experiment, "arm": arm, "n": n, "seed": seed}
        | {"accuracy": value, "learning_rate": 2e-4, "rollouts": 100, "trained": 100} | more
        for arm, values in accuracy.items() for seed, value in enumerate(values, 1)
    ])  # fmt: skip


def epochs(curves, experiment="n2", n=2):
    """Rows of epochs.csv from accuracies by arm and seed."""
    return frame("epochs", [
        {"run": f"{experiment}-{arm}-s{seed}", "experiment": experiment, "arm": arm, "n": n, "seed": seed}
        | {"epoch": epoch, "rollouts": float(epoch * PROMPTS * n), "accuracy": value}
        for (arm, seed), curve in curves.items() for epoch, value in enumerate(curve)
    ])  # fmt: skip


def points(curves):
    """Rows of points.csv, policies 100 rollouts apart, from accuracies by size, arm and seed."""
    return [
        {"run": f"few-{size}-{arm}-s{seed}", "experiment": f"few-{size}", "arm": arm, "n": 1, "seed": seed}
        | {"learning_rate": 2e-4, "step": step, "rollouts": 100.0 * step, "accuracy": value}
        for (size, arm, seed), curve in curves.items() for step, value in enumerate(curve)
    ]  # fmt: skip


def row_of(table, label):
    return next(row for row in table.rows if label in row[:2])


def test_a_test_over_strata_by_hand():
    first_part = pd.Series([0.52, 0.54]), pd.Series([0.50, 0.52])  # differ by 0.02
    second_part = pd.Series([0.60, 0.62]), pd.Series([0.54, 0.56])  # by 0.06
    arms = [*first_part, *second_part]
    test = analysis.stratified([first_part, second_part], arms)
    # Each arm's two runs lie 0.01 from their mean: deviation^2 = 8 * 0.01^2 / 4 degrees of freedom.
    # Each difference has variance deviation^2 (1/2 + 1/2), the mean of the two a half of that.
    assert (test.runs, test.mean) == ("2, 2 and 2, 2", pytest.approx(0.04))
    assert test.error == pytest.approx(0.01)
    # The 97.5 % point of t, 4 degrees
    assert test.high - test.mean == pytest.approx(2.7764 * 0.01, abs=1e-6)


def test_a_paired_test_by_hand():
    first, second = (
        pd.Series({1: 0.51, 2: 0.53, 3: 0.55, 9: 0.9}),
        pd.Series({1: 0.50, 2: 0.51, 3: 0.52, 8: 0.1}),
    )
    test = analysis.paired(first, second)
    # Seeds 8 and 9 are unpaired; the differences are 0.01, 0.02, 0.03.
    assert (test.n, test.mean, test.error) == pytest.approx((3, 0.02, 0.01 / math.sqrt(3)))
    assert test.p == pytest.approx(0.0742, abs=5e-5)  # t = 3.464, 2 degrees of freedom
    half = 4.3027 * 0.01 / math.sqrt(3)  # the 97.5 % point of t with 2 degrees of freedom
    assert (test.low, test.high) == pytest.approx((0.02 - half, 0.02 + half), rel=1e-4)


def test_arms_of_one_model_are_compared_by_the_deviation_within_all_arms():
    study = Study.of(
        runs=runs({"grpo": [0.50, 0.54], "dbb": [0.60, 0.62, 0.64], "auto": [0.3, 0.3]}, "lcm")
    )
    test = analysis.compare(
        study, ("lcm", "dbb"), ("lcm", "grpo"), lambda *arm: study.outcome(*arm, "accuracy")
    )
    # Squares of 0.0008, 0.0008 and 0 over 1 + 2 + 1 degrees of freedom: the deviation is 0.02.
    assert (test.runs, test.mean, test.error) == (
        "3, 2",
        pytest.approx(0.1),
        pytest.approx(0.02 * math.sqrt(5 / 6)),
    )
    low, detectable = (
        0.1 - 2.7764 * test.error,
        (2.7764 + 0.9410) * test.error,
    )  # points of t: 97.5 %, 80 %
    # T is 5.477
    assert (test.low, test.p, test.detectable) == pytest.approx(
        (low, 0.00541, detectable), rel=1e-3
    )


def test_holm_is_within_each_family_of_contrasts():
    # dbb - GRPO: 1, 2, 3 points, p 0.0742. auto - GRPO: 0, 2, 3 points, t 1.890, p 0.1994. auto - DBB: p 0.4226.
    study = Study.of(
        runs=runs({"grpo": [0.50] * 3, "dbb": [0.51, 0.52, 0.53], "auto": [0.50, 0.52, 0.53]})
    )
    tests = analysis.contrasts(study, "n2", "accuracy")
    assert list(tests) == [("dbb", "grpo"), ("auto", "grpo"), ("auto", "dbb")]
    corrected = [p for _, p in tests.values()]
    assert corrected == pytest.approx([2 * 0.0742, 0.1994, 0.4226], abs=1e-4)


def test_the_mean_over_epochs_excludes_the_start_and_runs_that_miss_an_evaluation():
    curves = {("grpo", 1): [0.1, 0.4, 0.6], ("dbb", 1): [0.1, math.nan, 0.6]}
    study = Study.of(runs=runs({"grpo": [0.6], "dbb": [0.6]}), epochs=epochs(curves))
    assert study.outcome("n2", "grpo", "mean_accuracy").to_dict() == {1: pytest.approx(0.5)}
    assert study.outcome("n2", "dbb", "mean_accuracy").empty


def test_an_arm_with_more_epochs_is_compared_at_the_same_evaluations():
    curves = {("grpo", 1): [0.1, 0.4, 0.6], ("single", 1): [0.1, math.nan, 0.2, math.nan, 0.8]}
    study = Study.of(epochs=epochs(curves).assign(entropy=lambda rows: rows.epoch.astype(float)))
    # Single rollouts take two epochs to GRPO's one: evaluations 2 and 4, entropies 1 to 4.
    for arm, accuracy, entropy in (
        ("grpo", (0.4 + 0.6) / 2, 1.5),
        ("single", (0.2 + 0.8) / 2, 2.5),
    ):
        outcomes = [
            study.outcome("n2", arm, name).to_dict() for name in ("mean_accuracy", "mean_entropy")
        ]
        assert outcomes == [{1: pytest.approx(accuracy)}, {1: pytest.approx(entropy)}]


@pytest.mark.parametrize(
    ("target", "rollouts"), [(0.525, 5120), (0.52, 4096), (0.45, 0), (0.56, math.inf)]
)
def test_rollouts_needed_by_hand(target, rollouts):
    rollouts_E, accuracy_E = (
        np.array([0, 2048, 4096, 6144, 8192.0]),
        np.array([0.47, 0.5, 0.52, 0.53, 0.55]),
    )
    assert analysis.rollouts_needed(rollouts_E, accuracy_E, target) == pytest.approx(rollouts)


def test_the_share_of_rollouts_compares_mean_curves_by_one_rule():
    # GRPO's mean rises by 9 points to 0.55 in 4 parts; the arm's rises by 18, so it has risen as much after half.
    target = {seed: (np.arange(5.0), np.linspace(0.46, 0.52 + 0.02 * seed, 5)) for seed in (1, 2)}
    share = analysis.share_needed(
        {seed: (np.arange(5.0), np.linspace(0.46, 0.64, 5)) for seed in (1, 2)}, target
    )
    assert (share.n, share.share) == (2, pytest.approx(0.5))
    assert (share.low, share.high) == pytest.approx((8 / 18, 10 / 18))  # of one seed alone
    never = analysis.share_needed(
        {seed: (np.arange(5.0), np.linspace(0.46, 0.54, 5)) for seed in (1, 2)}, target
    )
    assert (never.share, never.high) == (math.inf, math.inf)
    assert analysis.share_needed({3: target[1]}, target) is None


def test_arms_are_compared_where_the_faster_one_ends():
    timed = runs({"grpo": [0.6], "dbb": [0.8]}).assign(seconds=[100.0, 150.0])
    study = Study.of(
        runs=timed, epochs=epochs({("grpo", 1): [0.2, 0.5, 0.6], ("dbb", 1): [0.2, 0.4, 0.8]})
    )
    found = [of.to_dict() for of in analysis.at_equal_seconds(study, ("n2", "dbb"), ("n2", "grpo"))]
    assert found == [
        {1: pytest.approx(0.4 + 0.4 / 3)},
        {1: 0.6},
    ]  # dbb is a third of the way from 75 to 150 s


def test_errors_of_estimates_by_task_by_hand():
    made = pd.concat(
        [runs({"grpo": [0.5]}, "pairs", 8), runs({"grpo": [0.5] * 2}, "probed-lcm", 8)]
    )
    errors = {
        "point": (1, 1, 1),
        "dbb": (math.exp(-1), math.exp(-2), math.exp(-4)),
        "auto": (0.5, 0.5, 0.5),
    }
    mse = [
        {"run": run, "n": 8, "seed": 1, "estimator": name, "mse": of_run[at], "mse_point": 1}
        | ({"discount": 0.5} if name == "dbb" else {})
        for at, run in enumerate(made.run) for name, of_run in errors.items()
    ]  # fmt: skip
    mse += [row | {"seed": 3, "mse": 9} for row in mse]  # a seed that the protocol does not compare
    study = Study.of(runs=made, mse=frame("mse", mse))
    test, _ = analysis.errors_tested(study)[8, "dbb"]
    # The tasks have -1 and (-2 - 4) / 2: t = -2 with one degree of freedom, whose p is 1 - (2 / pi) arctan 2.
    assert (test.n, test.mean, test.p) == pytest.approx((2, -2, 1 - 2 / math.pi * math.atan(2)))
    assert analysis.by_task(study).task.unique().tolist() == ["pairs", "lcm"]


# Right, right, wrong, wrong among 4 of 8, over right, wrong among 2, squared.
SOLVED_IN_HALF = 144 / 1680 / (16 / 56) ** 2


@pytest.mark.parametrize(
    ("successes", "lift"), [([4, 4], SOLVED_IN_HALF), ([4, 0, 0, 8], 4 * SOLVED_IN_HALF)]
)
def test_the_lift_is_the_mean_square_of_p_times_1_minus_p_over_its_squared_mean(successes, lift):
    assert draws.lift(np.array(successes), 8) == pytest.approx(lift)


def test_the_share_is_of_the_rollouts_with_which_even_draws_make_nine_tenths_of_their_gain():
    rollouts = np.array([0.0, 100, 200])
    even = {
        seed: (rollouts, np.array([0.1, 0.2, 0.3])) for seed in (1, 2)
    }  # 0.28 after 180 rollouts
    twice = {seed: (rollouts, np.array([0.1, 0.3, 0.3])) for seed in (6, 7, 8)}  # after 90
    never = {6: (rollouts, np.array([0.1, 0.2, 0.27]))}
    assert draws.share(twice, even) == pytest.approx((0.5, 0.5, 0.5))
    assert draws.share(never, even) == (np.inf,) * 3


def test_the_oracle_keeps_the_rates_of_the_first_group():
    estimator = measured.FirstGroup()
    state = estimator.initial_state(2)
    for rewards in ([[1, 1, 0, 0], [0, 0, 0, np.nan]], [[0, 0, 0, 0], [1, 1, 1, 1]]):
        state |= estimator.update(state, np.array(rewards, float))
    alpha, beta = estimator.predictive(state)
    assert alpha == pytest.approx([0.1 + 2, 0.1])
    assert beta == pytest.approx([0.9 + 2, 0.9 + 3])


CURVE = [0.40, 0.44, 0.46, 0.47, 0.48]
ABOVE = {
    21: [0.40, *(value + 0.01 for value in CURVE[1:])],
    22: [0.40, *(value + 0.03 for value in CURVE[1:])],
}


def test_the_test_of_fewer_rollouts_by_hand():
    curves = {("n8", "grpo", seed): CURVE for seed in (21, 22, 23)}
    curves |= {("n1", "single", seed): curve for seed, curve in ABOVE.items()}
    made = tables.tables(Study.of(points=pd.DataFrame(points(curves))))
    row = row_of(made["few-differences"], "N = 1 - GRPO, N = 8")
    # 1 and 3 points: mean 2, standard error 1, t = 2 with one degree of freedom, p = 1 - (2 / pi) atan(2) = 0.2952.
    assert row[:3] == ["N = 1 - GRPO, N = 8", "2", "+2.00 ± 1.00 (0.2952)"]
    assert row[6][:5] == "+1.75"  # the area: 2 points times 7/8, as the first quarter starts at 0
    # The arm's mean curve is at 0.48 after 200 rollouts, on single seeds after 300 and 150; GRPO's after 400.
    row = row_of(made["few-target"], "N = 1")
    assert row == [
        "N = 1",
        "2",
        "40.0",
        "10.00 ± 1.00",
        "+0.00 ± 1.00",
        "-12.71 to +12.71",
        "0.50",
        "0.38 to 0.75",
    ]


def test_the_committed_tables_follow_from_the_committed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda _, path, **__: Path(path).touch())  # seconds each
    shown = {path.name for path in command.FIGURES.glob("*.png")}
    monkeypatch.setattr(command, "FIGURES", tmp_path)
    monkeypatch.setattr(command, "TABLES", tmp_path)
    assert command.main(["draw"]) == 0
    for name in ("draws", "main", "real", "paper", "rare", "returns", "spend"):
        committed = command.RESULTS / name / "tables.md"
        assert (tmp_path / name / "tables.md").read_text() == committed.read_text(), (
            "run python -m study draw"
        )
    assert {path.name for path in tmp_path.glob("*.png")} <= shown
