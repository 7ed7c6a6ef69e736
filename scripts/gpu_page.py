"""The page of a GPU check, in Markdown, from pytest's JUnit report of tests/test_cuda.py.

python scripts/gpu_page.py REPORT.xml > PAGE.md
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

MACHINE = "machine"
"""The entry whose properties are the machine and its versions."""
REHEARSAL = "rehearsal"
"""A property of that entry if nothing ran on a GPU."""
TAIL = 40
"""Lines of a failure that are shown."""


@dataclass(frozen=True)
class Entry:
    """A test.

    Attributes:
        what: its name, in words.
        result: "passed", "failed" or "skipped".
        figures: what it recorded, by name.
        detail: the traceback of a failure, the reason of a skip.
    """

    what: str
    result: str
    seconds: float
    figures: dict[str, str]
    detail: str


def read(path: Path) -> tuple[list[Entry], str]:
    """The entries of a report, and when it began.

    Raises:
        ValueError: it is missing, no JUnit report, or without entries.
    """
    try:
        root = ET.fromstring(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; pytest has not come to its end") from None
    except ET.ParseError as error:
        raise ValueError(f"{path} is no JUnit report: {error}") from None
    entries = [_entry(case) for case in root.iter("testcase")]
    if not entries:
        raise ValueError(f"{path} has no entries; was any test chosen?")
    suite = root.find("testsuite")
    return entries, (suite.get("timestamp", "") if suite is not None else "")[:16].replace("T", " ")


def _entry(case: ET.Element) -> Entry:
    figures = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
    result, detail = "passed", ""
    for tag, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        found = case.find(tag)
        if found is not None:
            text = found.text or ""
            result, detail = meaning, found.get("message", "") if tag == "skipped" else text
    return Entry(_in_words(case.get("name", "")), result, float(case.get("time", 0)), figures, detail)


def _in_words(name: str) -> str:
    """``test_attention[sdpa-tiny]`` as "attention (sdpa-tiny)"."""
    words, _, parameters = name.removeprefix("test_").partition("[")
    return words.replace("_", " ") + (f" ({parameters.removesuffix(']')})" if parameters else "")


def write(entries: list[Entry], began: str) -> str:
    """The page."""
    blocks = [
        _headline(entries),
        f"{_counts(entries)}; begun {began}",
        *_machine(entries),
        "## Entries",
        _table(["entry", "result", "seconds", "figures"], [_row(entry) for entry in entries]),
        *_failures(entries),
        *_skips(entries),
    ]
    page, home = "\n\n".join(blocks) + "\n", str(Path.home())
    return page.replace(home, "~") if home != "/" else page


def _headline(entries: list[Entry]) -> str:
    machine = _facts(entries)
    ran = [entry for entry in entries if entry.result != "skipped"]
    passed = f"{sum(entry.result == 'passed' for entry in ran)} of {len(ran)} passed"
    if REHEARSAL in machine:
        return f"# GPU check: rehearsal without CUDA: nothing here was run on a GPU ({passed})"
    there = {None: "a machine that was not looked at", "none": "a machine where torch finds no GPU"}
    gpu = machine.get("GPU")
    return f"# GPU check: {passed} on {there.get(gpu, gpu)}"


def _counts(entries: list[Entry]) -> str:
    results = [entry.result for entry in entries]
    each = [f"{results.count(result)} {result}" for result in ("passed", "failed", "skipped")]
    return f"{', '.join(each)}; {sum(entry.seconds for entry in entries):.0f} s"


def _facts(entries: list[Entry]) -> dict[str, str]:
    return next((entry.figures for entry in entries if entry.what == MACHINE), {})


def _machine(entries: list[Entry]) -> list[str]:
    rows = [[name, value] for name, value in _facts(entries).items() if name != REHEARSAL]
    return ["## Machine", _table(["what", "version"], rows)] if rows else []


def _row(entry: Entry) -> list[str]:
    figures = {} if entry.what == MACHINE else entry.figures
    shown = "; ".join(f"{name} {value}" for name, value in figures.items())
    return [entry.what, entry.result, f"{entry.seconds:.1f}", shown]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _failures(entries: list[Entry]) -> list[str]:
    failed = [entry for entry in entries if entry.result == "failed"]
    blocks = ["## What failed"] if failed else []
    for entry in failed:
        lines = entry.detail.rstrip().splitlines()[-TAIL:]
        blocks += [f"### {entry.what}", "\n".join(f"    {line}".rstrip() for line in lines)]
    return blocks


def _skips(entries: list[Entry]) -> list[str]:
    lines = [f"- {entry.what}: {_cell(entry.detail)}" for entry in entries if entry.result == "skipped"]
    return ["## What was skipped", "\n".join(lines)] if lines else []


def main(arguments: list[str]) -> int:
    """Print the page of the report that is named."""
    if len(arguments) != 1:
        print("usage: python scripts/gpu_page.py REPORT.xml", file=sys.stderr)
        return 2
    try:
        page = write(*read(Path(arguments[0])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
