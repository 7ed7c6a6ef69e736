"""lab simulate: the simulation itself, its table, and the command."""

import csv
import json

import numpy as np
import pytest

from estimators.closed_form import moments
from openrlhf_dbb.lab import specs
from study.__main__ import main
from study.simulate import ratios
from study.simulation import Result, Setting, draw, estimated_means, simulate

_FIGURES = ("discounts_N4", "rollouts")

# A package of someone else's: dbb, but with run-wide state, so that it is fed batch by batch.
THIRD_PARTY = """
from dataclasses import dataclass
import numpy as np
from estimators.dbb import DiscountedBetaBernoulli

@dataclass(frozen=True)
class Counting(DiscountedBetaBernoulli):
    name = "counting"
    shared_fields = ("steps",)

    def initial_state(self, num_prompts):
        return super().initial_state(num_prompts) | {"steps": np.zeros(1)}

    def update(self, state, rewards_P_G):
        assert len(rewards_P_G) in (20, 10)
        return super().update(state, rewards_P_G) | {"steps": state["steps"] + 1}
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    (tmp_path / "counting_estimator.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    return "counting_estimator:Counting:discount=0.3"


def test_draws_depend_on_seed_and_regime_alone():
    first, again = draw("jumps", 8, 50, 3, seed=5), draw("jumps", 8, 50, 3, seed=5)
    for name in ("p_P_T", "rewards_T_P_G", "order_T_P"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert first.p_P_T.shape == (50, 3) and first.rewards_T_P_G.shape == (3, 50, 8)
    assert set(np.unique(first.rewards_T_P_G)) == {0, 1}
    np.testing.assert_array_equal(np.sort(first.order_T_P), np.tile(np.arange(50), (3, 1)))
    # Another N: the same probabilities and order, other rollouts. Another seed: all is another.
    wider, other = draw("jumps", 16, 50, 3, seed=5), draw("jumps", 8, 50, 3, seed=6)
    np.testing.assert_array_equal(first.p_P_T, wider.p_P_T)
    np.testing.assert_array_equal(first.order_T_P, wider.order_T_P)
    assert not np.array_equal(first.p_P_T, other.p_P_T)


@pytest.mark.parametrize(
    "spec", ["point", "dbb:discount=0.4", "dbb:discount=1.0,prior_alpha=4", "ema", "laplace:smoothing=0.3", "gaussian"]
)
def test_simulation_agrees_with_closed_form(spec):
    estimator, draws = specs.parse(spec), draw("paper-walk", 8, 20_000, 4, seed=1)
    squared_P_T = (estimated_means(estimator, draws, batch=128) - draws.p_P_T) ** 2
    difference_P = (squared_P_T - moments(estimator, draws.p_P_T, 8).mse).mean(axis=1)
    assert abs(difference_P.mean()) < 4 * difference_P.std() / np.sqrt(len(difference_P))


def test_run_wide_state_goes_from_batch_to_batch(third_party):
    # Batches of 20, 20 and 10 prompts; the class asserts that it sees no others.
    draws = draw("paper-walk", 4, 50, 3, seed=0)
    by_batch = estimated_means(specs.parse(third_party), draws, batch=20)
    np.testing.assert_array_equal(by_batch, estimated_means(specs.parse("dbb:discount=0.3"), draws, batch=20))


def test_forgetting_by_updates_is_told_the_updates_of_an_epoch():
    # One batch is the whole epoch: one update apart, as by visits.
    draws = draw("paper-walk", 4, 50, 3, seed=0)
    by_updates = estimated_means(specs.parse("dbb:discount=0.3,forgetting=updates"), draws, batch=50)
    np.testing.assert_allclose(
        by_updates, estimated_means(specs.parse("dbb:discount=0.3"), draws, batch=50), rtol=1e-12
    )


def test_reference_is_the_best_fixed_discount_over_all_seeds():
    setting = Setting(prompts=200, seeds=2)
    result = simulate([specs.parse("dbb:discount=0.4")], (0.2, 0.4, 1.0), "paper-walk", 8, setting)
    x, mse_X_K = result.sweeps["dbb"]
    assert list(x) == [0.2, 0.4, 1.0]
    assert mse_X_K.mean(axis=1).argmin() == 1
    np.testing.assert_array_equal(result.best_K, mse_X_K[1])
    np.testing.assert_array_equal(result.ratio_E_K, [[1.0, 1.0]])


def test_table():
    nothing = {"sweeps": {}, "point_K": np.ones(2)}
    results = [
        Result("a", 4, mse_E_K=np.array([[2.0, 6.0], [1.0, 1.0]]), best_K=np.array([1.0, 2.0]), **nothing),
        Result("b", 8, mse_E_K=np.array([[1.6, 1.6], [4.0, 4.0]]), best_K=np.array([1.0, 1.0]), **nothing),
    ]
    assert ratios(["first", "second"], results) == (
        ["regime", "N", "first", "second"],
        [
            ["a", 4, "2.500", "0.750"],  # (2 / 1 + 6 / 2) / 2, (1 / 1 + 1 / 2) / 2
            ["b", 8, "1.600", "4.000"],
            ["maximum", None, "2.500", "4.000"],
            ["geometric mean", None, "2.000", "1.732"],
        ],
    )


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_command(tmp_path, capsys, third_party):
    argv = ["simulate", "--regimes", "paper-walk", "jumps", "--rollouts", "4", "--prompts", "50"]
    argv += ["--batch", "20", "--seeds", "2", "--discounts", "0.2", "0.5"]
    argv += ["--estimators", "point", "dbb:discount=0.2", third_party]
    once, again = tmp_path / "once", tmp_path / "again"
    printed = []
    for folder in (once, again):
        assert main([*argv, "-o", str(folder)]) == 0
        printed.append(capsys.readouterr().out.replace(str(folder), ""))
    assert printed[0] == printed[1]
    names = sorted(path.name for path in once.iterdir())
    figures = [f"{name}.{kind}" for name in _FIGURES for kind in ("png", "svg")]
    assert names == sorted([*figures, "discounts.csv", "rollouts.csv", "table.csv"])
    for name in names:
        assert (once / name).read_bytes() == (again / name).read_bytes()

    lines = [line.split() for line in printed[0].splitlines()]
    for regime in ("paper-walk", "jumps"):
        rows = [row for row in _rows(once / "table.csv") if row["regime"] == regime]
        assert [row["estimator"] for row in rows] == ["point", "dbb 0.2", "counting 0.3"]
        assert [regime, "4", *(f"{float(row['ratio']):.3f}" for row in rows)] in lines


def test_errors_of_the_tables(tmp_path, capsys):
    argv = ["simulate", "--regimes", "jumps", "--rollouts", "4", "--prompts", "50", "--seeds", "2"]
    argv += ["--discounts", "0.2", "--estimators", "dbb:discount=0.2"]
    assert main([*argv, "-o", str(tmp_path)]) == 0
    draws = [draw("jumps", 4, 50, 4, seed) for seed in (0, 1)]
    first, second = (np.mean((estimated_means(specs.parse("dbb:discount=0.2"), d, 50) - d.p_P_T) ** 2) for d in draws)
    (row,) = _rows(tmp_path / "table.csv")
    (curve,) = _rows(tmp_path / "discounts.csv")
    for written in (row, curve):
        assert float(written["mse"]) == pytest.approx((first + second) / 2)
        assert float(written["mse_error"]) == pytest.approx(abs(first - second) / 2)  # sd / sqrt(2) of two
    assert (float(row["ratio"]), float(row["ratio_error"])) == (1, 0)
    capsys.readouterr()
    assert main([*argv, "-o", str(tmp_path), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["regime"], result["rollouts"], result["mse"]) == ("jumps", 4, float(row["mse"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--regimes", "calm"], "study: --regimes: unknown regime 'calm'; known: stationary-U, "),
        (["--estimators", "magic"], "study: estimator 'magic': unknown estimator 'magic'; known: auto, "),
        (
            ["--estimators", "predicted_prior:discount=0.5"],
            "study: --estimators predicted_prior 0.5: it reads text features, and simulated prompts have none; give "
            "predicted_prior:features=none, or use lab replay",
        ),
        (["--discounts", "0"], "study: --discounts 0 is not in (0, 1]"),
        (["--rollouts", "8", "0"], "study: --rollouts must be at least 1, got 0"),
        (["--batch", "0"], "study: --batch must be at least 1, got 0"),
        (["--seed", "-1"], "study: --seed must be at least 0, got -1"),
    ],
)
def test_refused(flags, message, tmp_path, capsys):
    assert main(["simulate", *flags, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
