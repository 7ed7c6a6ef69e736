"""The paper's claims: the manifest fits the protocols, and verdicts follow its rules on rows made by hand."""

import math

import pytest

from openrlhf_dbb.errors import UsageError
from study import claims, findings, protocol
from study.claims import SCALES, Claim, Test
from study.data import EpochRow, ErrorRow, PriorRow, RunRow, Study
from study.findings import NOT_RUN, OPPOSITE, REPRODUCED, UNDECIDED

MANIFEST = claims.load()
NO_OUTCOME = ("error", "below_point", "range", "prior")


def run(arm, seed, *, experiment="e", **values):
    row = {name: math.nan for name in RunRow._fields}
    row |= {"run": f"{experiment}-{arm}-s{seed}", "experiment": experiment, "arm": arm, "n": 2, "seed": seed}
    return RunRow(**(row | values))


def runs(exact, experiment="e"):
    """Runs with these exact accuracies, by arm; seeds from 1."""
    return tuple(
        run(arm, seed, exact=value, experiment=experiment)
        for arm, values in exact.items()
        for seed, value in enumerate(values, 1)
    )


def errors(mse, experiment="e"):
    """GRPO runs and these errors on them, by estimator and discount; seeds from 1."""
    rows = tuple(
        ErrorRow(f"{experiment}-grpo-s{seed}", 2, seed, estimator, math.nan if x is None else x, value, math.nan)
        for (estimator, x), values in mse.items()
        for seed, value in enumerate(values, 1)
    )
    return runs({"grpo": [0.5] * len(next(iter(mse.values())))}, experiment), rows


def claim(kind, **values):
    tests = values.pop("tests", {"tiny": (Test("e", "exact"),), "gpu": ()})
    defaults = {"arms": ("dbb",), "against": "grpo", "expected": "above"}
    return Claim(id="c", where="", says="", paper="", kind=kind, tests=tests, **(defaults | values))


def found(kind, study, test=None, **values):
    made = claim(kind, **values)
    return findings.find(made, test or made.tests["tiny"][0], study)


@pytest.mark.parametrize("name", MANIFEST)
def test_every_test_names_runs_that_a_protocol_makes(name):
    each = MANIFEST[name]
    assert each.kind in findings.KINDS and each.where and each.says and each.paper
    assert each.expected in ("above", "below", "not above") or each.kind in ("below_point", "prior")
    for scale, names in SCALES.items():
        planned = {(run.experiment, run.arm) for plan in names for run in protocol.load(plan).runs}
        assert each.tests[scale], scale
        for test in each.tests[scale]:
            assert {(of, arm) for of in test.experiments for arm in each.needs(test)} <= planned
            assert bool(test.outcome) != (each.kind in NO_OUTCOME)
        assert {run.experiment for _, run in each.runs(scale)} == {
            of for test in each.tests[scale] for of in test.experiments
        }


def test_a_run_serves_every_claim_that_it_answers():
    both = [{run.name for _, run in MANIFEST[name].runs("tiny")} for name in ("dbb-beats-grpo", "training-reward")]
    assert len(both[0] & both[1]) == 2 * (5 + 5 + 8)  # GRPO and DBB in both sweeps and in n2


def test_the_arm_of_a_test_replaces_the_claims():
    wanted = {run.arm for _, run in MANIFEST["dbb-beats-grpo"].runs("gpu") if run.experiment == "gpu-8b"}
    assert wanted == {"dbb-0.75", "grpo"}  # the paper's discount for 8B


def test_unknown_claims_are_refused():
    with pytest.raises(UsageError, match=r"no 'dbb-beats-all'; python -m study reproduce list shows the \d+ there are"):
        claims.choose(["dr-grpo", "dbb-beats-all"])
    assert [each.id for each in claims.choose(["dr-grpo", "dr-grpo"])] == ["dr-grpo"]
    assert len(claims.choose(["all"])) == len(MANIFEST)


# The standard error of two differences d1 and d2 is |d1 - d2| / 2; the interval is 12.706 times that to both sides.
@pytest.mark.parametrize(
    ("dbb", "expected", "margin", "verdict"),
    [
        ([0.53, 0.53], "above", 0, REPRODUCED),
        ([0.53, 0.53], "below", 0, OPPOSITE),
        ([0.53, 0.55], "above", 0, UNDECIDED),  # 4 +- 12.7 points
        ([0.53, 0.53], "not above", 1.0, OPPOSITE),
        ([0.505, 0.5049], "not above", 1.0, OPPOSITE),
        ([0.50, 0.499], "not above", 1.0, REPRODUCED),  # -0.05 +- 0.64 points, below 1
        ([0.50, 0.498], "not above", 1.0, UNDECIDED),  # -0.1 +- 1.27 points
        ([0.53], "above", 0, NOT_RUN),
    ],
)
def test_differences_and_their_verdicts(dbb, expected, margin, verdict):
    study = Study(runs=runs({"dbb": dbb, "grpo": [0.5, 0.5]}))
    assert found("difference", study, expected=expected, margin=margin).verdict == verdict


def test_a_difference_in_words():
    result = found("difference", Study(runs=runs({"dbb": [0.52, 0.54], "grpo": [0.5, 0.5]})))
    assert (result.n, result.text) == (2, "+3.00 (-9.71 to +15.71) points")
    assert float(result.detectable) == pytest.approx(12.706 + 1.376, abs=0.01)  # quantiles 0.975 and 0.8 of t, 1 degree


def test_ratios_are_of_means_over_epochs():
    rows = tuple(
        EpochRow(**({name: math.nan for name in EpochRow._fields} | {
            "run": f"e-{arm}-s{seed}", "experiment": "e", "arm": arm, "seed": seed, "epoch": epoch, "n": 2,
            "grad_norm": value,
        }))
        for arm, values in {"dbb": (1.0, 3.0), "grpo": (0.5, 1.5)}.items()
        for seed in (1, 2)
        for epoch, value in enumerate(values, 1)
    )  # fmt: skip
    study = Study(runs=runs({"dbb": [0.5, 0.5], "grpo": [0.5, 0.5]}), epochs=rows)
    result = found("ratio", study, Test("e", "grad_norm"))
    assert (result.text, result.verdict) == ("2.000 (2.000 to 2.000) times", REPRODUCED)
    assert found("ratio", study, Test("e", "grad_norm"), expected="not above", margin=0.05).verdict == OPPOSITE


def test_every_arm_has_to_be_above():
    arms = ("dbb-0.25", "dbb")
    exact = {"grpo": [0.5, 0.5], "dbb-0.25": [0.51, 0.51], "dbb": [0.52, 0.52]}
    result = found("every", Study(runs=runs(exact)), arms=arms)
    assert result.verdict == REPRODUCED
    assert result.text == "+1.00 (+1.00 to +1.00) points at 0.25; +2.00 (+2.00 to +2.00) points at 0.5"
    assert found("every", Study(runs=runs(exact | {"dbb": [0.49, 0.49]})), arms=arms).verdict == OPPOSITE
    assert found("every", Study(runs=runs(exact | {"dbb": [0.51, 0.49]})), arms=arms).verdict == UNDECIDED
    assert found("every", Study(runs=runs(exact | {"dbb": []})), arms=arms).verdict == NOT_RUN


def test_the_best_discounts_of_two_experiments():
    arms = tuple(findings.DISCOUNT)
    small = {"dbb-0.25": [0.6, 0.6], "dbb": [0.5, 0.5], "dbb-0.75": [0.5, 0.5], "dbb-1": [0.5, 0.5]}
    large = {"dbb-0.25": [0.5, 0.5], "dbb": [0.5, 0.5], "dbb-0.75": [0.6, 0.6], "dbb-1": [0.5, 0.5]}
    study = Study(runs=runs(small, "small") + runs(large, "large"))
    result = found("best", study, Test("small", "exact", against="large"), arms=arms, expected="below")
    assert (result.text, result.verdict) == ("best at 0.25, against 0.75: -0.5 (-0.5 to -0.5)", REPRODUCED)
    unsure = Study(runs=runs(small | {"dbb-1": [0.5, 0.8]}, "small") + runs(large, "large"))
    assert found("best", unsure, Test("small", "exact", against="large"), arms=arms, expected="below").verdict == (
        UNDECIDED
    )


def test_errors_and_accuracies_that_agree():
    arms = tuple(findings.DISCOUNT)
    discounts = findings.DISCOUNT.values()
    ordered = {arm: [0.5 + 0.01 * place] * 2 for place, arm in enumerate(arms)}
    grpo, rows = errors({("dbb", x): [0.04 - 0.01 * place] * 2 for place, x in enumerate(discounts)})
    result = found("agreement", Study(runs=grpo + runs(ordered), mse=rows), arms=arms)
    assert (result.text, result.verdict) == ("correlation +1.00 (+1.00 to +1.00)", REPRODUCED)
    _, reverse = errors({("dbb", x): [0.01 + 0.01 * place] * 2 for place, x in enumerate(discounts)})
    assert found("agreement", Study(runs=grpo + runs(ordered), mse=reverse), arms=arms).verdict == OPPOSITE


MSE = {
    ("point", None): [0.04, 0.08], ("dbb", 0.25): [0.03, 0.06], ("dbb", 0.5): [0.02, 0.04], ("dbb", 1.0): [0.05, 0.1],
    ("ema", 0.25): [0.03, 0.06], ("ema", 0.5): [0.05, 0.1],
}  # fmt: skip


def test_errors_are_compared_at_each_estimators_best_discount():
    grpo, rows = errors(MSE)
    study = Study(runs=grpo, mse=rows)
    result = found("error", study, estimator="ema", against="dbb", arms=())
    assert (result.text, result.verdict) == ("1.500 (1.500 to 1.500) times; ema at 0.25, dbb at 0.5", REPRODUCED)
    against_point = found("error", study, estimator="dbb", against="point", arms=(), expected="below")
    assert (against_point.text, against_point.verdict) == ("0.500 (0.500 to 0.500) times; dbb at 0.5", REPRODUCED)


def test_where_an_estimator_is_below_the_point_estimate():
    grpo, rows = errors(MSE)
    study = Study(runs=grpo, mse=rows)
    result = found("below_point", study, estimator="dbb", arms=(), first=0.25, last=0.5)
    assert (result.text, result.verdict) == ("below at 0.25 to 0.5; smallest at 0.5", REPRODUCED)
    assert found("below_point", study, estimator="dbb", arms=(), first=0.25, last=1.0).verdict == OPPOSITE
    # Two discounts for DBB and one for the EMA, each a twentieth.
    narrower = found("range", study, estimator="ema", against="dbb", arms=(), expected="below")
    assert (narrower.text, narrower.verdict) == ("-0.05 (-0.05 to -0.05) of the discount", REPRODUCED)


@pytest.mark.parametrize(("own", "verdict"), [(0.021, REPRODUCED), (0.03, OPPOSITE)])
def test_the_prior_against_the_best_one(own, verdict):
    priors = tuple(
        PriorRow(f"e-grpo-s{seed}", 2, seed, a, b, 0.5, value)
        for seed in (1, 2)
        for (a, b), value in {(1.0, 1.0): own, (2.0, 1.0): 0.02, (8.0, 8.0): 0.08}.items()
    )
    result = found("prior", Study(runs=runs({"grpo": [0.5, 0.5]}), priors=priors), arms=(), margin=0.1)
    assert result.verdict == verdict
    ratio = f"{own / 0.02:.3f}"
    assert result.text == f"{ratio} ({ratio} to {ratio}) times the best, 2, 1; the worst, 8, 8: 4.00 times"


@pytest.mark.parametrize("kind", findings.KINDS)
def test_nothing_is_said_without_runs(kind):
    test = Test("e", "exact", against="other")
    assert found(kind, Study(), test, estimator="dbb", against="point" if kind in NO_OUTCOME else "grpo") == (
        findings.Finding()
    )
