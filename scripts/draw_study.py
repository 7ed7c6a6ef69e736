"""Redraw the study from its CSV files: tables, figures, page, and the tables within its document.

    python scripts/draw_study.py [--data docs/study] [--output docs/study]        seconds; needs no training stack

Writes ``OUTPUT/*.png``, ``OUTPUT/tables.md`` and ``OUTPUT/index.html``. In ``OUTPUT.md`` (docs/study.md), if there,
what stands between ``<!-- table NAME -->`` and ``<!-- end -->`` is replaced by the table of that name in tables.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from openrlhf_dbb.errors import UsageError
from study.page import draw

FOLDER = Path(__file__).parents[1] / "docs" / "study"


def main() -> None:
    """Draw, and print what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the CSV files (default docs/study)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to (default docs/study)")
    options = parser.parse_args()
    try:
        for path in draw(options.data, options.output):
            print(path)
    except UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
