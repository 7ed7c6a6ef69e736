"""The commands that maintain a store: prune, migrate, check."""

from __future__ import annotations

import argparse
from typing import Any

from openrlhf_dbb.inspect.show import RUN_HELP
from openrlhf_dbb.terminal import shown
from storage import PosteriorStore, migrate
from storage.invariants import check
from storage.retention import prune

_WIDTH = 500


def add_commands(add: Any) -> None:
    """Declare the commands; ``add`` is that of ``cli.posteriors``."""
    parser = add("prune", prune_run, "delete old steps of a run's history; posteriors and totals stay")
    parser.add_argument("run", metavar="RUN", help=RUN_HELP.partition(" (")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep-last", type=int, metavar="K", help="keep the last K steps")
    which.add_argument("--before", type=int, metavar="STEP", help="delete the steps before this one")
    parser.add_argument(
        "--drop-checkpoints",
        action="store_true",
        help="give up resuming from older model checkpoints that need the deleted steps",
    )
    upgrade = add("migrate", migrate_store, "upgrade an older database to this release", opens_store=False)
    upgrade.add_argument(
        "--store.take_over",
        dest="take_over",
        action="store_true",
        help="even if it cannot be checked from here whether a run is still training",
    )
    add("check", check_store, "verify that the database is consistent; exit code 1 if not")


def prune_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = store.find_run(arguments.run)
    result = prune(
        store,
        run,
        keep_last=arguments.keep_last,
        before=arguments.before,
        drop_checkpoints=arguments.drop_checkpoints,
    )
    freed = "" if result.bytes_freed is None else f"; {result.bytes_freed / 1e6:.1f} MB freed for new rows"
    print(
        f"run {run.name}: deleted {result.history_rows} history rows, {result.probes} probe rows and "
        f"{result.checkpoints} checkpoints of {result.steps} steps{freed}"
    )


def migrate_store(arguments: argparse.Namespace) -> None:
    before, now = migrate(arguments.store_url, take_over=arguments.take_over)
    if before == now:
        print(f"schema version {now} is up to date")
    else:
        print(f"upgraded from schema version {before} to {now}")


def check_store(store: PosteriorStore, arguments: argparse.Namespace) -> int:
    found = check(store)
    if not found:
        print(f"the database is consistent; runs checked: {len(store.runs())}")
        return 0
    for violation in found:
        about = f"run {violation.run}, {violation.where}" if violation.run else violation.where
        print(shown(f"{about}; must hold: {violation.what}", _WIDTH))
    return 1
