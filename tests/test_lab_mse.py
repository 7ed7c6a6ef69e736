"""lab mse: closed forms by visit, the noise of probes, and a stored run's probes."""

import argparse
import csv
import itertools
import json
import math

import numpy as np
import pytest

from estimators.closed_form import moments
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.lab import probed, recorded, specs
from openrlhf_dbb.lab.mse_command import by_visit
from openrlhf_dbb.lab.probabilities import Probabilities
from storage import StepRows
from storage.records import ProbeRows


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def probed_probabilities(successes_Q_T, samples):
    p_Q_T = successes_Q_T / samples
    return Probabilities(p_Q_T, p_Q_T * (1 - p_Q_T) / (samples - 1))


def test_table_by_visit():
    known = Probabilities.exactly(np.array([[0.2, 0.4]]))
    header, rows = by_visit(known, [specs.parse("dbb:discount=0.5")], rollouts=8)
    assert header == ["estimator", "visit", "bias^2", "variance", "mse"]
    assert [row[:2] for row in rows] == [("dbb 0.5", "1"), ("dbb 0.5", "2"), ("dbb 0.5", "all")]
    # Visit 1: weight 1 of the prior, 8 of the group. Visit 2: 0.5 of the prior, 4 and 8 of the groups.
    first = ((1 / 9 * (0.5 - 0.2)) ** 2, (8 / 9) ** 2 * 0.2 * 0.8 / 8)
    second = (
        (0.5 / 12.5 * (0.5 - 0.4) + 4 / 12.5 * (0.2 - 0.4)) ** 2,
        ((4 / 12.5) ** 2 * 0.16 + (8 / 12.5) ** 2 * 0.24) / 8,
    )
    expected = [(*part, sum(part)) for part in (first, second)]
    expected.append(tuple(np.mean(expected, axis=0)))
    np.testing.assert_allclose([row[2:] for row in rows], expected, rtol=1e-12)


@pytest.mark.parametrize("spec", ["point", "dbb:discount=0.4", "ema", "laplace:smoothing=0.3", "gaussian"])
def test_error_without_noise_is_unbiased_exactly(spec):
    """Averaged over all outcomes of two probes of three rollouts each."""
    estimator, p, samples, rollouts = specs.parse(spec), np.array([0.3, 0.8]), 3, 4
    with_noise = without_noise = 0.0
    for successes in itertools.product(range(samples + 1), repeat=2):
        outcomes = zip(successes, p, strict=True)
        chance = math.prod(math.comb(samples, s) * q**s * (1 - q) ** (samples - s) for s, q in outcomes)
        known = probed_probabilities(np.array([successes]), samples)
        with_noise += chance * known.mse(estimator, rollouts)
        without_noise += chance * known.mse_without_noise(estimator, rollouts)
    truth = Probabilities.exactly(p[None]).mse(estimator, rollouts)
    assert without_noise == pytest.approx(truth, rel=1e-12)
    assert with_noise != pytest.approx(truth, rel=1e-3)


def test_exact_probabilities_have_no_noise():
    known = Probabilities.exactly(np.array([[0.2, 0.4, 0.7], [0.5, np.nan, np.nan]]))
    for spec in ("point", "dbb", "ema", "laplace", "empirical_bayes"):
        estimator = specs.parse(spec)
        expected = np.nanmean(moments(estimator, known.p_Q_T, 8).mse)
        assert known.mse(estimator, 8) == pytest.approx(expected, rel=1e-12)
        assert known.mse_without_noise(estimator, 8) == pytest.approx(expected, rel=1e-12)


def test_shared_prior_of_probed_probabilities_is_that_of_the_true_ones():
    rng = np.random.default_rng(0)
    p_Q_T = rng.beta(0.4, 0.6, size=(20_000, 2))
    probes = probed_probabilities(rng.binomial(8, p_Q_T), 8)
    estimator = specs.parse("empirical_bayes")
    exact = Probabilities.exactly(p_Q_T)
    # The prior fits Beta(0.4, 0.6), and probes of only 8 rollouts do not make it look wider.
    np.testing.assert_allclose(exact._prior(estimator, 4)[1], [0.4, 0.6], rtol=0.03)
    np.testing.assert_allclose(probes._prior(estimator, 4)[1], exact._prior(estimator, 4)[1], rtol=0.03)
    assert probes.mse_without_noise(estimator, 4) == pytest.approx(exact.mse(estimator, 4), rel=0.03)


@pytest.fixture
def run(open_new, fill):
    """A run of two steps on prompts a and b; a is probed twice, b once, and c without ever being trained on."""
    store = open_new("sqlite")
    run = fill.run(store, "probed")
    a, b, c = fill.prompts(store, 3)
    _record(run, fill.rows(run, [a, b], [2, 4]), 1, ProbeRows(*_probe([a, c], [10, 10], [4, 5])))
    _record(run, fill.rows(run, [a, b], [3, 4]), 2, ProbeRows(*_probe([b, a], [20, 10], [20, 7])))
    return store


def _probe(ids, samples, successes):
    successes = np.array(successes, dtype=float)
    return np.array(ids), np.array(samples), successes, successes


def _record(run, rows, step, probes):
    fields = {name: getattr(rows, name) for name in StepRows.__dataclass_fields__}
    run.record_step(step, StepRows(**(fields | {"probes": probes})))


def read(store):
    return recorded.read(argparse.Namespace(run="probed", store_url=store.url))


def test_probes_by_prompt_and_visit(run):
    stored = read(run)
    found = probed.probabilities(stored)
    np.testing.assert_array_equal(found.p_Q_T, [[0.4, 0.7], [1.0, np.nan]])
    np.testing.assert_allclose(found.noise_Q_T, [[0.24 / 9, 0.21 / 9], [0, np.nan]])
    assert stored.visits.usual_rollouts == 4


def test_errors_of_the_runs_own_estimates(run):
    found = probed.realised_errors(read(run))
    # Groups of 4: a has S = 2, then 3; b has S = 4 on its second visit. Noise is p (1 - p) / (M - 1).
    squared = [(0.5 - 0.4) ** 2 - 0.24 / 9, (0.75 - 0.7) ** 2 - 0.21 / 9, 0.0]
    mean, error = found["point"]
    assert mean == pytest.approx(sum(squared) / 3)
    of_a, of_b = squared[0] + squared[1] - 2 * mean, squared[2] - mean
    assert error == pytest.approx(math.sqrt(of_a**2 + of_b**2) / 3)
    # dbb 0.5 from (1, 1): a is 2.5 / 5, then 4.25 / 6.5; b is 4.5 / 5, then 6.25 / 6.5.
    trained = [(0.5 - 0.4) ** 2 - 0.24 / 9, (4.25 / 6.5 - 0.7) ** 2 - 0.21 / 9, (6.25 / 6.5 - 1) ** 2]
    assert found["as trained"][0] == pytest.approx(sum(trained) / 3)


def test_run_with_probes(run, tmp_path, capsys):
    assert main(["lab", "mse", "probed", "--store.url", run.url, "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "probed, N = 4: mean over 2 prompts" in out
    assert "+30% by 0.0108 / 0.0083; printed is +21.71%" in out
    known = probed.probabilities(read(run))
    (point,) = (row for row in _rows(tmp_path / "discounts.csv") if row["estimator"] == "point")
    assert float(point["mse"]) == pytest.approx((0.24 + 0.21 + 0) / 4 / 3)
    assert float(point["mse_without_noise"]) == pytest.approx((0.24 * 10 / 9 + 0.21 * 10 / 9 + 0) / 4 / 3)
    best = {row["estimator"]: [] for row in _rows(tmp_path / "discounts.csv")}
    for row in _rows(tmp_path / "discounts.csv"):
        best[row["estimator"]].append(float(row["mse"]))
    assert f"dbb, least MSE                          {min(best['dbb']):.5f}" in out
    assert min(best["dbb"]) <= known.mse(specs.parse("dbb"), 4)
    for name in ("discounts", "rollouts", "prior"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_the_latest_run_as_json(run, tmp_path, capsys):
    flags = ["--estimators", "point", "--store.url", run.url, "-o", str(tmp_path)]
    assert main(["lab", "mse", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["rollouts"], found["prompts"]) == ("probed", 4, 2)
    errors = {row["estimate"]: row["mse"] for row in found["own_errors"]}
    assert errors == pytest.approx({name: mse for name, (mse, _) in probed.realised_errors(read(run)).items()})


def test_given_probabilities(tmp_path, capsys):
    table = tmp_path / "p.csv"
    table.write_text("0.2,0.4\n0.4,\n")
    flags = ["--csv", str(table), "--rollouts", "8", "--estimators", "point"]
    assert main(["lab", "mse", *flags, "-o", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # p (1 - p) / 8: (0.16 + 0.24) / 16, then 0.24 / 8, and (0.16 + 0.24 + 0.24) / 24 over all.
    assert ["point", "1", "0", "0.025", "0.025"] in lines
    assert ["point", "2", "0", "0.03", "0.03"] in lines
    assert ["point", "all", "0", "0.02667", "0.02667"] in lines
    assert main(["lab", "mse", *flags, "-o", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rollouts"], found["prompts"], "own_errors" in found) == (8, 2, False)
    assert [row["mse"] for row in found["moments"]] == pytest.approx([0.025, 0.03, 0.64 / 24])
    written = [(row["prompt"], row["visit"], row["p"], row["mse"]) for row in _rows(tmp_path / "moments.csv")]
    assert [row[:3] for row in written] == [("1", "1", "0.2"), ("1", "2", "0.4"), ("2", "1", "0.4")]
    assert [float(row[3]) for row in written] == pytest.approx([0.02, 0.03, 0.03])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--p", "0.2,1.5"], "error: --p, row 1: '1.5' is not a probability in [0, 1]"),
        (["--p", "0.2,nan"], "error: --p, row 1: 'nan' is not a probability in [0, 1]"),
        (["--p", "0.5", "--rollouts", "0"], "error: --rollouts must be at least 1, got 0"),
        (["--p", "0.5", "--estimators", "auto"], "error: no closed form is known for "),
        (["--csv", "missing.csv"], "error: --csv missing.csv: [Errno 2] No such file"),
        (["other"], "error: there is no run 'other' in "),
    ],
)
def test_refused(flags, message, run, tmp_path, capsys):
    assert main(["lab", "mse", *flags, "--store.url", run.url, "-o", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_run_without_probes_is_refused(open_new, fill, tmp_path, capsys):
    store = open_new("sqlite")
    fill.step(fill.run(store, "plain"), 1, fill.prompts(store, 1), [2])
    assert main(["lab", "mse", "plain", "--store.url", store.url, "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: run 'plain' has no probes of 2 or more rollouts; ")


def test_scores_other_than_0_and_1_are_refused(open_new, fill, tmp_path, capsys):
    store = open_new("sqlite")
    run, ids = fill.run(store, "scores"), fill.prompts(store, 1)
    probes = ProbeRows(np.array(ids), np.array([4]), np.array([2.0]), np.array([1.5]))
    _record(run, fill.rows(run, ids, [2]), 1, probes)
    assert main(["lab", "mse", "scores", "--store.url", store.url, "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: run 'scores' has rewards other than 0 and 1")
