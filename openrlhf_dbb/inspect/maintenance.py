"""The commands that maintain a store: prune, migrate, check."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from openrlhf_dbb import options
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.terminal import print_json, shown
from storage import PosteriorStore, PruneResult, migrate
from storage.invariants import check
from storage.retention import prune

_WIDTH = 500


def add_commands(add: Any) -> None:
    """Declare the commands; ``add`` is that of ``cli.main``."""
    parser = add("prune", prune_run)
    parser.add_argument("run", metavar="RUN", help=options.RUN_HELP.partition(" (")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep-last", type=int, metavar="K", help="keep the last K steps")
    which.add_argument("--before", type=int, metavar="STEP", help="delete the steps before this one")
    parser.add_argument(
        "--drop-checkpoints",
        action="store_true",
        help="give up resuming from older model checkpoints that need the deleted steps",
    )
    _add_consent(parser)
    upgrade = add("migrate", migrate_store, opens_store=False)
    options.add_store(upgrade)
    upgrade.add_argument(
        "--store.take_over",
        dest="take_over",
        action="store_true",
        help="even if it cannot be checked from here whether a run is still training",
    )
    _add_consent(upgrade)
    options.add_json(add("check", check_store))


def _add_consent(parser: Any) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")


def _agreed(arguments: argparse.Namespace, what: str) -> bool:
    """Whether to do ``what``; False for ``--dry-run``.

    Raises:
        UsageError: the answer was not yes, or nobody can be asked.
    """
    if arguments.yes and not arguments.dry_run:
        return True
    if arguments.dry_run:
        print(f"{what}; nothing was changed")
        return False
    if not sys.stdin.isatty():
        raise UsageError(f"{what}; repeat with --yes to do so, nobody can be asked here")
    print(f"{what}; type yes to do so: ", end="", flush=True)
    if sys.stdin.readline().strip() != "yes":
        raise UsageError("the answer was not yes; nothing was changed")
    return True


def prune_run(store: PosteriorStore, arguments: argparse.Namespace) -> None:
    run = store.find_run(arguments.run)
    drop = arguments.drop_checkpoints
    planned = prune(
        store, run, keep_last=arguments.keep_last, before=arguments.before, drop_checkpoints=drop, dry_run=True
    )
    if not planned.steps:
        print(f"run {run.name}: there is nothing to delete")
        return
    if not _agreed(arguments, f"this deletes {_rows(planned)} of run {run.name}"):
        return
    result = prune(store, run, before=planned.first_kept, drop_checkpoints=drop)
    freed = "" if result.bytes_freed is None else f"; {result.bytes_freed / 1e6:.1f} MB freed for new rows"
    print(f"run {run.name}: deleted {_rows(result)}{freed}")


def _rows(result: PruneResult) -> str:
    return (
        f"{result.history_rows:,} history rows, {result.usage_rows:,} usage rows, {result.probes:,} probe rows, "
        f"{result.rollouts:,} kept rollouts, {result.groups:,} groups and {result.checkpoints:,} checkpoints of "
        f"{result.steps:,} steps"
    )


def migrate_store(arguments: argparse.Namespace) -> None:
    before, now = migrate(arguments.store_url, dry_run=True)
    if before == now:
        print(f"schema version {now} is up to date")
        return
    what = f"this upgrades the database from schema version {before} to {now}, which older releases cannot read"
    if _agreed(arguments, what):
        migrate(arguments.store_url, take_over=arguments.take_over)
        print(f"upgraded from schema version {before} to {now}")


def check_store(store: PosteriorStore, arguments: argparse.Namespace) -> int:
    found = check(store)
    if arguments.json:
        print_json([vars(violation) for violation in found])
        return int(bool(found))
    if not found:
        print(f"the database is consistent; runs checked: {len(store.runs())}")
        return 0
    for violation in found:
        about = f"run {violation.run}, {violation.where}" if violation.run else violation.where
        print(shown(f"{about}; must hold: {violation.what}", _WIDTH))
    return 1
