"""``python -m study``: train a protocol's runs, measure, collect and draw.

The same command continues after an interruption: finished runs, measurements and tasks are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_dbb.errors import UsageError
from storage import StoreError
from study import rare, reproduce, simulate

COMPARED, SEEDS = ("n2", "n4", "n8", "hard"), 8
"""Experiments that the control repeats by default, and on how many seeds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if runs failed, after all others were trained; 2, with one line on stderr, if the request cannot be carried
        out; 130 if interrupted.
    """
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
        description="Train the runs of a protocol, measure gradients, collect results, draw tables and figures. "
        "The same command continues after an interruption.",
    )
    parser.set_defaults(command=_study)
    parser.add_argument(
        "--protocol", default="cpu", metavar="NAME", help="cpu, paper, smoke, gpu, or a .toml file (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("study-runs"), metavar="DIR", help="folder (%(default)s)")
    parser.add_argument("--experiments", default="", metavar="NAME,...", help="only these (all of the protocol)")
    parser.add_argument("--seeds", type=int, metavar="K", help="only the first K seeds of each experiment")
    parser.add_argument("--lanes", type=int, metavar="L", help="runs side by side (one per core; one with CUDA)")
    parser.add_argument("--separate", action="store_true", help="restart Ray and the engines for every run")
    parser.add_argument("--list", action="store_true", help="print the runs that would be trained, and exit")
    commands = parser.add_subparsers(metavar="COMMAND")
    lane = commands.add_parser("lane", help="train command lines read from standard input (used by the command itself)")
    lane.set_defaults(command=_lane)
    control = commands.add_parser("control", help="repeat experiments in plain PyTorch, float32, without the pipeline")
    control.add_argument("--shortest", type=int, default=0, metavar="T", help="tokens before a response may end (0)")
    control.set_defaults(command=_control)
    claims = commands.add_parser("reproduce", help="check the paper's claims, one by one")
    reproduce.add_commands(claims)
    simulate.add_command(commands)
    rare.add_command(commands)
    again = commands.add_parser("collect", help="collect and draw the finished runs while others are still training")
    again.add_argument("--into", type=Path, metavar="DIR", help="add to the CSV files of this folder, and draw there")
    again.set_defaults(command=_collect)
    return parser


def _study(arguments: argparse.Namespace) -> int:
    from study import measure, protocol, run

    for flag, value in (("--seeds", arguments.seeds), ("--lanes", arguments.lanes)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
    plan = protocol.load(arguments.protocol)
    chosen = plan.choose(_experiments(arguments), arguments.seeds)
    if arguments.list:
        print("\n".join(each.name for each in chosen))
        return 0
    print(f"protocol {plan.name}: {plan.description}", flush=True)
    lanes = arguments.lanes or run.default_lanes()
    failed = run.train(chosen, plan, arguments.output, lanes=lanes, separate=arguments.separate)
    for name, error in failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if plan.task:
        measure.measure_models(chosen, arguments.output)
        measure.measure_points(chosen, arguments.output, lanes)
        measure.measure_gradients(chosen, arguments.output, lanes)
    _collect(arguments)
    return 1 if failed else 0


def _control(arguments: argparse.Namespace) -> int:
    from study import measure, protocol, run

    if arguments.list:
        raise UsageError("--list prints the runs of the pipeline, which the control repeats; leave one of the two out")
    chosen = protocol.load(arguments.protocol).choose(_experiments(arguments) or COMPARED)
    arguments.output.mkdir(parents=True, exist_ok=True)
    lanes, seeds = arguments.lanes or run.default_lanes(), arguments.seeds or SEEDS
    measure.measure_control(chosen, arguments.output, lanes, seeds, arguments.shortest)
    return 0


def _lane(arguments: argparse.Namespace) -> int:
    from study import run

    run.lane()
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from study import draw, files, measure, run
    from study.collect import collect

    into = getattr(arguments, "into", None) or arguments.output
    collect(run.store_url(arguments.output), arguments.output, into)
    if into != arguments.output:
        for name, key in measure.KEYS.items():
            files.merge(arguments.output / name, into / name, key)
    written = draw.draw(into, into)
    print(f"{len(written)} files written in {into}; read {into / 'tables.md'}")
    return 0


def _experiments(arguments: argparse.Namespace) -> list[str]:
    return [name for name in arguments.experiments.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
