"""What the runs say about the paper's claims: a number with its interval, and a verdict by claims.toml's rules.

Axes: R seeds (runs of an arm), L discounts, B bootstrap draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openrlhf_dbb.evaluation.statistics import LEVEL
from study import analysis
from study.claims import Claim, Test
from study.data import Floats, Study

REPRODUCED, OPPOSITE, UNDECIDED, NOT_RUN = "reproduced", "opposite", "no difference shown", "not run"
POINTS = ("exact", "accuracy", "mean_accuracy", "best", "mean_best", "ood", "reward_last")
"""Outcomes in [0, 1], which are printed as percentage points."""
LOGGED = ("entropy", "length", "clip_fraction", "grad_norm", "loss")
"""Outcomes that are means over all steps."""
DISCOUNT = {"dbb-0.25": 0.25, "dbb": 0.5, "dbb-0.75": 0.75, "dbb-1": 1.0}
"""Arms that differ in the discount alone."""
DRAWS = 10_000
"""Bootstrap draws over runs."""


@dataclass(frozen=True)
class Finding:
    """What a test of a claim found.

    Attributes:
        n: paired seeds, or runs whose errors were measured; 0: not run.
        text: the number and its 95 % interval; "" if not run.
        verdict: REPRODUCED, OPPOSITE, UNDECIDED or NOT_RUN.
        detectable: the true difference that such a test would show with probability 0.8; "" if that is unknown.
    """

    n: int = 0
    text: str = ""
    verdict: str = NOT_RUN
    detectable: str = ""


def find(claim: Claim, test: Test, study: Study) -> Finding:
    """Test a claim on the rows there are; what has no paired seed, or a single one, is not run."""
    return KINDS[claim.kind](claim.at(test), test, study)


def outcome(study: Study, experiment: str, arm: str, name: str) -> dict[int, float]:
    """An outcome of claims.toml by seed, in its unit: percentage points, or as logged."""
    column = f"mean_{name}" if name in LOGGED else "reward_last" if name == "reward" else name
    scale = 100 if column in POINTS else 1
    return {seed: scale * value for seed, value in study.outcome(experiment, arm, column).items()}


def _difference(claim: Claim, test: Test, study: Study) -> Finding:
    of = {arm: outcome(study, test.experiment, arm, test.outcome) for arm in (*claim.arms, claim.against)}
    digits = 3 if test.outcome == "loss" else 2
    unit = "" if test.outcome == "loss" else " points"
    return _judged(
        claim,
        analysis.paired(of[claim.arms[0]], of[claim.against]),
        lambda value: f"{value:+.{digits}f}",
        claim.margin,
        unit,
    )


def _ratio(claim: Claim, test: Test, study: Study) -> Finding:
    logs = {
        arm: {
            seed: math.log(value)
            for seed, value in outcome(study, test.experiment, arm, test.outcome).items()
            if value > 0
        }
        for arm in (*claim.arms, claim.against)
    }
    paired = analysis.paired(logs[claim.arms[0]], logs[claim.against])
    return _judged(claim, paired, lambda value: f"{math.exp(value):.3f}", math.log1p(claim.margin), " times")


def _every(claim: Claim, test: Test, study: Study) -> Finding:
    against = outcome(study, test.experiment, claim.against, test.outcome)
    found = [
        _judged(
            claim,
            analysis.paired(outcome(study, test.experiment, arm, test.outcome), against),
            lambda value: f"{value:+.2f}",
            claim.margin,
            f" points at {DISCOUNT[arm]:g}",
        )
        for arm in claim.arms
    ]
    verdicts = [each.verdict for each in found]
    if NOT_RUN in verdicts:
        return Finding()
    verdict = REPRODUCED if set(verdicts) == {REPRODUCED} else OPPOSITE if OPPOSITE in verdicts else UNDECIDED
    return Finding(min(each.n for each in found), "; ".join(each.text for each in found), verdict)


def _best(claim: Claim, test: Test, study: Study) -> Finding:
    """The first experiment's best discount minus the second's."""
    values, drawn = [], []
    rng = np.random.default_rng(0)
    sizes = []
    for experiment in test.experiments:
        value_R_L = _by_seed([outcome(study, experiment, arm, test.outcome) for arm in claim.arms])
        if len(value_R_L) < 2:
            return Finding()
        sizes.append(len(value_R_L))
        values.append(_argbest(value_R_L.mean(axis=0), claim.arms))
        mean_B_L = value_R_L[rng.integers(len(value_R_L), size=(DRAWS, len(value_R_L)))].mean(axis=1)
        drawn.append(_argbest(mean_B_L, claim.arms))
    low, high = np.quantile(drawn[0] - drawn[1], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    text = f"best at {values[0]:g}, against {values[1]:g}: {values[0] - values[1]:+g} ({low:+g} to {high:+g})"
    return Finding(min(sizes), text, _verdict(claim, float(low), float(high), 0))


def _agreement(claim: Claim, test: Test, study: Study) -> Finding:
    """Spearman correlation, over discounts, of the outcome and minus the error of GRPO's runs."""
    outcomes = [outcome(study, test.experiment, arm, test.outcome) for arm in claim.arms]
    errors = [_errors(study, test.experiment, "dbb", DISCOUNT[arm]) for arm in claim.arms]
    both_R_L = _by_seed([*outcomes, *errors])
    if len(both_R_L) < 2:
        return Finding()
    count = len(claim.arms)
    rng = np.random.default_rng(0)
    drawn_B_L = both_R_L[rng.integers(len(both_R_L), size=(DRAWS, len(both_R_L)))].mean(axis=1)
    correlation = _spearman(both_R_L.mean(axis=0)[None, :count], -both_R_L.mean(axis=0)[None, count:])[0]
    low, high = np.quantile(_spearman(drawn_B_L[:, :count], -drawn_B_L[:, count:]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    text = f"correlation {correlation:+.2f} ({low:+.2f} to {high:+.2f})"
    return Finding(len(both_R_L), text, _verdict(claim, float(low), float(high), 0))


def _error(claim: Claim, test: Test, study: Study) -> Finding:
    first, second = (_at_best(study, test.experiment, name) for name in (claim.estimator, claim.against))
    if first is None or second is None:
        return Finding()
    logs = [{seed: math.log(value) for seed, value in error.items()} for _, error in (first, second)]
    found = _judged(claim, analysis.paired(*logs), lambda value: f"{math.exp(value):.3f}", 0, " times")
    at = [f"{name} at {best:g}" for name, (best, _) in ((claim.estimator, first), (claim.against, second)) if best]
    return Finding(found.n, found.text + (f"; {', '.join(at)}" if at else ""), found.verdict, found.detectable)


def _below_point(claim: Claim, test: Test, study: Study) -> Finding:
    point = _errors(study, test.experiment, "point", None)
    curves = {
        x: _errors(study, test.experiment, claim.estimator, x)
        for x in _discounts(study, test.experiment, claim.estimator)
    }
    if len(point) < 2 or not curves:
        return Finding()
    logs = {seed: math.log(value) for seed, value in point.items()}
    tests = {
        x: analysis.paired({seed: math.log(value) for seed, value in curve.items()}, logs)
        for x, curve in curves.items()
    }
    below = [x for x, curve in curves.items() if np.mean(list(curve.values())) < np.mean(list(point.values()))]
    wanted = [x for x in curves if claim.first <= x <= claim.last]
    worse = [x for x in wanted if tests[x].low > 0]
    verdict = REPRODUCED if set(wanted) <= set(below) else OPPOSITE if worse else UNDECIDED
    span = f"below at {_spans(below, list(curves))}" if below else "below at none"
    least = min(curves, key=lambda x: float(np.mean(list(curves[x].values()))))
    return Finding(len(point), f"{span}; smallest at {least:g}", verdict)


def _range(claim: Claim, test: Test, study: Study) -> Finding:
    point = _errors(study, test.experiment, "point", None)
    lengths = []
    for name in (claim.estimator, claim.against):
        curves = {x: _errors(study, test.experiment, name, x) for x in _discounts(study, test.experiment, name)}
        lengths.append(
            {seed: sum(0.05 * (curve[seed] < value) for curve in curves.values()) for seed, value in point.items()}
        )
    return _judged(claim, analysis.paired(*lengths), lambda value: f"{value:+.2f}", 0, " of the discount")


def _prior(claim: Claim, test: Test, study: Study) -> Finding:
    """log of (1, 1)'s smallest error over the smallest with any prior."""
    runs = _grpo_runs(study, test.experiment)
    rows = [row for row in study.priors if row.run in runs]
    own = {row.seed: math.log(row.mse) for row in rows if row.prior_alpha == row.prior_beta == 1}
    grid = {(row.prior_alpha, row.prior_beta) for row in rows}
    means = {at: np.mean([row.mse for row in rows if (row.prior_alpha, row.prior_beta) == at]) for at in grid}
    if not means:
        return Finding()
    best, worst = min(means, key=lambda at: means[at]), max(means, key=lambda at: means[at])
    least = {row.seed: math.log(row.mse) for row in rows if (row.prior_alpha, row.prior_beta) == best}
    paired = analysis.paired(own, least)
    if paired.n < 2:
        return Finding()
    verdict = REPRODUCED if paired.high < math.log1p(claim.margin) else UNDECIDED
    verdict = OPPOSITE if paired.low > math.log1p(claim.margin) else verdict
    shown = f"{math.exp(paired.mean):.3f} ({math.exp(paired.low):.3f} to {math.exp(paired.high):.3f}) times the best"
    most = math.exp(float(np.log(means[worst]) - np.log(means[best])))
    return Finding(
        paired.n, f"{shown}, {best[0]:g}, {best[1]:g}; the worst, {worst[0]:g}, {worst[1]:g}: {most:.2f} times", verdict
    )


KINDS: dict[str, Callable[[Claim, Test, Study], Finding]] = {
    "difference": _difference,
    "ratio": _ratio,
    "every": _every,
    "best": _best,
    "agreement": _agreement,
    "error": _error,
    "below_point": _below_point,
    "range": _range,
    "prior": _prior,
}


def _judged(claim: Claim, paired: analysis.Paired, text: Callable[[float], str], margin: float, unit: str) -> Finding:
    """A paired test in words; not run with fewer than two pairs."""
    if paired.n < 2:
        return Finding()
    shown = f"{text(paired.mean)} ({text(paired.low)} to {text(paired.high)}){unit}"
    detectable = "" if math.isnan(paired.detectable) else text(paired.detectable).lstrip("+")
    return Finding(paired.n, shown, _verdict(claim, paired.low, paired.high, margin), detectable)


def _verdict(claim: Claim, low: float, high: float, margin: float) -> str:
    if claim.expected == "below":
        low, high = -high, -low
    if claim.expected == "not above":
        return OPPOSITE if low > 0 else REPRODUCED if high < margin else UNDECIDED
    return REPRODUCED if low > 0 else OPPOSITE if high < 0 else UNDECIDED


def _by_seed(values: Sequence[Mapping[int, float]]) -> Floats:
    """(R, len(values)), of the seeds that all have."""
    seeds = sorted(set.intersection(*(set(each) for each in values)))
    return np.array([[each[seed] for each in values] for seed in seeds], dtype=np.float64)


def _argbest(value_L: Floats, arms: Sequence[str]) -> Floats:
    """The discount of the highest value along the last axis."""
    return np.array([DISCOUNT[arm] for arm in arms])[value_L.argmax(axis=-1)]


def _spearman(first_B_L: Floats, second_B_L: Floats) -> Floats:
    """(B,) correlations of ranks; 0 where one side has no spread."""
    from scipy.stats import rankdata

    ranks = [rankdata(values, axis=1) for values in (first_B_L, second_B_L)]
    centred = [rank - rank.mean(axis=1, keepdims=True) for rank in ranks]
    scale = np.sqrt((centred[0] ** 2).sum(axis=1) * (centred[1] ** 2).sum(axis=1))
    return np.divide((centred[0] * centred[1]).sum(axis=1), scale, out=np.zeros(len(scale)), where=scale > 0)


def _grpo_runs(study: Study, experiment: str) -> set[str]:
    return {run.run for run in study.runs if run.experiment == experiment and run.arm == "grpo"}


def _errors(study: Study, experiment: str, estimator: str, discount: float | None) -> dict[int, float]:
    """Mean squared errors of an estimator on the GRPO runs of an experiment, by seed."""
    runs = _grpo_runs(study, experiment)
    return {
        row.seed: row.mse
        for row in study.mse
        if row.run in runs
        and row.estimator == estimator
        and (math.isnan(row.discount) if discount is None else row.discount == discount)
    }


def _discounts(study: Study, experiment: str, estimator: str) -> list[float]:
    """Tried with an estimator; none if it has no discount."""
    runs = _grpo_runs(study, experiment)
    found = {row.discount for row in study.mse if row.run in runs and row.estimator == estimator}
    return sorted(x for x in found if not math.isnan(x))


def _at_best(study: Study, experiment: str, estimator: str) -> tuple[float | None, dict[int, float]] | None:
    """An estimator's best discount on the mean over runs (None if it has none), and its errors there by seed."""
    tried: list[float | None] = [*_discounts(study, experiment, estimator)] or [None]
    curves = {x: _errors(study, experiment, estimator, x) for x in tried}
    if not all(curves.values()):
        return None
    best = min(curves, key=lambda x: float(np.mean(list(curves[x].values()))))
    return best, curves[best]


def _spans(values: Sequence[float], of: Sequence[float]) -> str:
    """Runs of neighbours among sorted numbers: "0.05 to 0.9"."""
    parts: list[list[float]] = []
    for value in of:
        if value in values:
            if parts and of.index(value) and of[of.index(value) - 1] == parts[-1][-1]:
                parts[-1].append(value)
            else:
                parts.append([value])
    return ", ".join(f"{part[0]:g} to {part[-1]:g}" if len(part) > 1 else f"{part[0]:g}" for part in parts)
