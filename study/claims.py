"""The paper's claims: reads claims.toml, tests each claim on the rows there are, and tabulates the verdicts.

Axes: R seeds (runs of an arm), L discounts, B bootstrap draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.evaluation.metrics import p_value
from openrlhf_dbb.toml_file import read_toml
from study import analysis, protocol
from study.analysis import ALPHA, LEVEL, PAIRED, Arm, Difference
from study.cells import Table, difference, interval
from study.protocol import PlannedRun, Protocol
from study.rows import Study

MANIFEST = Path(__file__).parent / "claims.toml"
SCALES = {"tiny": ("cpu", "paper"), "smollm2": ("real", "tasks", "estimates"), "gpu": ("gpu",)}
"""The protocols whose experiments the tests at a scale name."""
TITLES = {"tiny": "At tiny scale", "smollm2": "On SmolLM2-135M", "gpu": "At the paper's scale"}
PROBED = {
    "probed-n8": ("pairs", "probed-sums", "probed-lcm"),
    "probed-n2": ("probed-pairs-n2", "probed-sums-n2", "probed-lcm-n2"),
}
"""Experiments that count as one where errors are measured."""
REPRODUCED, OPPOSITE, UNDECIDED, NOT_RUN = (
    "reproduced",
    "opposite",
    "no difference shown",
    "not run",
)
POINTS = ("exact", "accuracy", "mean_accuracy", "best", "mean_best", "ood", "reward_last")
"""Outcomes in [0, 1]. They are printed as percentage points."""
LOGGED = ("entropy", "length", "clip_fraction", "grad_norm", "loss")
"""Outcomes that are means over all steps."""
DISCOUNT = {"dbb-0.25": 0.25, "dbb": 0.5, "dbb-0.75": 0.75, "dbb-1": 1.0}
"""Arms that differ in the discount alone."""
DRAWS = 10_000


@dataclass(frozen=True)
class Test:
    """The runs that a claim is tested on."""

    experiment: str
    outcome: str = ""
    against: str = ""  # a second experiment: of ``best``, or of the arm that ``difference`` and ``ratio`` compare with
    # Takes the place of the claim's arm, where the paper compares another one at this scale
    arm: str = ""

    @property
    def experiments(self) -> list[str]:
        return [
            *PROBED.get(self.experiment, [self.experiment]),
            *([self.against] if self.against else []),
        ]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper. claims.toml explains the kinds of tests and the rule for each verdict."""

    id: str
    where: str
    says: str
    paper: str
    kind: str  # a key of ``KINDS``
    tests: dict[str, tuple[Test, ...]]  # by scale; the first test of a scale gives the verdict
    arms: tuple[str, ...] = ()
    against: str = ""  # an arm, or an estimator
    expected: str = ""  # "above", "below" or "not above"
    margin: float = 0.0
    estimator: str = ""
    first: float = 0.0  # discounts, of ``below_point``
    last: float = 1.0

    def at(self, test: Test) -> Claim:
        """Return the claim with the arm of one of its tests."""
        return replace(self, arms=(test.arm,)) if test.arm else self

    def runs(self, scale: str) -> list[tuple[Protocol, PlannedRun]]:
        """Return the runs that its tests at a scale need, each with its protocol."""
        wanted = {key for test in self.tests[scale] for key in self.needs(test)}
        plans = map(protocol.load, SCALES[scale])
        return [
            (plan, run)
            for plan in plans
            for run in plan.runs
            if (run.experiment, run.arm) in wanted
        ]

    def needs(self, test: Test) -> set[tuple[str, str]]:
        """Return the experiments and arms whose runs a test needs."""
        arms = self.at(test).arms
        if test.against and self.against:
            return {(test.experiment, arm) for arm in arms} | {(test.against, self.against)}
        # Errors are measured on GRPO's runs
        on_grpo = [] if arms and self.kind != "agreement" else ["grpo"]
        every = [*arms, *([self.against] if arms and self.against else []), *on_grpo]
        return {(name, arm) for name in test.experiments for arm in every}


def load(path: Path = MANIFEST) -> dict[str, Claim]:
    """Return all claims by id, in the order of the manifest."""
    return {name: _claim(name, entry) for name, entry in read_toml(path)["claims"].items()}


def choose(ids: Sequence[str]) -> list[Claim]:
    """Return the claims of these ids, all for "all"."""
    known = load()
    unknown = [name for name in ids if name not in (*known, "all")]
    if unknown:
        raise UsageError(
            f"there is no claim {unknown[0]!r}; python -m study claims shows all {len(known)}"
        )
    return list(known.values()) if "all" in ids else [known[name] for name in dict.fromkeys(ids)]


def _claim(name: str, entry: dict[str, Any]) -> Claim:
    tests = {scale: tuple(Test(**test) for test in entry.pop(scale, [])) for scale in SCALES}
    arms = tuple(entry.pop("arms", [])) or tuple(filter(None, [entry.pop("arm", "")]))
    return Claim(id=name, kind=entry.pop("test"), arms=arms, tests=tests, **entry)


@dataclass(frozen=True)
class Finding:
    """The result of a test."""

    n: int = 0  # seeds, or runs or tasks whose errors were measured
    text: str = ""  # the number and its 95 % interval
    verdict: str = NOT_RUN
    detectable: str = ""  # the true difference that such a test would show with probability 0.8


def find(claim: Claim, test: Test, study: Study) -> Finding:
    """Test a claim on the rows there are. A test with fewer than two seeds counts as not run."""
    return KINDS[claim.kind](claim.at(test), test, study)


def outcome(study: Study, experiment: str, arm: str, name: str) -> Any:
    """Return an outcome of claims.toml as a Series over seeds, in percentage points or as logged."""
    column = f"mean_{name}" if name in LOGGED else "reward_last" if name == "reward" else name
    return study.outcome(experiment, arm, column) * (100 if column in POINTS else 1)


def _sides(claim: Claim, test: Test) -> tuple[Arm, Arm]:
    """Return the claim's arm, and the one that it is compared with, which may be in another experiment."""
    return (test.experiment, claim.arms[0]), (test.against or test.experiment, claim.against)


def _difference(claim: Claim, test: Test, study: Study) -> Finding:
    form, unit = ("+.3f", "") if test.outcome == "loss" else ("+.2f", " points")
    tested = analysis.compare(
        study, *_sides(claim, test), partial(outcome, study, name=test.outcome)
    )
    return _judged(claim, tested, form, claim.margin, unit)


def _ratio(claim: Claim, test: Test, study: Study) -> Finding:
    every = (outcome(study, *side, test.outcome) for side in _sides(claim, test))
    first, second = (np.log(values[values > 0]) for values in every)
    # Pooled over two arms alone, because logarithms of shares near 0 vary more than others.
    pair = test.experiment in PAIRED
    tested = (
        analysis.paired(first, second)
        if pair
        else analysis.unpaired(first, second, (first, second))
    )
    return _judged(claim, tested, "ratio", math.log1p(claim.margin), " times")


def _every(claim: Claim, test: Test, study: Study) -> Finding:
    against, of = (test.experiment, claim.against), partial(outcome, study, name=test.outcome)
    tests = {
        arm: analysis.compare(study, (test.experiment, arm), against, of) for arm in claim.arms
    }
    each = [
        _judged(claim, tested, "+.2f", claim.margin, f" points at {DISCOUNT[arm]:g}")
        for arm, tested in tests.items()
    ]
    verdicts = {finding.verdict for finding in each}
    if NOT_RUN in verdicts:
        return Finding()
    verdict = (
        REPRODUCED if verdicts == {REPRODUCED} else OPPOSITE if OPPOSITE in verdicts else UNDECIDED
    )
    return Finding(
        min(finding.n for finding in each), "; ".join(finding.text for finding in each), verdict
    )


def _best(claim: Claim, test: Test, study: Study) -> Finding:
    """The best discount in the first experiment minus the best in the second."""
    discount_L = np.array([DISCOUNT[arm] for arm in claim.arms])
    rng = np.random.default_rng(0)
    best, drawn, sizes = [], [], []
    for experiment in test.experiments:
        value_R_L = _common([outcome(study, experiment, arm, test.outcome) for arm in claim.arms])
        if len(value_R_L) < 2:
            return Finding()
        sizes.append(len(value_R_L))
        best.append(discount_L[value_R_L.mean(axis=0).argmax()])
        drawn.append(discount_L[_resampled(value_R_L, rng).argmax(axis=1)])
    low, high = _ends(drawn[0] - drawn[1])
    text = (
        f"best at {best[0]:g}, against {best[1]:g}: {best[0] - best[1]:+g} ({low:+g} to {high:+g})"
    )
    return Finding(min(sizes), text, _verdict(claim, low, high, 0))


def _agreement(claim: Claim, test: Test, study: Study) -> Finding:
    """Spearman correlation, over discounts, of the outcome and minus the error of GRPO's runs."""
    outcomes = [outcome(study, test.experiment, arm, test.outcome) for arm in claim.arms]
    errors = _errors(study, test.experiment, "dbb", index="seed")
    if errors.empty:
        return Finding()
    both_R_L = _common([*outcomes, *(errors[DISCOUNT[arm]] for arm in claim.arms)])
    if len(both_R_L) < 2:
        return Finding()
    count = len(claim.arms)

    def correlation(mean_B_L: Floats) -> Floats:
        ranks = [
            stats.rankdata(part, axis=1) for part in (mean_B_L[:, :count], -mean_B_L[:, count:])
        ]
        centred = [rank - rank.mean(axis=1, keepdims=True) for rank in ranks]
        scale = np.sqrt((centred[0] ** 2).sum(axis=1) * (centred[1] ** 2).sum(axis=1))
        return np.divide(
            (centred[0] * centred[1]).sum(axis=1), scale, out=np.zeros(len(scale)), where=scale > 0
        )

    observed = float(correlation(both_R_L.mean(axis=0)[None])[0])
    low, high = _ends(correlation(_resampled(both_R_L, np.random.default_rng(0))))
    text = f"correlation {observed:+.2f} ({low:+.2f} to {high:+.2f})"
    return Finding(len(both_R_L), text, _verdict(claim, low, high, 0))


def _error(claim: Claim, test: Test, study: Study) -> Finding:
    errors = [_errors(study, test.experiment, name) for name in (claim.estimator, claim.against)]
    if any(table.empty for table in errors):
        return Finding()
    best = [table.mean().idxmin() for table in errors]
    logs = [np.log(table[column]) for table, column in zip(errors, best, strict=True)]
    finding = _judged(claim, analysis.paired(*logs), "ratio", 0, " times")
    names = zip((claim.estimator, claim.against), best, strict=True)
    at = [f"{name} at {discount:g}" for name, discount in names if discount >= 0]
    return replace(finding, text="; ".join([finding.text, *([", ".join(at)] if at else [])]))


def _below_point(claim: Claim, test: Test, study: Study) -> Finding:
    point, table = (
        _errors(study, test.experiment, "point"),
        _errors(study, test.experiment, claim.estimator),
    )
    if len(point) < 2 or table.empty:
        return Finding()
    own = point.iloc[:, 0]
    below = [x for x in table if table[x].mean() < own.mean()]
    wanted = [x for x in table if claim.first <= x <= claim.last]
    tests = analysis.with_holm({x: analysis.paired(np.log(table[x]), np.log(own)) for x in wanted})
    worse = [x for x, (test, p) in tests.items() if test.mean > 0 and p < ALPHA]
    verdict = REPRODUCED if set(wanted) <= set(below) else OPPOSITE if worse else UNDECIDED
    # The discounts below point's error are one range in all experiments there are.
    span = f"below at {below[0]:g} to {below[-1]:g}" if below else "below at none"
    return Finding(len(point), f"{span}; smallest at {table.mean().idxmin():g}", verdict)


def _range(claim: Claim, test: Test, study: Study) -> Finding:
    point = _errors(study, test.experiment, "point")
    if point.empty:
        return Finding()
    lengths = [
        0.05 * _errors(study, test.experiment, name).lt(point.iloc[:, 0], axis=0).sum(axis=1)
        for name in (claim.estimator, claim.against)
    ]
    return _judged(claim, analysis.paired(*lengths), "+.2f", 0, " of the discount")


def _prior(claim: Claim, test: Test, study: Study) -> Finding:
    """log of the smallest error with prior (1, 1) over the smallest with any prior."""
    rows = _of_grpo(study.priors, study, test.experiment)
    table = rows.pivot_table(index="run", columns=["prior_alpha", "prior_beta"], values="mse")
    if table.empty:
        return Finding()
    best, worst = table.mean().idxmin(), table.mean().idxmax()
    paired = analysis.paired(np.log(table[1.0, 1.0]), np.log(table[best]))
    if paired.n < 2:
        return Finding()
    margin = math.log1p(claim.margin)
    verdict = OPPOSITE if paired.low > margin else REPRODUCED if paired.high < margin else UNDECIDED
    most = table[worst].mean() / table[best].mean()
    mean, low, high = np.exp([paired.mean, paired.low, paired.high])
    text = (
        f"{mean:.3f} ({low:.3f} to {high:.3f}) times the best, {best[0]:g}, {best[1]:g}; "
        f"the worst, {worst[0]:g}, {worst[1]:g}: {most:.2f} times"
    )
    return Finding(paired.n, text, verdict)


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


def _judged(claim: Claim, difference: Difference, form: str, margin: float, unit: str) -> Finding:
    """Judge a difference. ``form`` is a number format, or "ratio" for a difference of logs."""
    if difference.n < 2:
        return Finding()

    def text(value: float) -> str:
        return f"{math.exp(value):.3f}" if form == "ratio" else f"{value:{form}}"

    shown = f"{text(difference.mean)} ({text(difference.low)} to {text(difference.high)}){unit}"
    detectable = (
        "" if math.isnan(difference.detectable) else text(difference.detectable).lstrip("+")
    )
    return Finding(
        difference.n, shown, _verdict(claim, difference.low, difference.high, margin), detectable
    )


def _verdict(claim: Claim, low: float, high: float, margin: float) -> str:
    if claim.expected == "below":
        low, high = -high, -low
    if claim.expected == "not above":
        return OPPOSITE if low > 0 else REPRODUCED if high < margin else UNDECIDED
    return REPRODUCED if low > margin else OPPOSITE if high < 0 else UNDECIDED


def _common(columns: Sequence[Any]) -> Floats:
    """Return (R, len(columns)) of the seeds that all columns have."""
    return pd.concat(columns, axis=1, join="inner").to_numpy(dtype=np.float64)


def _resampled(value_R_L: Floats, rng: np.random.Generator) -> Floats:
    """Return the means of bootstrap draws over seeds, (B, L)."""
    return np.asarray(
        value_R_L[rng.integers(len(value_R_L), size=(DRAWS, len(value_R_L)))].mean(axis=1)
    )


def _ends(drawn_B: Floats) -> tuple[float, float]:
    low, high = np.quantile(drawn_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _of_grpo(rows: Any, study: Study, experiment: str) -> Any:
    """Return the rows of GRPO's runs. Runs of one task have the same prompts, so that they count as one run."""
    runs = study.runs[study.runs.arm == "grpo"]
    if experiment not in PROBED:
        return rows[rows.run.isin(runs.run[runs.experiment == experiment])]
    probed = runs[runs.experiment.isin(PROBED[experiment]) & runs.seed.isin(analysis.PROBED_SEEDS)]
    mine = rows[rows.run.isin(probed.run)]
    return mine.assign(run=mine.run.map(probed.set_index("run").experiment))


def _errors(study: Study, experiment: str, estimator: str, index: str = "run") -> Any:
    """Return the errors of an estimator on GRPO's runs: runs by discounts, -1 where it has no discount."""
    rows = _of_grpo(study.mse[study.mse.estimator == estimator], study, experiment)
    return rows.fillna({"discount": -1}).pivot_table(index=index, columns="discount", values="mse")


Found = dict[tuple[str, str], tuple[Finding, ...]]
"""The finding of each test, by claim and scale."""


def found(claims: Mapping[str, Claim], study: Study) -> Found:
    """Test every claim on the rows there are."""
    return {
        (name, scale): tuple(find(claim, test, study) for test in claim.tests[scale])
        for name, claim in claims.items()
        for scale in SCALES
    }


def summary(results: Found) -> str:
    """Return how many claims have each verdict, by scale."""
    lines = []
    for scale, title in TITLES.items():
        verdicts = [first(findings) for (_, at), findings in results.items() if at == scale]
        counts = Counter(verdicts)
        order = (REPRODUCED, OPPOSITE, UNDECIDED, NOT_RUN)
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
        lines.append(f"- {title}, of {len(verdicts)} claims: {said}.")
    return "\n".join(lines)


def tables(claims: Mapping[str, Claim], results: Found, study: Study) -> list[Table]:
    """Return the tables of the paper's claims that have rows."""
    made = [
        _claims(claims, results),
        _further(claims, results, "tiny", "The same claims on further experiments", slice(1, None)),
        *(
            _further(claims, results, scale, TITLES[scale], slice(None))
            for scale in ("smollm2", "gpu")
        ),
        _factors(study),
    ]
    return [table for table in made if table.rows]


def _claims(claims: Mapping[str, Claim], results: Found) -> Table:
    rows = []
    for name, claim in claims.items():
        finding, experiment = results[name, "tiny"][0], claim.tests["tiny"][0].experiment
        on = f"{experiment}, n = {finding.n}" if finding.n else f"{experiment}: {NOT_RUN}"
        rows.append([
            f"{claim.says} (`{name}`)", f"{claim.where}: {claim.paper}", finding.text or "-", on, _shown(finding),
            first(results[name, "smollm2"]), first(results[name, "gpu"]),
        ])  # fmt: skip
    note = (
        "Ours: the mean over n seeds (or over n runs whose estimates were measured) with its 95 % interval. "
        "In brackets behind no difference shown: the smallest difference that such a test would have shown with "
        "probability 0.8."
    )
    header = (
        "the paper says",
        "where, and its numbers",
        "ours",
        "experiment",
        "verdict",
        "SmolLM2-135M",
        "with GPUs",
    )
    return Table("The claims, at tiny scale", header, rows, note)


def _further(
    claims: Mapping[str, Claim], results: Found, scale: str, title: str, part: slice
) -> Table:
    rows = [
        [f"`{name}`", test.experiment, finding.text or "-", str(finding.n), _shown(finding)]
        for name, claim in claims.items()
        for test, finding in zip(claim.tests[scale][part], results[name, scale][part], strict=True)
        if finding.n or scale == "tiny"
    ]
    return Table(title, ("claim", "experiment", "ours", "n", "verdict"), rows)


def _factors(study: Study) -> Table:
    """Estimator and clip range: each while the other is held, and runs of both protocols as one experiment."""
    pairs = {
        "DBB - GRPO, both with the wide range": ("dbb", "grpo-wide"),
        "wide - standard range, GRPO": ("grpo-wide", "grpo"),
        "DBB with the wide - GRPO with the standard range": ("dbb", "grpo"),
    }
    crossed = {
        "DBB - GRPO, both with the standard range": ("dbb-standard", "grpo"),
        "wide - standard range, DBB": ("dbb", "dbb-standard"),
    }
    outcomes = {
        "accuracy": "Acc@8", "exact": "exact accuracy", "best": "Best@8", "reward_last": "training reward",
        "ood": "out of distribution",
    }  # fmt: skip
    pooled = replace(
        study, runs=study.runs.replace({"experiment": {"sweep-n2": "n2", "sweep-n8": "n8"}})
    )
    rows = []
    for of, experiment in (
        (study, "sweep-n8"),
        (study, "sweep-n2"),
        (study, "real-clip"),
        (pooled, "n8"),
        (pooled, "n2"),
    ):
        for label, (first, second) in (pairs if of is pooled else pairs | crossed).items():
            sides = (experiment, first), (experiment, second)
            tests = [
                analysis.compare(of, *sides, partial(of.outcome, name=name)) for name in outcomes
            ]
            if tests[0].n > 1:
                cells = [f"{difference(test)} ({p_value(test.p)})" for test in tests]
                name = f"{experiment}, sweep-{experiment}" if of is pooled else experiment
                rows.append([name, label, tests[0].runs, interval(tests[0]), *cells])
    note = (
        "Percentage points, mean and standard error; n: pairs, or seeds of both arms; in brackets p, two-sided. "
        "Looked at after the runs, and not corrected for the number of tests: a hypothesis."
    )
    header = ("experiments", "difference", "n", "Acc@8: 95 % interval", *outcomes.values())
    return Table("Estimator and clip range", header, rows, note)


def first(findings: Sequence[Finding]) -> str:
    """Return the verdict on a claim at a scale."""
    return findings[0].verdict if findings else NOT_RUN


def _shown(finding: Finding) -> str:
    undecided = finding.verdict == UNDECIDED and finding.detectable
    return f"{finding.verdict} ({finding.detectable})" if undecided else finding.verdict
