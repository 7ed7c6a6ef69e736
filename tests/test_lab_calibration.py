"""lab calibration: forecasts that are right pass, wrong ones do not; values by hand; the command on a real store."""

import csv
import json

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import criteria, forecast, specs
from openrlhf_dbb.lab.calibration_command import PIT_BINS, calibrate
from openrlhf_dbb.lab.visits import visits

CHI_SQUARE_19 = 43.82  # 99.9 % quantile with PIT_BINS - 1 degrees of freedom


def twice(prompts=4000, rollouts=8, seed=0):
    """Two visits of prompts whose probability is drawn from Beta(0.5, 0.5) once and then stays."""
    rng = np.random.default_rng(seed)
    p = rng.beta(0.5, 0.5, size=prompts)
    successes = np.concatenate([rng.binomial(rollouts, p), rng.binomial(rollouts, p)])
    prompt = np.tile(np.arange(prompts), 2)
    return visits(np.repeat([1, 2], prompts), prompt, 1.0 * successes, np.full(2 * prompts, rollouts))


def chi_square(density, count):
    return count / PIT_BINS * np.sum((density - 1) ** 2)


RIGHT = "dbb:discount=1,prior_alpha=0.5,prior_beta=0.5"  # the very model the visits are drawn from


def test_pit_of_the_right_model_is_uniform():
    assert chi_square(calibrate(specs.parse(RIGHT), twice()).density, 4000) < CHI_SQUARE_19


@pytest.mark.parametrize("wrong", ["dbb:discount=0.1,prior_alpha=0.5,prior_beta=0.5", "dbb:discount=1,prior_alpha=8"])
def test_pit_of_a_wrong_model_is_not(wrong):
    assert chi_square(calibrate(specs.parse(wrong), twice()).density, 4000) > 2 * CHI_SQUARE_19


def test_right_model_has_the_best_score_and_coverage():
    right, wrong = (calibrate(specs.parse(text), twice()) for text in (RIGHT, "dbb:discount=0.2,prior_alpha=2"))
    assert right.log_score > wrong.log_score
    for share, expected in right.coverage:
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000)
    assert right.reliability.calibration_error < 4 * right.reliability.by_chance


def test_pit_by_hand():
    logs = criteria.beta_binomial(np.ones(2), np.ones(2), np.array([3.0, 3.0]))  # each S has mass 1/4
    np.testing.assert_allclose(forecast.pit(logs, np.array([0, 2]), np.array([0.5, 0.2])), [0.125, 0.7])


def test_coverage_by_hand():
    # Mass 1/10 for each S from 0 to 9: the central half is reached at S = 2 (0.3 >= 0.25) and S = 7 (0.8 >= 0.75).
    logs = np.full((4, 10), np.log(0.1))
    inside, expected = forecast.coverage(logs, np.array([1, 2, 7, 8]), 0.5)
    assert (inside, expected) == (0.5, pytest.approx(0.6))
    # The central 95 %: cumulative 0.1 >= 0.025 at S = 0, and 1 >= 0.975 at S = 9.
    assert forecast.coverage(logs, np.array([0, 9, 5, 5]), 0.95) == (1, pytest.approx(1))


def test_reliability_by_hand():
    # Two bins: forecasts 0.2 (came 0, 0.5) and 0.8 (came 1, 1).
    bins = forecast.reliability(np.array([0.2, 0.8, 0.2, 0.8]), np.array([0.0, 1.0, 0.5, 1.0]), bins=2)
    np.testing.assert_allclose(bins.forecast, [0.2, 0.8])
    np.testing.assert_allclose(bins.observed, [0.25, 1.0])
    np.testing.assert_allclose(bins.error, [0.25, 0.0], atol=1e-12)  # sd of (-0.2, 0.3) is 0.3536; over sqrt 2
    assert bins.calibration_error == pytest.approx((2 * 0.05 + 2 * 0.2) / 4)


def test_without_a_predictive_the_mean_before_is_the_forecast():
    # Prompt 0 goes 1/4, 2/4, 3/4 and prompt 1 4/4, 0/4: forecasts 0.25, 1, 0.5 for outcomes 0.5, 0, 0.75.
    seen = visits(
        np.array([1, 1, 2, 2, 3]), np.array([0, 1, 0, 1, 0]), np.array([1.0, 4, 2, 0, 3]), np.array([4, 4, 4, 4, 4])
    )
    found = calibrate(specs.parse("point"), seen)
    np.testing.assert_allclose(found.reliability.forecast, [0.25, 0.5, 1.0])
    np.testing.assert_allclose(found.reliability.observed, [0.5, 0.75, 0.0])
    assert found.log_score is None and found.coverage is None and found.density is None


def test_the_current_group_is_no_part_of_its_forecast():
    seen = visits(np.array([1, 2]), np.array([0, 0]), np.array([4.0, 0.0]), np.array([4, 4]))
    # Beta(1 + 4, 1): the mean 5/6 is forecast, though the group that came has no success.
    assert calibrate(specs.parse("dbb:discount=1"), seen).reliability.forecast == pytest.approx([5 / 6])


def test_one_visit_a_prompt_is_refused():
    seen = visits(np.array([1, 1]), np.array([0, 1]), np.array([1.0, 0.0]), np.array([4, 4]))
    with pytest.raises(UsageError, match="every prompt was visited once"):
        calibrate(specs.parse("dbb"), seen)


@pytest.fixture
def written(open_new, fill):
    """Store with run "still": 40 prompts, three passes in the same order."""
    store, rng = open_new("sqlite"), np.random.default_rng(3)
    run, ids, p = fill.run(store, "still"), fill.prompts(store, 40), rng.beta(0.5, 0.5, size=40)
    for step in range(6):
        half = slice(0, 20) if step % 2 == 0 else slice(20, 40)
        fill.step(run, step + 1, ids[half], rng.binomial(8, p[half]), rollouts=8)
    return store


def test_command(written, tmp_path, capsys):
    assert main(["lab", "calibration", "still", "--store.url", written.url, "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "run still: 80 visits forecast, of prompts seen before" in out
    labels = [row["estimator"] for row in csv.DictReader((tmp_path / "calibration.csv").read_text().splitlines())]
    assert labels[0] == "dbb 0.5" and labels[-1] == "auto"
    for name in ("calibration_pit.csv", "calibration_pit.png", "calibration_reliability.svg"):
        assert (tmp_path / name).stat().st_size > 0


def test_command_without_a_predictive_draws_no_pit(written, tmp_path):
    argv = ["lab", "calibration", "still", "--store.url", written.url, "-o", str(tmp_path)]
    assert main([*argv, "--estimators", "point", "ema:discount=0.3"]) == 0
    assert not (tmp_path / "calibration_pit.png").exists()
    rows = list(csv.DictReader((tmp_path / "calibration.csv").read_text().splitlines()))
    assert [(row["estimator"], row["log score"]) for row in rows] == [("point", ""), ("ema 0.3", "")]


def test_the_latest_run_as_json(written, tmp_path, capsys):
    argv = ["lab", "calibration", "--store.url", written.url, "-o", str(tmp_path), "--json"]
    assert main([*argv, "--estimators", "dbb", "point"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["visits"]) == ("still", 80)
    dbb, point = found["calibration"]
    (row, _) = csv.DictReader((tmp_path / "calibration.csv").read_text().splitlines())
    assert (dbb["estimator"], dbb["log score"]) == ("dbb 0.5", float(row["log score"]))
    assert (point["estimator"], point["log score"]) == ("point", None)


def test_error_is_one_line(written, tmp_path, capsys):
    assert main(["lab", "calibration", "other", "--store.url", written.url, "-o", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "there is no run 'other'" in error and error.count("\n") == 1
