"""The laboratory: ``lab replay`` measures other estimators on a run's recorded successes.

It recommends one of them.
"""

import argparse
from typing import Any

import numpy as np

from openrlhf_dbb import options
from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.core.scale import own_estimator
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.lab.candidates import flags, label, sweep
from openrlhf_dbb.lab.replay import Outcome, Ranking, Visits, evaluate, rank, read, recommendation
from openrlhf_dbb.storage import RunRecord
from openrlhf_dbb.storage.decode import naming_damage
from openrlhf_dbb.terminal import json_text, print_table, safe

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes", "auto")  # the paper's, and auto


def add_commands(add: Any) -> None:
    """Add ``lab`` and its commands to the command line."""
    lab: argparse.ArgumentParser = add("lab", lambda _: lab.print_help(), opens_store=False)
    text = (
        "how other estimators would have done on the recorded successes of a run, "
        "and which one to use"
    )  # fmt: skip
    commands = lab.add_subparsers(metavar="COMMAND", title="commands")
    parser = commands.add_parser("replay", help=text, description=text)
    options.add_run(parser)
    options.add_store(parser)
    text = (
        "candidates; NAME:discount=0.4,... for a single one "
        "(default: the paper's, auto, and the run's own)"
    )  # fmt: skip
    parser.add_argument("--estimators", nargs="+", metavar="NAME", help=text)
    options.add_json(parser)
    parser.set_defaults(command=_command)


@naming_damage("the run to replay")
def _command(arguments: argparse.Namespace) -> None:
    run, visits = read(arguments.store_url, arguments.run)
    own = own_estimator(run)
    candidates = _candidates(arguments.estimators, own)
    outcomes = [evaluate(candidate, visits) for candidate in candidates]
    ranking = rank(outcomes, visits)
    advice = recommendation(ranking, visits)
    if arguments.json:
        rows = [_json_row(outcome, ranking.criterion) for outcome in outcomes]
        print(json_text({"run": run.name, "candidates": rows, "recommendation": advice}))
        return
    print(safe(_heading(run, own, visits)))
    print()
    _print_best(ranking, outcomes)
    print(f"{len(outcomes)} candidates; --json prints them all\n")
    print("\n".join(map(safe, advice)))


def _candidates(texts: list[str] | None, own: RewardEstimator | None) -> list[RewardEstimator]:
    """Return the candidates that the user names; by default the paper's, auto and the run's own."""
    if texts:
        return sweep(texts)
    candidates = sweep(ESTIMATORS)
    if own is not None and own not in candidates:
        candidates.append(own)
    return candidates


def _json_row(outcome: Outcome, criterion: str) -> dict[str, Any]:
    return {
        "estimator": outcome.label,
        "flags": flags(outcome.estimator),
        "criterion": criterion,
        **outcome.measures(),
    }


def _heading(run: RunRecord, own: RewardEstimator | None, visits: Visits) -> str:
    trained = "an estimator unknown here" if own is None else label(own)
    if run.method == IMPORTED:
        trained = "an estimator that its log does not tell"
    probed = np.sum(~np.isnan(visits.probes_3_V[0]))
    return (
        f"run {run.name}: {len(visits.step)} visits of {visits.prompts} prompts, "
        f"{visits.rollouts.mean():.3g} rollouts a visit, {probed} visits with probes; "
        f"trained with {trained}"
    )


def _print_best(ranking: Ranking, outcomes: list[Outcome]) -> None:
    """Print the best candidate of each estimator, then those that cannot be ranked."""
    shown = [ranking.candidates[at] for at in ranking.best_of_each()]
    shown += [outcome for outcome in outcomes if outcome.mean(ranking.criterion) is None]
    header = ["best of each", *shown[0].measures()]
    print_table(header, [(outcome.label, *outcome.measures().values()) for outcome in shown])
