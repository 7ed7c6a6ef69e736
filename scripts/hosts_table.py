"""Prints the table of what each trainer can do, in Markdown, with the reasons for what it cannot.

python scripts/hosts_table.py            prints it
python scripts/hosts_table.py --write    puts it between the markers of docs/hosts.md
"""

import argparse
import re
from pathlib import Path

from openrlhf_dbb.core.host import FEATURES, Feature, Host
from openrlhf_dbb.integrations.hosts import HOSTS

PAGE = Path(__file__).parents[1] / "docs" / "hosts.md"
BEGIN = "<!-- hosts: python scripts/hosts_table.py --write -->\n"
END = "<!-- end of hosts -->"


def table() -> str:
    """Return what all trainers can do, the other features by trainers, and why a trainer lacks some."""
    shared = [feature.name for feature in FEATURES if all(_can(host, feature) for host in HOSTS)]
    lines = [
        f"All of them have: {', '.join(shared)}.",
        "",
        "| feature | " + " | ".join(host.name for host in HOSTS) + " |",
        "| --- |" + " --- |" * len(HOSTS),
    ]
    for feature in FEATURES:
        if feature.name not in shared:
            cells = ["yes" if _can(host, feature) else "no" for host in HOSTS]
            lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    reasons = []
    for host in HOSTS:
        for reason, names in _without(host).items():
            shown = re.sub(r"[\w.]*_[\w.]*", r"`\g<0>`", reason)  # names of code
            reasons.append(f"- {host.name}: {', '.join(names)}, since {shown}")
    if reasons:
        lines += ["", "Where it says no:", "", *reasons]
    return "\n".join(lines) + "\n"


def _can(host: Host, feature: Feature) -> bool:
    return feature.needs is None or feature.needs not in host.lacks


def _without(host: Host) -> dict[str, list[str]]:
    """Return the features that a trainer lacks, by reason."""
    names: dict[str, list[str]] = {}
    for feature in FEATURES:
        if not _can(host, feature):
            assert feature.needs is not None
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
