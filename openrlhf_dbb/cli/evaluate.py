"""The command evaluate: a model on benchmarks; ``compare`` shows differences and needs no torch."""

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any

from openrlhf_dbb import options
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, compare
from openrlhf_dbb.evaluation.options import Options


def add_commands(add: Any) -> None:
    parser = add("evaluate", evaluate, opens_store=False)
    parser.usage = "%(prog)s --model MODEL --benchmarks NAME,... [flags]\n       %(prog)s compare ..."
    parser.epilog = "Repeat a stopped evaluation to continue it."
    _add_arguments(parser)
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", title="commands, instead of flags")
    compare.add_command(commands)


def evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate a model. Raise UsageError, StoreError, or RayError if an engine fails."""
    if arguments.model is None or arguments.benchmarks is None:
        raise UsageError("evaluate needs --model and --benchmarks, or the command compare")
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}
    run(Options(**{name: value for name, value in given.items() if value is not None}))


def run(chosen: Options) -> None:
    options.require_stack("openrlhf-dbb evaluate --model")
    # From torch's import of a package that OpenRLHF pins; users can do nothing about it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    from openrlhf_dbb.evaluation import pipeline
    from openrlhf_dbb.platform import cpu, cuda

    if cpu.active():
        cpu.prepare_driver()
    else:
        cuda.check_machine()
    pipeline.evaluate(chosen)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    run = "folder of a run (its best model by validation, else its last)"
    parser.add_argument("--model", help=f"{run}, of a model (runs/RUN/model: the last), or a model on the hub")
    names = ", ".join(benchmarks.NAMES)
    known = f"any of {names}; NAME=FILE (prompts verbatim); a .toml file; or reasoning_gym:TASK"
    parser.add_argument("--benchmarks", metavar="NAME,...", help=known)
    options.add_trust(parser)
    size, heat, share = options.number(int, 1), options.number(float, 0), options.number(float, 0, 1, above=True)
    sampled = parser.add_argument_group("what is sampled")
    sampled.add_argument("--n", type=size, help=f"samples per prompt in each run (default: {Options.n})")
    sampled.add_argument("--runs", type=size, help=f"independent runs (default: {Options.runs})")
    sampled.add_argument("--temperature", type=heat, metavar="T", help=f"0 is greedy (default: {Options.temperature})")
    sampled.add_argument("--top_p", type=share, metavar="P", help=f"nucleus sampling (default: {Options.top_p})")
    limit = "limit on response length (default: the benchmark's: 4096)"
    sampled.add_argument("--max_new_tokens", type=size, metavar="N", help=limit)
    sampled.add_argument("--seed", type=int, help=f"seed of the engines (default: {Options.seed})")
    sampled.add_argument("--limit", type=size, metavar="K", help="only the first K prompts of each benchmark")
    chat = "apply the model's chat template to prompts (default: as the benchmark says)"
    sampled.add_argument("--chat_template", action=argparse.BooleanOptionalAction, help=chat)
    engines = parser.add_argument_group("engines")
    engines.add_argument("--engines", type=size, metavar="E", help="vLLM engines (default: all GPUs; one without CUDA)")
    engines.add_argument("--tensor_parallel_size", type=int, metavar="N", help="GPUs an engine (default: 1)")
    memory = f"share of a GPU's memory (default: {Options.gpu_memory_utilization})"
    engines.add_argument("--gpu_memory_utilization", type=float, metavar="F", help=memory)
    engines.add_argument("--verbose", action="store_true", help="show the output of the engines")
    places = parser.add_argument_group("output")
    folder = f"folder for evaluations (default: {Options.output})"
    places.add_argument("-o", "--output", metavar="DIR", type=Path, help=folder)
    places.add_argument("--name", help="name of this evaluation (default: the model's)")
    places.add_argument("--run", help="training run that made this model; the results are stored with it")
    options.add_store(places)
