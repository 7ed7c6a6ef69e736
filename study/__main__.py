"""The study command: ``python -m study`` trains a protocol's runs and draws what came out.

The same command continues what was stopped: finished runs, measured gradients and made tasks are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from storage import StoreError

PROGRAM = "python -m study"
COMPARED, SEEDS = ("n2", "n4", "n8", "hard"), 8
"""What the control repeats, on how many seeds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if runs failed, after all others were trained; 2, with one line on stderr, if what was asked cannot be
        done; 130 if interrupted.
    """
    arguments = parser().parse_args(sys.argv[1:] if argv is None else argv)
    # torch's import of a package that OpenRLHF pins; nobody who trains can do anything about it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    os.environ["PYTHONWARNINGS"] = "ignore:The pynvml package is deprecated:FutureWarning"
    try:
        return int(arguments.command(arguments))
    except (UsageError, StoreError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train the runs of a protocol, measure gradients, collect results, draw tables and figures. "
        "The same command continues what was stopped.",
    )
    parser.set_defaults(command=_study)
    parser.add_argument(
        "--protocol", default="cpu", metavar="NAME", help="cpu, smoke, gpu, or a .toml file (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("study"), metavar="DIR", help="folder (%(default)s)")
    parser.add_argument("--experiments", default="", metavar="NAME,...", help="only these (all of the protocol)")
    parser.add_argument("--seeds", type=int, metavar="K", help="only the first K seeds of each experiment")
    parser.add_argument("--lanes", type=int, metavar="L", help="runs side by side (one for two cores; one with CUDA)")
    parser.add_argument("--separate", action="store_true", help="start Ray and the engines anew for every run")
    parser.add_argument("--list", action="store_true", help="say what would be trained, and end")
    commands = parser.add_subparsers(metavar="COMMAND")
    lane = commands.add_parser("lane", help="train command lines read from standard input (used by the command itself)")
    lane.set_defaults(command=_lane)
    control = commands.add_parser("control", help="repeat experiments in plain PyTorch, float32, without the pipeline")
    control.add_argument("--shortest", type=int, default=0, metavar="T", help="tokens before a response may end (0)")
    control.set_defaults(command=_control)
    again = commands.add_parser("collect", help="collect and draw what is finished, while other runs go on")
    again.add_argument("--into", type=Path, metavar="DIR", help="add to the CSV files of this folder, and draw there")
    again.set_defaults(command=_collect)
    return parser


def _study(arguments: argparse.Namespace) -> int:
    from study import measure, protocol, run

    if arguments.seeds is not None and arguments.seeds < 1:
        raise UsageError(f"--seeds {arguments.seeds} is out of range; give 1 or more")
    if arguments.lanes is not None and arguments.lanes < 1:
        raise UsageError(f"--lanes {arguments.lanes} is out of range; give 1 or more")
    plan = protocol.load(arguments.protocol)
    chosen = plan.choose([name for name in arguments.experiments.split(",") if name], arguments.seeds)
    if arguments.list:
        print("\n".join(each.name for each in chosen))
        return 0
    print(f"protocol {plan.name}: {plan.description}", flush=True)
    lanes = arguments.lanes or _lanes()
    outcome = run.train(chosen, plan, arguments.output, lanes=lanes, separate=arguments.separate)
    for name, error in outcome.failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if plan.task:
        measure.measure_models(chosen, arguments.output)
        measure.measure_gradients(chosen, arguments.output, lanes)
    _collect(arguments)
    return 1 if outcome.failed else 0


def _control(arguments: argparse.Namespace) -> int:
    from study import measure, protocol

    plan = protocol.load(arguments.protocol)
    asked = [name for name in arguments.experiments.split(",") if name] or list(COMPARED)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measure.measure_control(
        plan.choose(asked), arguments.output, arguments.lanes or _lanes(), arguments.seeds or SEEDS, arguments.shortest
    )
    return 0


def _lane(arguments: argparse.Namespace) -> int:
    from study import run

    run.lane()
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from study import measure, page, run
    from study.collect import collect, merge

    into = getattr(arguments, "into", None) or arguments.output
    collect(run.store_url(arguments.output), arguments.output, into)
    if into != arguments.output:
        for name, key in measure.KEYS.items():
            merge(arguments.output / name, into / name, key)
    written = page.draw(into, into)
    print(f"{len(written)} files drawn in {into}; open {into / 'index.html'}")
    return 0


def _lanes() -> int:
    """A lane uses a core and a half; more lanes than GPUs cannot be."""
    import torch

    if torch.cuda.is_available():
        return 1
    cores: Any = os.cpu_count()
    return max(1, cores)


if __name__ == "__main__":
    sys.exit(main())
