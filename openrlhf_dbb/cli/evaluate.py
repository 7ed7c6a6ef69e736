"""The evaluate command: a model on benchmarks; ``compare`` and ``plot`` show results, and need no torch.

python -m openrlhf_dbb.cli.evaluate --model runs/my-run/model --benchmarks math500,minerva
python -m openrlhf_dbb.cli.evaluate compare my-run other-run
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks
from storage import DEFAULT_URL, URL_VARIABLE, StoreError

PROGRAM = "python -m openrlhf_dbb.cli.evaluate"
COMMANDS = {
    "compare": (
        "openrlhf_dbb.evaluation.compare",
        "are differences between evaluations real: paired tests over prompts, intervals",
    ),
    "plot": (
        "openrlhf_dbb.evaluation.dynamics",
        "figures of training: validation accuracy, reward, response length, entropy",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 2, with one line on stderr, if the request cannot be carried out; 130 if interrupted. A failed engine raises.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = (_commands(argv[0]) if argv and argv[0] in COMMANDS else parser()).parse_args(argv)
    try:
        arguments.command(arguments)
        sys.stdout.flush()
    except (UsageError, StoreError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe; nothing may be flushed into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _evaluate(arguments: argparse.Namespace) -> None:
    # From torch's import of a package that OpenRLHF pins; users can do nothing about it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    from openrlhf_dbb import cpu
    from openrlhf_dbb.evaluation import pipeline

    if cpu.active():
        cpu.prepare_driver()
    pipeline.evaluate(arguments)


def _commands(name: str) -> argparse.ArgumentParser:
    """The parser of one of ``COMMANDS``; only its module is imported."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], Any]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, description=COMMANDS[name][1])
        sub.set_defaults(command=command)
        return sub

    importlib.import_module(COMMANDS[name][0]).add_commands(add)
    return parser


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --model MODEL --benchmarks NAME,... [flags]\n       {PROGRAM} {{{','.join(COMMANDS)}}} ...",
        description="Sample and verify a model's answers to benchmarks. Repeat a stopped command to continue it.",
        epilog="\n".join(["commands:", *(f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_evaluate)
    parser.add_argument("--model", required=True, help="model folder (runs/RUN/model), or a model on the hub")
    parser.add_argument(
        "--benchmarks",
        required=True,
        metavar="NAME,...",
        help=f"any of {', '.join(benchmarks.names())}; NAME=FILE for a data file (prompts verbatim); or a .toml file",
    )
    asked = parser.add_argument_group("what is sampled")
    asked.add_argument("--n", type=int, default=8, help="samples per prompt in each run (%(default)s)")
    asked.add_argument("--runs", type=int, default=4, help="independent runs (%(default)s)")
    asked.add_argument("--temperature", type=float, default=0.6, metavar="T", help="0 is greedy (%(default)s)")
    asked.add_argument("--top_p", type=float, default=0.95, metavar="P", help="(%(default)s)")
    asked.add_argument(
        "--max_new_tokens", type=int, metavar="N", help="limit on response length (the benchmark's: 4096)"
    )
    asked.add_argument("--seed", type=int, default=0, help="seed of the first engine (%(default)s)")
    asked.add_argument("--limit", type=int, metavar="K", help="only the first K prompts of each benchmark")
    asked.add_argument(
        "--template", metavar="FILE", help="prompt template with {question}, instead of the benchmarks' own"
    )
    asked.add_argument(
        "--chat_template",
        action=argparse.BooleanOptionalAction,
        help="apply the model's chat template to prompts (as the benchmark says)",
    )
    asked.add_argument("--input_key", default="input", metavar="NAME", help="prompt column in NAME=FILE (%(default)s)")
    asked.add_argument("--label_key", default="label", metavar="NAME", help="answer column in NAME=FILE (%(default)s)")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--engines", type=int, metavar="E", help="number of vLLM engines (all GPUs; one without CUDA)")
    engines.add_argument(
        "--tensor_parallel_size", type=int, default=1, metavar="N", help="GPUs per engine (%(default)s)"
    )
    engines.add_argument("--gpu_memory_utilization", type=float, default=0.9, metavar="F", help="(%(default)s)")
    engines.add_argument("--max_model_len", type=int, metavar="N", help="longest prompt + response (as long as needed)")
    places = parser.add_argument_group("output")
    places.add_argument("--output", default="evaluations", metavar="DIR", help="folder for evaluations (%(default)s)")
    places.add_argument("--name", help="name of this evaluation (the model's)")
    places.add_argument("--run", help="training run that made this model; the results are stored with it")
    places.add_argument(
        "--store.url", dest="store_url", metavar="URL", help=f"the store (${URL_VARIABLE}, else {DEFAULT_URL})"
    )
    places.add_argument("--verbose", action="store_true", help="show the output of the engines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
