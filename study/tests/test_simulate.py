"""Simulated trainings: the draws, the measures by hand, the tables and the command."""

from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.lab.candidates import parse
from study import simulation
from study.__main__ import main
from study.simulation import MEASURES, Setting, Training, measure, simulate, training

SETTING = Setting(prompts=50, visits=3, batch=20)  # 3 updates a pass


@pytest.mark.parametrize("drawn", simulation.DRAWS)
def test_prompts_come_once_a_pass_or_at_irregular_times_but_never_twice_in_an_update(drawn):
    run = training("jumps", drawn, 4, SETTING, seed=0)
    assert [len(set(seen)) for seen in run.seen_U] == [
        len(rewards_B_4) for rewards_B_4 in run.rewards_U
    ]
    if drawn in ("visits", "epoch"):
        assert [rewards.shape for rewards in run.rewards_U] == [(20, 4), (20, 4), (10, 4)] * 3
        passes = [np.concatenate(run.seen_U[first : first + 3]) for first in (0, 3, 6)]
        assert [sorted(of_pass) for of_pass in passes] == [list(range(50))] * 3
    else:
        visits = np.bincount(np.concatenate(run.seen_U), minlength=50)
        assert [rewards.shape for rewards in run.rewards_U] == [(20, 4)] * 9
        assert visits.min() < 3 < visits.max()


@pytest.mark.parametrize("drawn", simulation.DRAWS)
def test_draws_depend_on_the_seed_and_probabilities_do_not_depend_on_n(drawn):
    first, again, wider, other = (
        training("jumps", drawn, n, SETTING, seed) for n, seed in ((8, 5), (8, 5), (16, 5), (8, 6))
    )
    np.testing.assert_array_equal(first.p_U_P, wider.p_U_P)
    for one, two in zip(
        first.rewards_U + first.seen_U, again.rewards_U + again.seen_U, strict=True
    ):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first.p_U_P, other.p_U_P)


def test_probabilities_change_between_passes_or_each_at_its_own_time():
    changed_U_P = np.diff(training("paper-walk", "visits", 4, SETTING, seed=0).p_U_P, axis=0) != 0
    assert changed_U_P.any(axis=1).tolist() == [False, False, True] * 2 + [False, False]
    changed_U_P = np.diff(training("paper-walk", "epoch", 4, SETTING, seed=0).p_U_P, axis=0) != 0
    for first in (0, 3, 6):  # each prompt once a pass, and not all in the same update
        assert (changed_U_P[first : first + 3].sum(axis=0) == 1).all()
        assert changed_U_P[first : first + 3].any(axis=1).all()


def test_variance_draws_each_prompt_by_the_chance_that_the_floor_leaves_it():
    # p (1 - p) = 0, 0, 1/4, 1/4: chances 1/4 / 4, and 3/4 / 2 more for the last two
    assert simulation._chances(np.array([0.0, 1.0, 0.5, 0.5])) == pytest.approx(
        [0.0625, 0.0625, 0.4375, 0.4375]
    )


def hand_made():
    """Two prompts, two updates of both; a pass is one update."""
    p_U_P = np.array([[0.5, 0.1], [0.7, 0.3], [0.95, 0.2]])
    rewards = np.array([[1.0, 1.0], [0.0, 1.0]])
    return Training(p_U_P, [np.array([0, 1])] * 2, [rewards, rewards], pass_updates=1)


def test_measures_by_hand():
    half = estimators.Estimate(np.full(2, 0.5), np.full(2, 0.25))
    always = Mock(
        **{"observe_at.return_value": half, "predictive.return_value": (np.ones(2), np.ones(2))}
    )
    measured = measure(always, hand_made())
    assert measured.visits == pytest.approx((0 + 0.16 + 0.04 + 0.04) / 4)
    # at the ends of the passes, of the update that follows: 0.7, 0.3, then 0.95, 0.2
    assert measured.forecasts == pytest.approx((0.04 + 0.04 + 0.2025 + 0.09) / 4)
    # E[p (1 - p)] of Beta(1, 1): 1/6
    assert measured.spread == pytest.approx(4 / 6 / (0.21 + 0.21 + 0.0475 + 0.16))
    assert measured.coverage == 0.75  # 0.95 is outside [0.1, 0.9]
    assert measured.log_score == pytest.approx(np.log(1 / 3))  # of 2 rollouts, each S has 1/3
    measured = measure(parse("point"), hand_made())  # which forecasts nothing
    assert measured.visits == pytest.approx((0.25 + 0.16 + 0.09 + 0.04) / 4)
    assert np.isnan(
        [measured.forecasts, measured.spread, measured.coverage, measured.log_score]
    ).all()


def test_the_reference_is_the_best_fixed_discount_over_all_seeds():
    setting = Setting(prompts=200, seeds=2)
    result = simulate(
        [parse("dbb:discount=0.4")], (0.2, 0.4, 1.0), "paper-walk", "visits", 8, setting
    )
    x, mse_X = result.sweeps["dbb"]
    assert list(x) == [0.2, 0.4, 1.0] and mse_X.argmin() == 1
    np.testing.assert_array_equal(result.best_K, result.values_M_E_K[0, 0])


@pytest.mark.parametrize("drawn", ["visits", "uniform"])
def test_the_command(tmp_path, capsys, drawn):
    argv = [
        "simulate",
        "--draw",
        drawn,
        "--regimes",
        "jumps",
        "--rollouts",
        "2",
        "--prompts",
        "50",
        "--batch",
        "20",
    ]
    argv += [
        "--seeds",
        "2",
        "--seed",
        "7",
        "--estimators",
        "dbb",
        "point",
        "--discounts",
        "0.2",
        "0.5",
    ]
    assert main([*argv, "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"simulated.csv", "simulated_N2.png"}
    rows = pd.read_csv(tmp_path / "simulated.csv")
    runs = [training("jumps", drawn, 2, Setting(prompts=50, batch=20), seed) for seed in (7, 8)]
    measured = [measure(parse("dbb"), run) for run in runs]
    for name in MEASURES:
        expected = np.mean([getattr(one, name) for one in measured])
        assert rows[name][0] == pytest.approx(expected, rel=1e-5)
