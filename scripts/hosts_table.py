"""Prints the table of what each trainer can do, in Markdown, with the reasons for what it cannot.

python scripts/hosts_table.py            prints it
python scripts/hosts_table.py --write    puts it between the markers of docs/hosts.md
"""

import argparse
import re
from pathlib import Path

from openrlhf_dbb.core.host import FEATURES, Host
from openrlhf_dbb.integrations.hosts import HOSTS

PAGE = Path(__file__).parents[1] / "docs" / "hosts.md"
BEGIN = "<!-- hosts: python scripts/hosts_table.py --write -->\n"
END = "<!-- end of hosts -->"


def table() -> str:
    """Return the features by trainers, and below why a trainer lacks some."""
    lines = [
        "| feature | " + " | ".join(host.name for host in HOSTS) + " |",
        "| --- |" + " --- |" * len(HOSTS),
    ]
    for feature in FEATURES:
        cells = ["no" if feature.needs in host.lacks else "yes" for host in HOSTS]
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    reasons = []
    for host in HOSTS:
        for reason, names in _without(host).items():
            shown = re.sub(r"[\w.]*_[\w.]*", r"`\g<0>`", reason)  # names of code
            reasons.append(f"- {host.name}: {', '.join(names)}, since {shown}")
    if reasons:
        lines += ["", "Where it says no:", "", *reasons]
    return "\n".join(lines) + "\n"


def _without(host: Host) -> dict[str, list[str]]:
    """Return the features that a trainer lacks, by reason."""
    names: dict[str, list[str]] = {}
    for feature in FEATURES:
        if feature.needs is not None and feature.needs in host.lacks:
            names.setdefault(host.lacks[feature.needs], []).append(feature.name)
    return names


def with_table(page: str) -> str:
    """Return the text of a page with the table between the markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put it into docs/hosts.md")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
