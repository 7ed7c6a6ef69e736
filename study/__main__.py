"""``python -m study``: train a protocol's runs, measure, collect and draw.

The same command continues after an interruption: finished runs, measurements and tasks are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.storage import StoreError
from study import protocol, rare, returns, simulate, spend
from study.rows import Study

RESULTS = TABLES = Path(__file__).parent / "results"
"""Rows of the runs that docs/evidence.md reports, and the tables that ``draw`` makes of them."""
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
COMPARED, SEEDS = ("n2", "n4", "n8", "hard"), 8
"""Experiments that the control repeats by default, and on how many seeds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if runs failed, 2 if the request cannot be carried out, 130 if interrupted."""
    from study import run

    arguments = parser().parse_args(sys.argv[1:] if argv is None else argv)
    run.quiet_imports()
    try:
        return int(arguments.command(arguments))
    except (UsageError, StoreError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m study",
        description="Train the runs of a protocol, collect results, draw tables and figures. "
        "The same command continues after an interruption.",
    )
    parser.set_defaults(command=_study)
    parser.add_argument(
        "--protocol",
        default="cpu",
        metavar="NAME",
        help="of study/protocols, or a .toml file (cpu)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("study-runs"),
        metavar="DIR",
        help="folder (%(default)s)",
    )
    parser.add_argument(
        "--experiments", default="", metavar="NAME,...", help="only these (all of the protocol)"
    )
    parser.add_argument(
        "--seeds", type=_positive, metavar="K", help="only the first K seeds of each experiment"
    )
    parser.add_argument(
        "--lanes",
        type=_positive,
        metavar="L",
        help="runs side by side (one per core; one with CUDA)",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the runs that would be trained, and exit"
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    lane = commands.add_parser(
        "lane", help="train command lines read from standard input (used by the command itself)"
    )
    lane.set_defaults(command=_lane)
    control = commands.add_parser(
        "control", help="repeat experiments in plain PyTorch, float32, without the pipeline"
    )
    control.set_defaults(command=_control)
    collected = commands.add_parser(
        "collect", help="collect and draw the finished runs while others train"
    )
    collected.set_defaults(command=_collect)
    drawn = commands.add_parser("draw", help="redraw study/results from its CSV files, in seconds")
    drawn.set_defaults(command=_draw)
    claims = commands.add_parser(
        "claims", help="the paper's claims and verdicts, or the runs that check them"
    )
    claims.add_argument(
        "ids",
        nargs="*",
        metavar="ID",
        help="train the runs of these claims that are missing (or all)",
    )
    claims.add_argument(
        "--scale",
        choices=("tiny", "smollm2", "gpu"),
        default="tiny",
        help="gpu: the paper's models (%(default)s)",
    )
    claims.set_defaults(command=_claims)
    simulate.add_command(commands)
    rare.add_command(commands)
    spend.add_command(commands)
    returns.add_command(commands)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _study(arguments: argparse.Namespace) -> int:
    from study import measure, run

    plan = protocol.load(arguments.protocol)
    chosen = plan.choose(_experiments(arguments), arguments.seeds)
    if arguments.list:
        print("\n".join(each.name for each in chosen))
        return 0
    print(f"protocol {plan.name}: {plan.description}", flush=True)
    lanes = arguments.lanes or run.default_lanes()
    failed = run.train(chosen, plan, arguments.output, lanes=lanes)
    if plan.task:
        measure.measure_models(chosen, arguments.output)
        measure.measure_points(chosen, arguments.output, lanes)
    if plan.forced:
        measure.measure_forced(chosen, plan.forced, arguments.output, lanes)
    _collect(arguments)
    return _report(failed)


def _report(failed: dict[str, str]) -> int:
    for name, error in failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _control(arguments: argparse.Namespace) -> int:
    from study import measure, run

    chosen = protocol.load(arguments.protocol).choose(_experiments(arguments) or COMPARED)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measure.measure_control(
        chosen, arguments.output, arguments.lanes or run.default_lanes(), arguments.seeds or SEEDS
    )
    return 0


def _lane(_: argparse.Namespace) -> int:
    from study import run

    run.lane()
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from study import collect, figures, rows, run

    collect.collect(run.store_url(arguments.output), arguments.output)
    study = rows.load(arguments.output)
    _write_tables(study, arguments.output)
    figures.draw(study, arguments.output)
    return 0


def _draw(_: argparse.Namespace) -> int:
    from study import cells, claims, draws, figures, rows

    for name in ("main", "real"):
        _write_tables(rows.load(RESULTS / name), TABLES / name)
    figures.draw(rows.load(RESULTS / "real"), FIGURES, ("estimates", "smollm2"))
    study, known = rows.load(*(RESULTS / name for name in ("main", "paper", "real"))), claims.load()
    results = claims.found(known, study)
    sections = [claims.summary(results), *map(cells.markdown, claims.tables(known, results, study))]
    _write_page(TABLES / "paper", "The paper, claim by claim", sections)
    figures.draw(
        rows.load(RESULTS / "main", RESULTS / "paper"), FIGURES, ("study_differences", "study_few")
    )
    _write_page(
        TABLES / "draws", draws.TITLE, map(cells.markdown, draws.report(RESULTS / "draws", FIGURES))
    )
    _draw_rival()
    _write_page(
        TABLES / "rare", rare.TITLE, map(cells.markdown, rare.report(RESULTS / "rare", FIGURES))
    )
    tables = spend.report(RESULTS / spend.NAME, FIGURES)
    _write_page(TABLES / spend.NAME, spend.TITLE, map(cells.markdown, tables))
    tables = returns.report(RESULTS / returns.NAME, FIGURES)
    _write_page(TABLES / returns.NAME, returns.TITLE, map(cells.markdown, tables))
    return 0


def _draw_rival() -> None:
    from study import cells, rival, rows

    plan = protocol.load(rival.NAME)
    measured = rows.finished(RESULTS / rival.NAME, forced=True)
    sections: list[str] = []
    for experiment, title in rival.PARTS.items():
        planned = {run.name for run in plan.choose([experiment])}
        kept = planned & measured
        if kept < planned:  # the protocol allows no test before the last run
            print(f"{experiment}: {len(kept)} of {len(planned)} runs, not drawn yet")
            continue
        sections.append(f"## {title}")
        tables = rival.report(RESULTS / rival.NAME, FIGURES, experiment)
        sections += map(cells.markdown, tables)
    if sections:
        _write_page(TABLES / rival.NAME, rival.TITLE, sections)


def _write_tables(study: Study, folder: Path) -> None:
    from study import cells, tables

    sections = [
        f"## {name}\n\n{cells.markdown(table)}" for name, table in tables.tables(study).items()
    ]
    _write_page(folder, "The study in tables", sections)


def _write_page(folder: Path, title: str, sections: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tables.md"
    path.write_text("\n\n".join([f"# {title}", *sections]) + "\n", encoding="utf-8")
    print(path)


def _claims(arguments: argparse.Namespace) -> int:
    from study import claims, rows

    known, study = claims.load(), rows.load(*(RESULTS / name for name in ("main", "paper", "real")))
    if not arguments.ids:
        results = claims.found(known, study)
        width = max(map(len, known))
        for name, claim in known.items():
            verdicts = "; ".join(
                f"{scale}: {claims.first(results[name, scale])}" for scale in claims.SCALES
            )
            print(f"{name:{width}}  {verdicts}\n{'':{width}}  {claim.says} ({claim.where})")
        return 0
    wanted = {
        run.name for claim in claims.choose(arguments.ids) for _, run in claim.runs(arguments.scale)
    }
    wanted -= set(study.runs.run)
    failed: dict[str, str] = {}
    for plan in map(protocol.load, claims.SCALES[arguments.scale]):
        missing = [
            run
            for run in plan.choose(_experiments(arguments), arguments.seeds)
            if run.name in wanted
        ]
        if arguments.list:
            print("\n".join(run.name for run in missing))
        elif missing:
            failed |= _train_claims(plan, missing, arguments)
    return _report(failed)


def _train_claims(
    plan: protocol.Protocol, missing: list[protocol.PlannedRun], arguments: argparse.Namespace
) -> dict[str, str]:
    from study import measure, run

    failed = run.train(
        missing, plan, arguments.output, lanes=arguments.lanes or run.default_lanes()
    )
    if plan.task:
        measure.measure_models(missing, arguments.output)
        return failed
    return failed | measure.evaluate(missing, plan, arguments.output)


def _experiments(arguments: argparse.Namespace) -> list[str]:
    return [name for name in arguments.experiments.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
