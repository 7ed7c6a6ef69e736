"""Print the page of a GPU check, in Markdown, from pytest's JUnit report of tests/test_cuda.py.

python scripts/gpu_page.py REPORT.xml > PAGE.md
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

TAIL = 40  # lines of a failure


def result_and_detail(case: ET.Element) -> tuple[str, str]:
    """Return "passed", "failed" or "skipped", and the end of a traceback or the reason of a skip."""
    skipped, failure = case.find("skipped"), case.find("failure")
    if skipped is not None:
        return "skipped", skipped.get("message", "")
    if failure is None:
        failure = case.find("error")
    if failure is None:
        return "passed", ""
    return "failed", "\n".join((failure.text or "").rstrip().splitlines()[-TAIL:])


def page(report: ET.Element) -> str:
    """Return a table with one row a check, then the details of failed and skipped checks."""
    rows, details = ["| check | result | seconds | figures |", "| --- | --- | --- | --- |"], []
    results = []
    for case in report.iter("testcase"):
        name = case.get("name", "").removeprefix("test_")
        result, detail = result_and_detail(case)
        results.append(result)
        figures = "; ".join(f"{each.get('name')} {each.get('value')}" for each in case.iter("property"))
        rows.append(f"| {name} | {result} | {float(case.get('time', 0)):.0f} | {figures.replace('|', '/')} |")
        if detail:
            details.append(f"{name}:\n\n" + "\n".join(f"    {line}" for line in detail.splitlines()))
    counts = ", ".join(f"{results.count(result)} {result}" for result in ("passed", "failed", "skipped"))
    text = "\n\n".join([f"# GPU check: {counts}", "\n".join(rows), *details]) + "\n"
    return text.replace(str(Path.home()), "~") if Path.home() != Path("/") else text


if __name__ == "__main__":
    print(page(ET.parse(sys.argv[1]).getroot()), end="")
