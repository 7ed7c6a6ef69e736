"""Redraw the study from its CSV files: tables and figures.

    python -m study.draw [--data study/results/main] [--output study/results/main]

Takes seconds and needs no training stack. Writes ``OUTPUT/tables.md`` and ``OUTPUT/*.png``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from openrlhf_dbb.errors import UsageError

RESULTS = Path(__file__).parent / "results"
FOLDER = RESULTS / "main"


def draw(data: Path, output: Path) -> list[Path]:
    """Write the tables and figures that the data allow.

    Args:
        data: folder of the CSV files.
        output: folder to write to; it is created if needed.

    Returns:
        The files written.

    Raises:
        UsageError: the data cannot be used, or matplotlib or scipy is not installed.
    """
    from study import figures, files, tables

    study = files.load(data)
    written = figures.draw(study, output)
    path = output / "tables.md"
    sections = [f"## {name}\n\n{text}" for name, text in tables.build(study).items()]
    path.write_text("# The study in tables\n\n" + "\n\n".join(sections) + "\n", encoding="utf-8")
    return [*written, path]


def main() -> None:
    """Draw, and print the files that were written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the CSV files (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to (default: %(default)s)")
    options = parser.parse_args()
    try:
        for path in draw(options.data, options.output):
            print(path)
    except UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
