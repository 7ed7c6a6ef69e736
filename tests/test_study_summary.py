"""docs/study_summary.md says nothing that docs/study.md does not say."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_rows_of_the_summary_are_those_of_the_verdict():
    study, summary = ((DOCS / name).read_text() for name in ("study.md", "study_summary.md"))
    verdict = re.findall(r"- GRPO (\S+) .*\(n = (\d), 95 % interval (\S+ to \S+), p \(Holm\) ([\d.]+)", study)
    known = {(difference, interval, seeds): float(p) for difference, seeds, interval, p in verdict}
    rows = re.findall(r"^\|[^|]*\| `\w+` \| (\S+) \| (\S+ to \S+) \| (\d) \| (\S+) \| (.*?) \|$", summary, re.M)
    assert len(rows) == 10
    for difference, interval, seeds, p, said in rows:
        exact = known[difference, interval, seeds]
        assert p == f"{exact:.2g}"
        assert (said == "no difference shown") == (exact >= 0.05)
