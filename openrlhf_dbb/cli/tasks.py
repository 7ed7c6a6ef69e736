"""The command tasks: lists the tasks of reasoning-gym, or measures which of them a model can learn."""

import argparse
from datetime import datetime
from typing import Any

from openrlhf_dbb import tasks
from openrlhf_dbb.evaluation.command import Options, evaluate
from openrlhf_dbb.options import add_trust
from openrlhf_dbb.terminal import print_table, shown

_FIRST = (
    "chain_sum,basic_arithmetic,products,lcm,gcd,decimal_chain_sum,simple_equations,number_sequence,leg_counting,"
    "letter_counting"
)
_SMOLLM2 = "smollm2"


def add_commands(add: Any) -> None:
    parser = add("tasks", command, opens_store=False)
    parser.add_argument("--model", help=f"try this model on them: a folder, one on the hub, or {_SMOLLM2}")
    add_trust(parser)
    some = "only these, as chain_sum?max_terms=2 with settings (default: all; with --model ten of arithmetic)"
    parser.add_argument("--tasks", metavar="TASK,...", help=some)
    number = "problems of each task, with 8 answers each (default: %(default)s)"
    parser.add_argument("--problems", type=int, default=16, metavar="P", help=number)
    limit = "limit on response length (default: %(default)s)"
    parser.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help=limit)


def command(arguments: argparse.Namespace) -> None:
    if arguments.model is None:
        rows = tasks.examples(arguments.tasks and arguments.tasks.split(","))
        print_table(("task", "answer", "question"), [(name, shown(a, 20), shown(q)) for name, a, q in rows])
        return
    from openrlhf_dbb.presets import smollm2

    name = model = arguments.model
    if name == _SMOLLM2:
        smollm2.prepare(smollm2.default_folder())
        model = str(smollm2.default_folder() / "model")
    specs = [tasks.PREFIX + tasks.sized(task, arguments.problems) for task in (arguments.tasks or _FIRST).split(",")]
    options = Options(  # groups as in training
        model,
        ",".join(specs),
        n=8,
        runs=1,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=arguments.max_new_tokens,
        name=f"tasks-{name.rstrip('/').rpartition('/')[2]}-{datetime.now():%Y%m%d-%H%M%S}",
        trust_remote_code=arguments.trust_remote_code,
    )
    evaluate(options)
