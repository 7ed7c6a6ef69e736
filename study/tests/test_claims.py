"""The paper's claims: every test names runs that a protocol makes, and verdicts follow the rules of claims.toml."""

import pandas as pd
import pytest

from study import claims, protocol
from study.claims import NOT_RUN, OPPOSITE, REPRODUCED, SCALES, UNDECIDED, Claim, Test
from study.rows import COLUMNS, Study
from study.tests.test_analysis import runs

MANIFEST = claims.load()
NO_OUTCOME = ("error", "below_point", "range", "prior")


def find(kind, study, test=None, **values):
    test = test or Test("n2", "accuracy")
    made = {"arms": ("dbb",), "against": "grpo", "expected": "above"} | values
    claim = Claim("id", "where", "says", "paper", kind, {"tiny": (test,), "gpu": ()}, **made)
    return claims.find(claim, test, study)


def with_errors(mse):
    """A study of two GRPO runs with errors by estimator and discount (None: it has none)."""
    made = [
        (f"n2-grpo-s{seed}", 2, seed, estimator, discount, value, 0.04 * seed)
        for (estimator, discount), values in mse.items() for seed, value in enumerate(values, 1)
    ]  # fmt: skip
    return {
        "runs": runs({"grpo": [0.5, 0.5]}),
        "mse": pd.DataFrame(made, columns=COLUMNS["mse"]).astype({"discount": float}),
    }


@pytest.mark.parametrize("name", MANIFEST)
def test_every_test_names_runs_that_a_protocol_makes(name):
    claim = MANIFEST[name]
    assert claim.kind in claims.KINDS
    assert claim.expected in ("above", "below", "not above") or claim.kind in (
        "below_point",
        "prior",
    )
    for scale, plans in SCALES.items():
        planned = {(run.experiment, run.arm) for plan in plans for run in protocol.load(plan).runs}
        wanted = {key for test in claim.tests[scale] for key in claim.needs(test)}
        # Not every claim is tested on SmolLM2
        assert (wanted or scale == "smollm2") and wanted <= planned
        assert all(bool(test.outcome) != (claim.kind in NO_OUTCOME) for test in claim.tests[scale])
        assert {(run.experiment, run.arm) for _, run in claim.runs(scale)} == wanted


# The standard error of two differences d1 and d2 is |d1 - d2| / 2; the interval is 12.706 times that to both sides.
@pytest.mark.parametrize(
    ("dbb", "expected", "margin", "verdict"),
    [
        ([0.53, 0.53], "above", 0, REPRODUCED),
        ([0.53, 0.53], "below", 0, OPPOSITE),
        ([0.53, 0.55], "above", 0, UNDECIDED),  # 4 +- 12.7 points
        ([0.53, 0.53], "above", 3.5, UNDECIDED),  # above 0, within the margin
        ([0.505, 0.5049], "not above", 1.0, OPPOSITE),
        ([0.50, 0.499], "not above", 1.0, REPRODUCED),  # -0.05 +- 0.64 points, below 1
        ([0.50, 0.498], "not above", 1.0, UNDECIDED),  # -0.1 +- 1.27 points
        ([0.53], "above", 0, NOT_RUN),
    ],
)
def test_differences_and_their_verdicts(dbb, expected, margin, verdict):
    study = Study.of(runs=runs({"dbb": dbb, "grpo": [0.5, 0.5]}))
    assert find("difference", study, expected=expected, margin=margin).verdict == verdict


def test_a_difference_to_another_experiment_in_words():
    both = [runs({"dbb": [0.52, 0.54], "grpo": [0.9, 0.9]}), runs({"grpo": [0.5, 0.5]}, "f")]
    finding = find(
        "difference", Study.of(runs=pd.concat(both)), Test("n2", "accuracy", against="f")
    )
    assert (finding.n, finding.text) == (2, "+3.00 (-9.71 to +15.71) points")
    # T of 1 degree: 0.975 and 0.8
    assert float(finding.detectable) == pytest.approx(12.706 + 1.376, abs=0.01)


def test_runs_of_both_protocols_are_pooled():
    first = runs({"grpo": [0.5] * 2, "dbb": [0.51, 0.52]}, "n8")
    second = runs({"grpo": [0.5], "dbb": [0.53]}, "sweep-n8")
    [table] = claims.tables({}, {}, Study.of(runs=pd.concat([first, second.assign(seed=11)])))
    [row] = table.rows  # 1, 2 and 3 points: t = 3.464 with 2 degrees of freedom
    assert row[0] == "n8, sweep-n8" and row[2:5] == ["3", "-0.48 to +4.48", "+2.00 ± 0.58 (0.0742)"]


def test_every_arm_has_to_be_above():
    exact = {"grpo": [0.5, 0.5], "dbb-0.25": [0.51, 0.51], "dbb": [0.52, 0.52]}
    verdicts = {
        REPRODUCED: exact,
        OPPOSITE: exact | {"dbb": [0.49, 0.49]},
        UNDECIDED: exact | {"dbb": [0.51, 0.49]},
        NOT_RUN: exact | {"dbb": []},
    }
    for verdict, values in verdicts.items():
        assert (
            find("every", Study.of(runs=runs(values)), arms=("dbb-0.25", "dbb")).verdict == verdict
        )


MSE = {
    ("point", None): [0.04, 0.08], ("dbb", 0.25): [0.03, 0.06], ("dbb", 0.5): [0.02, 0.04], ("dbb", 1.0): [0.05, 0.1],
    ("ema", 0.25): [0.03, 0.06], ("ema", 0.5): [0.05, 0.1],
}  # fmt: skip


def test_errors_are_compared_at_each_estimators_best_discount():
    study = Study.of(**with_errors(MSE))
    finding = find("error", study, estimator="ema", against="dbb", arms=())
    assert (finding.text, finding.verdict) == (
        "1.500 (1.500 to 1.500) times; ema at 0.25, dbb at 0.5",
        REPRODUCED,
    )
    finding = find("error", study, estimator="dbb", against="point", arms=(), expected="below")
    assert (finding.text, finding.verdict) == (
        "0.500 (0.500 to 0.500) times; dbb at 0.5",
        REPRODUCED,
    )


def test_where_an_estimator_is_below_the_point_estimate():
    study = Study.of(**with_errors(MSE))
    finding = find("below_point", study, estimator="dbb", arms=(), first=0.25, last=0.5)
    assert (finding.text, finding.verdict) == ("below at 0.25 to 0.5; smallest at 0.5", REPRODUCED)
    # Two discounts for DBB and one for the EMA, each a twentieth.
    narrower = find("range", study, estimator="ema", against="dbb", arms=(), expected="below")
    assert (narrower.text, narrower.verdict) == (
        "-0.05 (-0.05 to -0.05) of the discount",
        REPRODUCED,
    )


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ([0.04 * 1.25, 0.08 * 1.2501], OPPOSITE),
        # log(error / point's) is a +- a / 16: t = 16 with one degree of freedom, p = 0.040, Holm's of three 0.12.
        ([0.04 * 1.2 ** (15 / 16), 0.08 * 1.2 ** (17 / 16)], UNDECIDED),
    ],
)
def test_one_discount_above_the_point_estimate_counts_after_holms_correction(last, verdict):
    errors = {("dbb", 0.25): [0.03, 0.07], ("dbb", 0.5): [0.02, 0.06], ("dbb", 1.0): last}
    study = Study.of(**with_errors(MSE | errors))
    assert (
        find("below_point", study, estimator="dbb", arms=(), first=0.25, last=1.0).verdict
        == verdict
    )


@pytest.mark.parametrize("kind", claims.KINDS)
def test_nothing_is_said_without_runs(kind):
    test = Test("n2", "accuracy", against="other")
    finding = find(
        kind, Study.of(), test, estimator="dbb", against="point" if kind in NO_OUTCOME else "grpo"
    )
    assert finding == claims.Finding()
