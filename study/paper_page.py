"""docs/paper.md: the table of the paper's claims, what decided them, and the figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from study import findings, paper_figures, tables
from study.cells import Table, markdown
from study.claims import SCALES, Claim
from study.data import Study
from study.findings import NOT_RUN, Finding

TABLES = ("summary", "claims", "more", "gpu", "cost")
_PAGE = """# The paper, claim by claim

<!-- table summary -->
<!-- end -->

<!-- table claims -->
<!-- end -->

<!-- table more -->
<!-- end -->

<!-- table gpu -->
<!-- end -->

<!-- table cost -->
<!-- end -->
"""

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
    """Draw the figures into a folder, and fill in the tables of the document beside it, FOLDER.md.

    A document that does not exist is made, with the tables alone.

    Returns:
        The files written.

    Raises:
        UsageError: the document has a wrong marker, or matplotlib or scipy is not installed.
    """
    written = paper_figures.draw(study, folder)
    document = folder.with_name(f"{folder.name}.md")
    if not document.exists():
        document.write_text(_PAGE, encoding="utf-8")
    tables.fill(document, build(claims, study), TABLES)
    return [*written, document]


def build(claims: Mapping[str, Claim], study: Study) -> dict[str, str]:
    """The tables by name, as Markdown."""
    results = found(claims, study)
    made = {
        "claims": _claims(claims, results),
        "more": _more(claims, results),
        "gpu": _gpu(claims, results),
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
