"""The command evaluate: a model on benchmarks; ``compare`` shows differences and needs no torch."""

import argparse
import dataclasses
import warnings
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import compare
from openrlhf_dbb.evaluation.flags import ENGINES, OUTPUT, SAMPLED, Options
from openrlhf_dbb.options import add_store, add_trust, require_stack


def add_commands(add: Any) -> None:
    parser = add("evaluate", command, opens_store=False)
    parser.usage = "%(prog)s --model MODEL --benchmarks NAME,... [flags]\n       %(prog)s compare ..."
    parser.epilog = "Repeat a stopped evaluation to continue it."
    groups = {"": parser} | {title: parser.add_argument_group(title) for title in (SAMPLED, ENGINES, OUTPUT)}
    for each in dataclasses.fields(Options):
        if each.metadata:
            form = dict(each.metadata)
            short = ["-o"] if each.name == "output" else []
            groups[form.pop("group")].add_argument(*short, f"--{each.name}", default=each.default, **form)
    add_trust(parser)
    add_store(groups[OUTPUT])
    compare.add_command(parser.add_subparsers(prog=parser.prog, metavar="COMMAND", title="commands, instead of flags"))


def command(arguments: argparse.Namespace) -> None:
    """Evaluate a model. Raise UsageError, StoreError, or RayError if an engine fails."""
    if arguments.model is None or arguments.benchmarks is None:
        raise UsageError("evaluate needs --model and --benchmarks, or the command compare")
    evaluate(Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}))


def evaluate(options: Options) -> None:
    require_stack("openrlhf-dbb evaluate --model")
    # From torch's import of a package that OpenRLHF pins; users can do nothing about it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    from openrlhf_dbb.evaluation import pipeline
    from openrlhf_dbb.platform import cpu, cuda

    if cpu.active():
        cpu.prepare_driver()
    else:
        cuda.check_machine()
    pipeline.evaluate(options)
