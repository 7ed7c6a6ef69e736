"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import argparse
from pathlib import Path

from storage import DEFAULT_URL, URL_VARIABLE, PosteriorStore, RunRecord, StoreError

RUN_HELP = "name, number or start of the uuid (default: the latest run)"


def add_run(parser: argparse._ActionsContainer) -> None:
    """Add ``RUN``, which :func:`chosen` reads."""
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)


def chosen(store: PosteriorStore, ref: str | None) -> RunRecord:
    """The run ``ref`` refers to, or the latest if None.

    Raises:
        StoreError: there is no such run.
    """
    if ref is not None:
        return store.find_run(ref)
    run = store.latest_run()
    if run is None:
        raise StoreError(f"there are no runs in {store.location}; start one first")
    return run


def add_store(parser: argparse._ActionsContainer) -> None:
    """Add ``--store.url``; without a default, as it may have been given before the command."""
    url = f"the store (default: ${URL_VARIABLE}, else {DEFAULT_URL})"
    parser.add_argument("--store.url", dest="store_url", metavar="URL", default=argparse.SUPPRESS, help=url)


def add_folder(parser: argparse._ActionsContainer, text: str, *, default: Path | None) -> None:
    """Add ``--output DIR`` for a command that writes several files."""
    text = f"{text} (default: {default or 'not written'})"
    parser.add_argument("-o", "--output", metavar="DIR", type=_folder, default=default, help=text)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document; what is not known is null")


def _folder(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("several files are written; name a folder, not -")
    return Path(text)
