"""The command tasks: lists the tasks of reasoning-gym, or measures which of them a model can learn."""

import argparse
from datetime import datetime
from typing import Any

from openrlhf_dbb import tasks
from openrlhf_dbb.evaluation.command import Options, evaluate
from openrlhf_dbb.terminal import print_table, shown

_FIRST = (
    "chain_sum,basic_arithmetic,products,lcm,gcd,decimal_chain_sum,simple_equations,number_sequence,leg_counting,"
    "letter_counting"
)
_SMOLLM2 = "smollm2"
_PROBLEMS = 16  # of each task


def add_commands(add: Any) -> None:
    """Declare the command tasks by ``cli.main``'s function."""
    parser = add("tasks", command, opens_store=False)
    text = (
        f"try this model on {_PROBLEMS} problems of each: a folder, one on the hub, or {_SMOLLM2}"
    )
    parser.add_argument("--model", help=text)
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=64,
        metavar="N",
        help="limit on response length (default: %(default)s)",
    )
    some = "only these, as chain_sum?max_terms=2 with settings (default: all; with --model ten of arithmetic)"
    parser.add_argument("--tasks", metavar="TASK,...", help=some)


def command(arguments: argparse.Namespace) -> None:
    """Print an example of each task; with a model, evaluate it on some problems of each."""
    if arguments.model is None:
        rows = tasks.examples(arguments.tasks and arguments.tasks.split(","))
        print_table(
            ("task", "answer", "question"), [(name, shown(a, 20), shown(q)) for name, a, q in rows]
        )
        return
    from openrlhf_dbb.presets import smollm2

    name = model = arguments.model
    if name == _SMOLLM2:
        smollm2.prepare(smollm2.default_folder())
        model = str(smollm2.default_folder() / "model")
    specs = [
        tasks.PREFIX + tasks.sized(task, _PROBLEMS)
        for task in (arguments.tasks or _FIRST).split(",")
    ]
    name = f"tasks-{name.rstrip('/').rpartition('/')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    groups: dict[str, Any] = {"n": 8, "runs": 1, "temperature": 1.0, "top_p": 1.0}  # as in training
    evaluate(
        Options(
            model, ",".join(specs), max_new_tokens=arguments.max_new_tokens, name=name, **groups
        )
    )
