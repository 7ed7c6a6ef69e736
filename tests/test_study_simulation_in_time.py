"""lab simulate --draw: trainings in time, what is measured in them, the table and the command."""

import csv
from dataclasses import dataclass

import numpy as np
import pytest

import estimators
from openrlhf_dbb.lab import specs
from study import simulation_in_time as in_time
from study.__main__ import main
from study.simulate import in_time_table
from study.simulation import Setting
from study.simulation_in_time import MEASURES, Result, Training, measure, training

SETTING = Setting(prompts=50, visits=3, batch=20)  # 3 updates a pass


def test_by_epochs_every_prompt_comes_once_a_pass():
    run = training("jumps", "epoch", 4, SETTING, seed=0)
    assert [len(seen) for seen in run.seen_U] == [20, 20, 10] * 3
    for first in (0, 3, 6):
        assert sorted(np.concatenate(run.seen_U[first : first + 3])) == list(range(50))
    assert [rewards.shape for rewards in run.rewards_U] == [(20, 4), (20, 4), (10, 4)] * 3
    assert (run.p_U_P.shape, run.pass_updates) == ((10, 50), 3)


@pytest.mark.parametrize("drawn", ["uniform", "variance"])
def test_otherwise_prompts_come_at_irregular_times_but_not_twice_in_an_update(drawn):
    run = training("jumps", drawn, 4, SETTING, seed=0)
    assert [len(set(seen)) for seen in run.seen_U] == [20] * 9
    visits = np.bincount(np.concatenate(run.seen_U), minlength=50)
    assert visits.min() < 3 < visits.max()


def test_variance_draws_each_prompt_by_the_chance_that_the_floor_leaves_it():
    # p (1 - p) = 0, 0, 1/4, 1/4: chances 1/4 / 4, and 3/4 / 2 more for the last two
    assert in_time._chances(np.array([0.0, 1.0, 0.5, 0.5])) == pytest.approx([0.0625, 0.0625, 0.4375, 0.4375])
    # where no prompt teaches anything, all have the same
    assert in_time._chances(np.array([0.0, 1.0])) == pytest.approx([0.5, 0.5])


def test_probabilities_change_with_time_whoever_is_visited():
    by_epochs = training("paper-walk", "epoch", 4, SETTING, seed=0)
    at_random = training("paper-walk", "variance", 8, SETTING, seed=0)
    np.testing.assert_array_equal(by_epochs.p_U_P, at_random.p_U_P)
    changed_U_P = np.diff(by_epochs.p_U_P, axis=0) != 0
    for first in (0, 3, 6):  # each prompt once a pass, and not all in the same update
        assert (changed_U_P[first : first + 3].sum(axis=0) == 1).all()
        assert changed_U_P[first : first + 3].any(axis=1).all()


@dataclass(frozen=True)
class Half(estimators.RewardEstimator):
    """Always Beta(1, 1)."""

    name = "half"

    def initial_state(self, num_prompts):
        return {}

    def update(self, state, rewards_P_G):
        return state

    def estimate(self, state, rewards_P_G):
        return estimators.Estimate(np.full(len(rewards_P_G), 0.5), np.full(len(rewards_P_G), 0.25))

    def predictive(self, state):
        return np.ones(2), np.ones(2)


def hand_made():
    """Two prompts, two updates of both; a pass is one update."""
    p_U_P = np.array([[0.5, 0.1], [0.7, 0.3], [0.95, 0.2]])
    rewards = np.array([[1.0, 1.0], [0.0, 1.0]])
    return Training(p_U_P, [np.array([0, 1])] * 2, [rewards, rewards], pass_updates=1)


def test_measures_by_hand():
    found = measure(Half(), hand_made())
    assert found.visits == pytest.approx((0 + 0.16 + 0.04 + 0.04) / 4)
    # at the ends of the passes, of the update that follows: 0.7, 0.3, then 0.95, 0.2
    assert found.forecasts == pytest.approx((0.04 + 0.04 + 0.2025 + 0.09) / 4)
    assert found.spread == pytest.approx(4 / 6 / (0.21 + 0.21 + 0.0475 + 0.16))  # E[p (1 - p)] of Beta(1, 1) is 1/6
    assert found.coverage == 0.75  # 0.95 is outside [0.1, 0.9]
    assert found.log_score == pytest.approx(np.log(1 / 3))  # of 2 rollouts, each S has 1/3


def test_an_estimator_without_forecasts_has_no_measures_of_them():
    found = measure(specs.parse("point"), hand_made())
    assert found.visits == pytest.approx((0.25 + 0.16 + 0.09 + 0.04) / 4)
    assert np.isnan([found.forecasts, found.spread, found.coverage, found.log_score]).all()


def test_forgetting_by_updates_is_told_the_updates_of_a_pass():
    dbb = {name: specs.parse(f"dbb:forgetting={name}") for name in ("visits", "updates")}
    whole = Setting(prompts=50, visits=3, batch=50)
    run = training("paper-walk", "epoch", 4, whole, seed=0)
    by_visits, by_updates = (measure(estimator, run) for estimator in dbb.values())
    assert by_updates.visits == pytest.approx(by_visits.visits, rel=1e-12)


def test_table():
    def result(regime, first, second):
        return Result("uniform", regime, 8, np.array([first, second]).T[:, :, None])

    results = [
        result("a", [2.0, 1.0, 2.0, 0.5, -1.0], [4.0, 2.0, 0.5, 0.7, -1.5]),
        result("b", [1.0, 1.0, 2.0, 0.7, -2.0], [0.5, 4.5, 0.25, 0.9, -2.5]),
    ]
    header, rows = in_time_table(["one", "two"], results)
    assert header == ["draw", "N", "estimator", "visits", "forecasts", "spread", "coverage", "log score"]
    assert rows == [
        ["uniform", 8, "one", "1.000 (1.00)", "1.000 (1.00)", "2.000 (2.00)", "0.600", "-1.5000"],
        # 4/2 and 0.5/1: 1; 2/1 and 4.5/1: 3; sqrt(1/8) and the one furthest from 1
        ["uniform", 8, "two", "1.000 (2.00)", "3.000 (4.50)", "0.354 (0.25)", "0.800", "-2.0000"],
    ]


def test_command(tmp_path, capsys):
    argv = ["simulate", "--draw", "uniform", "epoch", "--regimes", "jumps", "--rollouts", "2", "--prompts", "50"]
    argv += ["--batch", "20", "--seeds", "2", "--seed", "7", "--estimators", "dbb", "point"]
    assert main([*argv, "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["in_time.csv"]
    with open(tmp_path / "in_time.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["draw"], row["estimator"]) for row in rows] == [
        (drawn, label) for drawn in ("uniform", "epoch") for label in ("dbb 0.5", "point")
    ]
    setting = Setting(prompts=50, batch=20)
    runs = [training("jumps", "uniform", 2, setting, seed) for seed in (7, 8)]
    wanted = [measure(specs.parse("dbb"), run) for run in runs]
    for name in MEASURES:
        expected = (getattr(wanted[0], name) + getattr(wanted[1], name)) / 2
        assert float(rows[0][name]) == pytest.approx(expected)
    assert f"{wanted[0].coverage / 2 + wanted[1].coverage / 2:.3f}" in printed
    (row,) = (line.split() for line in printed.splitlines() if line.split()[:3] == ["uniform", "2", "point"])
    assert row[-4:] == ["-"] * 4  # point has no forecasts


def test_unknown_names_are_refused(capsys):
    with pytest.raises(ValueError, match="unknown draw 'often'; known: epoch, uniform, variance"):
        training("jumps", "often", 2, SETTING, seed=0)
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--draw", "often"])
    assert "--draw: invalid choice: 'often'" in capsys.readouterr().err
