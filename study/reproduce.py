"""List the paper's claims, train the runs that check them, and report the verdicts.

python -m study reproduce list
python -m study reproduce run dbb-beats-grpo --scale tiny
python -m study reproduce report
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from openrlhf_dbb.cli import stack
from openrlhf_dbb.errors import UsageError
from study import claims, protocol
from study.claims import SCALES, Claim
from study.data import Study
from study.protocol import PlannedRun, Protocol

KNOWN = ("study/results/main", "study/results/paper")
"""Folders with rows of earlier runs, in a checkout."""
Planned = list[tuple[Protocol, PlannedRun]]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Declare the commands of ``python -m study reproduce``."""
    parser.epilog = "A run serves every claim that it answers, and is made once."
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    every = commands.add_parser("list", help="the claims, and what was found", description="The claims, and verdicts.")
    every.set_defaults(command=_list)
    run = commands.add_parser("run", help="train what a claim needs", description="Train the runs that claims need.")
    run.set_defaults(command=_run)
    run.add_argument("claims", nargs="+", metavar="ID", help="claims, or all")
    run.add_argument("--scale", choices=list(SCALES), default="tiny", help="tiny: on two cores; gpu: the paper's")
    run.add_argument("--seeds", type=int, metavar="K", help="only the first K seeds of each experiment")
    run.add_argument("--hours", type=float, metavar="H", help="start no run after H hours; the same command continues")
    run.add_argument("--lanes", type=int, metavar="L", help="runs side by side (one per core; one with CUDA)")
    run.add_argument("--dry_run", action="store_true", help="print the runs that are missing, and train none")
    report = commands.add_parser("report", help="write the tables", description="Collect and tabulate.")
    report.set_defaults(command=_report)
    for each in (run, report):
        each.add_argument(
            "--output", type=Path, default=Path("paper-runs"), metavar="DIR", help="folder of the runs (%(default)s)"
        )
    report.add_argument(
        "--into", type=Path, metavar="DIR", help="collect into this folder and write DIR/tables.md (OUTPUT/paper)"
    )
    for each in (every, run, report):
        each.add_argument(
            "--known", type=Path, nargs="*", default=None, metavar="DIR",
            help=f"folders with rows of earlier runs ({', '.join(KNOWN)}, where they exist)",
        )  # fmt: skip


def _known(arguments: argparse.Namespace) -> list[Path]:
    """The folders with rows of earlier runs.

    Raises:
        UsageError: one that was named does not exist.
    """
    if arguments.known is None:
        return [path for path in map(Path, KNOWN) if (path / "runs.csv").is_file()]
    for path in arguments.known:
        if not (path / "runs.csv").is_file():
            raise UsageError(f"--known {path}: no runs.csv there; name a folder that reproduce report has written")
    return list(arguments.known)


def _rows(folders: Sequence[Path]) -> Study:
    from study import files

    study = Study()
    for folder in folders:
        study += files.load(folder)
    return study


def _list(arguments: argparse.Namespace) -> int:
    from study import paper_page

    known = claims.load()
    results = paper_page.found(known, _rows(_known(arguments)))
    width = max(map(len, known))
    for name, claim in known.items():
        said = "; ".join(f"{scale}: {results[name, scale][0].verdict}" for scale in SCALES)
        print(f"{name:{width}}  {said}\n{'':{width}}  {claim.says} ({claim.where})")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    for flag in ("seeds", "lanes", "hours"):
        value = getattr(arguments, flag)
        if value is not None and not value > 0:
            raise UsageError(f"--{flag} {value:g}: give a number above 0")
    chosen = claims.choose(arguments.claims)
    done = {row.run for row in _rows(_known(arguments)).runs}
    missing = _missing(chosen, arguments, done)
    if arguments.dry_run:
        print("\n".join(run.name for _, run in missing) or "no run is missing")
        return 0
    if not missing:
        print("no run is missing; python -m study reproduce report writes what was found")
        return 0
    stack.require("python -m study reproduce run")
    return _train(missing, arguments)


def _missing(chosen: Sequence[Claim], arguments: argparse.Namespace, done: set[str]) -> Planned:
    """The runs that the claims need, each once, in the order of the protocols; without those whose rows are known."""
    wanted = {run.name for claim in chosen for _, run in claim.runs(arguments.scale)}
    return [
        (plan, run)
        for plan in map(protocol.load, SCALES[arguments.scale])
        for run in plan.choose(list(dict.fromkeys(run.experiment for run in plan.runs)), arguments.seeds)
        if run.name in wanted - done
    ]


def _train(missing: Planned, arguments: argparse.Namespace) -> int:
    from study import measure, run

    run.quiet_imports()
    failed: dict[str, str] = {}
    lanes = arguments.lanes or run.default_lanes()
    until = time.monotonic() + 3600 * arguments.hours if arguments.hours else math.inf
    for plan in {plan.name: plan for plan, _ in missing}.values():
        of_plan = [each for whose, each in missing if whose.name == plan.name]
        if not plan.task:  # the study's own task is made here
            run.refuse_early(of_plan, plan, arguments.output)
        failed |= run.train(of_plan, plan, arguments.output, lanes=lanes, until=until)
        if plan.task:
            measure.measure_models(of_plan, arguments.output)
        else:
            failed |= measure.evaluate(of_plan, plan, arguments.output, until)
    for name, error in failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _report(arguments: argparse.Namespace) -> int:
    from study import paper_page, run
    from study.collect import collect

    into = arguments.into or arguments.output / "paper"
    known = _known(arguments)
    if (arguments.output / run.STORE).is_file():
        collect(run.store_url(arguments.output), arguments.output, into)
        known = [path for path in known if path.resolve() != into.resolve()] + [into]
    elif not known:
        raise UsageError(
            f"--output {arguments.output} holds no runs, and no folder with rows of earlier ones is known; "
            "train some with python -m study reproduce run, or name --known DIR"
        )
    for path in paper_page.write(claims.load(), _rows(known), into):
        print(path)
    return 0
