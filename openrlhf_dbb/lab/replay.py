"""``lab replay`` measures other estimators on a run's recorded successes and recommends one of them."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_dbb import options
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.lab import recorded, scores, specs
from openrlhf_dbb.lab.recorded import Visits
from openrlhf_dbb.lab.scores import CRITERIA, DRAWS, Outcome, Ranking
from openrlhf_dbb.storage import RunRecord
from openrlhf_dbb.terminal import json_text, print_table, records

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes", "auto")  # the paper's, and auto

_FEW_PROMPTS = 30


def add_command(commands: Any) -> None:
    text = "how other estimators would have done on the recorded successes of a run, and which one to use"
    parser = commands.add_parser("replay", help=text, description=text)
    options.add_run(parser)
    options.add_store(parser)
    text = "candidates; NAME:discount=0.4,... for a single one (default: the paper's, auto, and the run's own)"
    parser.add_argument("--estimators", nargs="+", metavar="NAME", help=text)
    options.add_json(parser)
    parser.set_defaults(command=_command)


def _command(arguments: argparse.Namespace) -> None:
    run, visits = recorded.read(arguments.store_url, arguments.run)
    candidates = specs.sweep(arguments.estimators or ESTIMATORS)
    own = recorded.own_estimator(run)
    if own is not None and not arguments.estimators:
        candidates = list({specs.label(candidate): candidate for candidate in (*candidates, own)}.values())
    outcomes = [scores.evaluate(candidate, visits) for candidate in candidates]
    ranking = scores.rank(outcomes, visits)
    advice = recommendation(ranking, visits)
    if arguments.json:
        found = {"run": run.name, "candidates": _candidates(ranking, outcomes), "recommendation": advice}
        print(json_text(found))
        return
    print("\n".join(introduction(run, visits, own)))
    shown = [ranking.candidates[at] for at in ranking.best_of_each()]
    shown += [outcome for outcome in outcomes if outcome.mean(ranking.criterion) is None]  # those that cannot be ranked
    rows = [(outcome.label, *_measures(outcome).values()) for outcome in shown]
    print()
    print_table(("best of each", *_measures(shown[0])), rows)
    print(f"{len(outcomes)} candidates; --json prints them all\n")
    print("\n".join(advice))


def introduction(record: RunRecord, visits: Visits, own: RewardEstimator | None) -> list[str]:
    """Return lines about the run that is replayed, with the caveats."""
    several = visits.rollouts > 1  # one reward alone has no variance
    variance = ""
    if several.any():
        flat = ((visits.successes == 0) | (visits.successes == visits.rollouts))[several].mean()
        variance = f", {flat:.0%} of the groups have zero variance"
    lines = [
        f"run {record.name}: {len(visits.step)} visits of {visits.prompts} prompts, "
        f"{visits.rollouts.mean():.3g} rollouts a visit{variance}",
        f"trained with {f'{record.estimator}, unknown here without --estimators' if own is None else specs.label(own)}",
    ]
    if record.parent is not None:
        lines.append(
            f"warm-started from {record.parent['name']}; the candidates start from their own priors, which puts the "
            "first visits at a disadvantage"
        )
    if visits.lag.any():
        lines.append(f"lag: {visits.lag.mean():.3g} training steps on average, {visits.lag.max():.3g} at most")
    samples = visits.probes_3_V[0][~np.isnan(visits.probes_3_V[0])]
    if len(samples):
        lines.append(f"probes: {len(samples)} visits, {samples.mean():.3g} samples each")
    return lines


def recommendation(ranking: Ranking, visits: Visits) -> list[str]:
    """Return lines with the estimator to use next, and how sure that is."""
    if not visits.earlier.any():
        return [
            "Every prompt was visited once, so discounts cannot be compared: on a first visit a discount only weakens",
            "the prior. Keep the estimator, and replay again after the second pass.",
        ]
    lines = [f"criterion: {CRITERIA[ranking.criterion]}"]
    if visits.prompts < _FEW_PROMPTS:
        lines.append(f"only {visits.prompts} prompts: the intervals below say little")
    best = ranking.candidates[0]
    names = np.array([outcome.estimator.name for outcome in ranking.candidates])
    first = (names[ranking.draws_B_C.argmin(axis=1)] == best.estimator.name).mean()
    lines.append(f"best: {best.label}; {best.estimator.name} is first in {first:.0%} of {DRAWS} bootstrap draws")
    _, *others = ranking.best_of_each()
    if others:
        second = ranking.candidates[others[0]].label
        excess, low, high = (values[others[0]] for values in ranking.excess())
        relative = "" if ranking.criterion == "likelihood" else f" or {excess / ranking.mean_C[0]:.1%}"
        lines.append(f"second: {second}; worse by {excess:.2g}{relative} (95 %: {low:.2g} to {high:.2g})")
        if low <= 0:
            lines.append(f"this log cannot tell {best.label} from {second}: there may be no difference")
    discount = ranking.best_discount("dbb")
    if discount is not None:
        value, low, high = discount
        # An interval over half of all discounts says nothing about the best one.
        unsure = "; this log does not determine it" if high - low >= 0.5 else ""
        lines.append(f"best discount of dbb: {value:g} (95 %: {low:g} to {high:g}){unsure}")
    return [*lines, f"use next: {specs.flags(best.estimator)}"]


def _measures(outcome: Outcome) -> dict[str, Any]:
    likelihood = outcome.mean("likelihood")
    return {
        "mse (probes)": outcome.mean("probes"),
        "mse (log)": outcome.mean("mse"),
        "log-likelihood": None if likelihood is None else -likelihood,
        "zero-advantage groups": outcome.zero_groups,
        "mean |A|": outcome.mean_advantage,
    }


def _candidates(ranking: Ranking, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    names = ("excess over best", "excess low", "excess high")
    excess_C_3 = np.stack(ranking.excess(), axis=1).tolist()
    excess = {o.label: values for o, values in zip(ranking.candidates, records(names, excess_C_3), strict=True)}
    return [
        {"estimator": outcome.label, "flags": specs.flags(outcome.estimator)}
        | _measures(outcome)
        | {"criterion": ranking.criterion}
        | excess.get(outcome.label, {})
        for outcome in outcomes
    ]
