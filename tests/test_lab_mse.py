"""The laboratory: estimators as text; lab mse: closed forms by visit, the noise of probes, a stored run's probes."""

import json

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import mse, specs
from openrlhf_dbb.storage import ProbeRows


def test_estimators_as_text():
    partial = specs.parse("dbb:partial_credit=true")
    assert (specs.label(partial), specs.family(partial)) == ("dbb 0.5 partial_credit=True", "dbb partial_credit=True")
    smoothed = specs.parse("openrlhf_dbb.estimators.simple:LaplaceSmoothing:smoothing=0.3")
    assert (specs.label(smoothed), specs.family(smoothed)) == ("laplace 0.3", "laplace")


@pytest.mark.parametrize(
    ("text", "message"),
    [("dbb:decay=0.4", "'dbb' has no parameter 'decay'"), ("dbb:discount=half", "discount = 'half'")],
)
def test_wrong_estimators_are_named(text, message):
    with pytest.raises(UsageError, match=f"^estimator '{text}': .*{message}"):
        specs.parse(text)


def test_candidates_of_a_sweep_are_there_once_and_within_the_range():
    candidates = specs.sweep(["point", "ema", "dbb", "dbb:discount=0.3", "dbb:discount=0.3"], [0.0, 1.0])
    assert [specs.label(candidate) for candidate in candidates] == ["point", "ema 0", "dbb 1", "dbb 0.3"]


def test_flags():
    estimator = specs.parse("dbb:discount=0.4,prior_alpha=2,partial_credit=true")
    wanted = "--estimator dbb --dbb.discount 0.4 --dbb.prior_alpha 2.0 --dbb.partial_credit"
    assert specs.flags(estimator) == wanted


def test_table_by_visit():
    known = np.array([[0.2, 0.4]])
    rows = mse.moments_by_visit(known, [specs.parse("dbb:discount=0.5")], rollouts=8)
    assert [row[:2] for row in rows] == [("dbb 0.5", "1"), ("dbb 0.5", "2"), ("dbb 0.5", "all")]
    # Visit 1: weight 1 of the prior, 8 of the group. Visit 2: 0.5 of the prior, 4 and 8 of the groups.
    first = ((1 / 9 * (0.5 - 0.2)) ** 2, (8 / 9) ** 2 * 0.2 * 0.8 / 8)
    second = (
        (0.5 / 12.5 * (0.5 - 0.4) + 4 / 12.5 * (0.2 - 0.4)) ** 2,
        ((4 / 12.5) ** 2 * 0.16 + (8 / 12.5) ** 2 * 0.24) / 8,
    )
    # The sum of X - p: alpha is expected to be 0.5 + 1.6 of 9, then 0.25 + 0.8 + 3.2 of 12.5.
    sums = (8 * (0.2 - 2.1 / 9), 8 * (0.4 - 4.25 / 12.5))
    expected = [(*part, sum(part), of_group) for part, of_group in zip((first, second), sums, strict=True)]
    expected.append(tuple(np.mean(expected, axis=0)))
    np.testing.assert_allclose([row[2:] for row in rows], expected, rtol=1e-12)


@pytest.fixture
def run(open_new, fill):
    """A run of two steps on prompts a and b; a is probed twice, b once, and c without ever being trained on."""
    store = open_new("sqlite")
    run = fill.run(store, "probed")
    a, b, c = fill.prompts(store, 3)
    fill.step(run, 1, [a, b], [2, 4], probes=_probes([a, c], [10, 10], [4.0, 5.0]))
    fill.step(run, 2, [a, b], [3, 4], probes=_probes([b, a], [20, 10], [20.0, 7.0]))
    return store


def _probes(ids, samples, successes):
    return ProbeRows(np.array(ids), np.array(samples), np.array(successes), np.array(successes))


def test_run_with_probes(run, capsys):
    assert main(["lab", "mse", "--store.url", run.url, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["of"], answer["rollouts"], answer["prompts"]) == ("probed", 4, 2)
    (point,) = (row for row in answer["discounts"] if row["estimator"] == "point")
    assert point["mse"] == pytest.approx((0.24 + 0.21 + 0) / 4 / 3)
    assert main(["lab", "mse", "--store.url", run.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "probed, N = 4: mean over 2 prompts"
    best = min((row for row in answer["discounts"] if row["estimator"] == "dbb"), key=lambda row: row["mse"])
    assert ["dbb", f"{best['discount']:.4g}", f"{best['mse']:.4g}"] in [line.split() for line in lines]


def test_given_probabilities(capsys):
    assert main(["lab", "mse", "--p", "0.2,0.4", "0.4", "--estimators", "point"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # p (1 - p) / 8: (0.16 + 0.24) / 16, then 0.24 / 8, and (0.16 + 0.24 + 0.24) / 24 over all.
    assert ["point", "1", "0", "0.025", "0.025", "0"] in lines
    assert ["point", "2", "0", "0.03", "0.03", "0"] in lines
    assert ["point", "all", "0", "0.02667", "0.02667", "0"] in lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--p", "0.2,nan"], "error: --p: nan is not in [0, 1]"),
        (["--p", "0.5", "--estimators", "auto"], "error: no closed form is known for "),
        (["plain"], "error: run 'plain' has no probes of 2 or more rollouts; "),
    ],
)
def test_refused(flags, message, store, fill, capsys):
    fill.step(fill.run(store, "plain"), 1, fill.prompts(store, 1), [2])
    assert main(["lab", "mse", *flags, "--store.url", store.url]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1
