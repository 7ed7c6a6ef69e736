"""The tables of the paper's claims: what decided each, and the verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from openrlhf_dbb.evaluation.formats import p_value
from study import analysis, findings, paper_figures
from study.cells import Table, difference, markdown
from study.claims import SCALES, Claim
from study.data import Study
from study.findings import NOT_RUN, Finding

Found = dict[tuple[str, str], tuple[Finding, ...]]
"""Findings of each test, by claim and scale."""


def found(claims: Mapping[str, Claim], study: Study) -> Found:
    """Every test of every claim, on the rows there are."""
    return {
        (name, scale): tuple(findings.find(claim, test, study) for test in claim.tests[scale])
        for name, claim in claims.items()
        for scale in SCALES
    }


def write(claims: Mapping[str, Claim], study: Study, folder: Path) -> list[Path]:
    """Write FOLDER/tables.md and the figure, and return the paths.

    Raises:
        UsageError: matplotlib or scipy is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = paper_figures.draw(study, folder)
    path = folder / "tables.md"
    path.write_text(
        "# The paper, claim by claim\n\n" + "\n\n".join(build(claims, study).values()) + "\n", encoding="utf-8"
    )
    return [*written, path]


def build(claims: Mapping[str, Claim], study: Study) -> dict[str, str]:
    """The tables by name, as Markdown."""
    results = found(claims, study)
    made = {
        "claims": _claims(claims, results),
        "more": _more(claims, results),
        "gpu": _gpu(claims, results),
        "clip": _clip(study),
        "cost": _cost(claims, study),
    }
    return {"summary": _summary(claims, results)} | {
        name: markdown(table) for name, table in made.items() if table.rows
    }


def _summary(claims: Mapping[str, Claim], results: Found) -> str:
    lines = []
    for scale, title in (("tiny", "At tiny scale"), ("gpu", "At the paper's scale")):
        counts = Counter(results[name, scale][0].verdict for name in claims)
        order = (findings.REPRODUCED, findings.OPPOSITE, findings.UNDECIDED, NOT_RUN)
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
        lines.append(f"- {title}, of {len(claims)} claims: {said}.")
    return "\n".join(lines)


def _claims(claims: Mapping[str, Claim], results: Found) -> Table:
    rows = []
    for name, claim in claims.items():
        finding, test = results[name, "tiny"][0], claim.tests["tiny"][0]
        on = test.experiment if finding.n else f"{test.experiment}: {NOT_RUN}"
        rows.append([
            f"{claim.says} (`{name}`)", f"{claim.where}: {claim.paper}", finding.text or "-",
            f"{on}, n = {finding.n}" if finding.n else on, _verdict(finding), results[name, "gpu"][0].verdict,
        ])  # fmt: skip
    note = (
        "Ours: the mean over n paired seeds (or over n runs whose estimates were measured) with its 95 % interval. "
        "In brackets behind no difference shown: the smallest difference that such a test would have shown with "
        "probability 0.8."
    )
    header = ("the paper says", "where, and its numbers", "ours", "experiment", "verdict", "with GPUs")
    return Table("The claims, at tiny scale", header, rows, note)


def _more(claims: Mapping[str, Claim], results: Found) -> Table:
    rows = [
        [f"`{name}`", test.experiment, finding.text or "-", str(finding.n), _verdict(finding)]
        for name, claim in claims.items()
        for test, finding in zip(claim.tests["tiny"][1:], results[name, "tiny"][1:], strict=True)
    ]
    return Table("The same claims on further experiments", ("claim", "experiment", "ours", "n", "verdict"), rows)


def _gpu(claims: Mapping[str, Claim], results: Found) -> Table:
    rows = [
        [f"`{name}`", test.experiment, finding.text, str(finding.n), _verdict(finding)]
        for name, claim in claims.items()
        for test, finding in zip(claim.tests["gpu"], results[name, "gpu"], strict=True)
        if finding.n
    ]
    return Table("At the paper's scale", ("claim", "experiment", "ours", "n", "verdict"), rows)


def _clip(study: Study) -> Table:
    """Estimator and clip range, crossed: each of the two while the other is held."""
    pairs = {
        "DBB - GRPO, both with the standard range": ("dbb-standard", "grpo"),
        "DBB - GRPO, both with the wide range": ("dbb", "grpo-wide"),
        "wide - standard range, GRPO": ("grpo-wide", "grpo"),
        "wide - standard range, DBB": ("dbb", "dbb-standard"),
    }
    outcomes = {"accuracy": "Acc@8", "best": "Best@8", "reward_last": "training reward", "ood": "out of distribution"}
    rows = []
    for experiment in ("sweep-n8", "sweep-n2"):
        for label, (first, second) in pairs.items():
            tests = [analysis.compare(study, experiment, first, second, name) for name in outcomes]
            if tests[0].n > 1:
                rows.append([experiment, label, str(tests[0].n), *(f"{difference(t)} ({p_value(t.p)})" for t in tests)])
    note = (
        "Percentage points, mean and standard error over n paired seeds; in brackets p of a two-sided paired t-test. "
        "Looked at after the runs, and not corrected for the number of tests: a hypothesis."
    )
    return Table("Estimator and clip range, crossed", ("experiment", "difference", "n", *outcomes.values()), rows, note)


def _cost(claims: Mapping[str, Claim], study: Study) -> Table:
    experiments = {name for claim in claims.values() for test in claim.tests["tiny"] for name in test.experiments}
    rows = []
    for name in dict.fromkeys(run.experiment for run in study.runs):
        runs = [run for run in study.runs if run.experiment == name]
        seconds = [run.seconds for run in runs if not math.isnan(run.seconds)]
        if name in experiments:
            spent = f"{median(seconds):.0f}" if seconds else "-"
            rows.append([name, str(len(runs)), f"{sum(run.rollouts for run in runs):,.0f}", spent])
    header = ("experiment", "runs", "rollouts", "seconds a run, median")
    return Table("The runs", header, rows, "Seconds of a run in one of two lanes on two cores.")


def _verdict(finding: Finding) -> str:
    if finding.verdict == findings.UNDECIDED and finding.detectable:
        return f"{finding.verdict} ({finding.detectable})"
    return finding.verdict
