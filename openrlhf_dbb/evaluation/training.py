"""Evaluations during a training of OpenRLHF: their flags, what follows from others, what is refused."""

import argparse
from dataclasses import dataclass

from openrlhf_dbb.chosen import Values
from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.options import number


@dataclass(frozen=True)
class Evaluations:
    """When a training evaluates: every ``steps`` steps; -1: never."""

    steps: int


EVALUATIONS: Rules[Evaluations] = Rules()


@EVALUATIONS.add
def no_steps_between(evaluations: Evaluations) -> Refusal:
    """OpenRLHF divides by the steps."""
    if evaluations.steps >= 1 or evaluations.steps == -1:
        return None
    return f"--eval.steps {evaluations.steps}: too low; give 1 or more, or -1 for never"


def add_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of evaluations that OpenRLHF does not have."""
    group.add_argument(
        "--eval.benchmarks",
        metavar="NAME,...",
        help="evaluate these every --eval.steps; evaluate --help lists them",
    )
    group.add_argument(
        "--eval.top_p",
        type=number(float, 0, 1, above=True),
        metavar="P",
        help="of evaluations, in (0, 1]; default: --rollout.top_p",
    )


def sampling(run: Values) -> None:
    """Evaluations sample as the training does, unless somebody says otherwise."""
    if run.values["eval.top_p"] is None:
        run.put({"eval.top_p": run.values["rollout.top_p"]}, "--rollout.top_p")
