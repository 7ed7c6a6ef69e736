"""Prints the report of gpu_check.sh as a table: python scripts/gpu_table.py REPORT.xml

The peak is the most memory that one GPU had in use, of all processes, by nvidia-smi twice a second.
"""

import sys
import xml.etree.ElementTree as ElementTree

HEAD = ("GPU", "driver", "CUDA of torch", "commit", "rehearsal")
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
WHY = 60  # characters at most

facts, rows = {}, [("check", "result", "seconds", "peak GB", "why")]
# One that was interrupted has no name
for case in ElementTree.parse(sys.argv[1]).iterfind(".//testcase[@name]"):
    properties = {each.get("name"): each.get("value") for each in case.iter("property")}
    if case.get("name") == "test_machine":
        facts = properties
    outcomes = [each for each in case if each.tag in OUTCOMES]
    result = OUTCOMES[outcomes[0].tag] if outcomes else "passed"
    why = outcomes[0].get("message", "").partition("\n")[0] if outcomes else ""
    seconds = f"{float(case.get('time')):.1f}"
    rows.append(
        (
            case.get("name").removeprefix("test_"),
            result,
            seconds,
            properties.get("peak", "-"),
            why[:WHY],
        )
    )

for name in HEAD:
    if name in facts:
        print(f"{name:15}{facts[name]}")
print()
widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
for row in rows:
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
