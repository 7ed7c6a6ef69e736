"""Redraw the study from its CSV files: figures, tables, page, and the tables in its document.

    python -m study.draw [--data docs/study] [--output docs/study]        takes seconds; needs no training stack

Writes ``OUTPUT/*.png``, ``OUTPUT/tables.md`` and ``OUTPUT/index.html``. If ``OUTPUT.md`` (docs/study.md) exists, what
stands in it between ``<!-- table NAME -->`` and ``<!-- end -->`` is replaced by the table of that name in tables.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from openrlhf_dbb.errors import UsageError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "study"


def main() -> None:
    """Draw, and print the files that were written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the CSV files (default docs/study)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to (default docs/study)")
    options = parser.parse_args()
    from study.page import draw

    try:
        for path in draw(options.data, options.output):
            print(path)
    except UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
