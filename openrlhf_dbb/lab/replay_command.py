"""``lab replay``: what other estimators would have given on the recorded successes of a run, and which one to use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from estimators import RewardEstimator
from openrlhf_dbb import figures, options
from openrlhf_dbb.csv_files import write_csv
from openrlhf_dbb.lab import criteria, error_curves, recorded, specs
from openrlhf_dbb.lab.bootstrap import DRAWS
from openrlhf_dbb.lab.outcomes import CRITERIA, Outcome, Ranking, evaluate, judge, shown
from openrlhf_dbb.lab.recorded import RecordedRun
from openrlhf_dbb.lab.replay_figures import draw_advantages, draw_criterion
from openrlhf_dbb.lab.visits import Visits
from openrlhf_dbb.terminal import print_json, records, table

_FEW_PROMPTS = 30


def add_command(commands: Any) -> None:
    """Add ``replay`` to the sub-parsers of the laboratory's command."""
    text = "what other estimators would have given on the recorded successes of a run, and which one to use"
    parser = commands.add_parser("replay", help=text, description=text)
    options.add_run(parser)
    options.add_store(parser)
    parser.add_argument(
        "--estimators",
        nargs="+",
        metavar="NAME",
        help="candidates; NAME:discount=0.4,... for a single one (default: the paper's, auto, and the run's own)",
    )
    parser.add_argument(
        "--discounts",
        nargs="+",
        type=float,
        metavar="X",
        default=error_curves.DISCOUNTS,
        help="discounts (and smoothings) to try (default: 0.02 to 1)",
    )
    parser.add_argument(
        "--priors", nargs="+", type=recorded.prior, metavar="A,B", default=(), help="Beta priors to try (default: 1,1)"
    )
    text = (
        "what decides (default: probes if any, else mse, or likelihood where no group has two rollouts); likelihood "
        "favours longer memory, as forecasts need it"
    )
    parser.add_argument("--criterion", choices=CRITERIA, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    options.add_folder(parser, "for the files", default=Path("lab/replay"))
    options.add_json(parser)
    parser.set_defaults(command=replay)


def replay(arguments: argparse.Namespace) -> None:
    """Run ``lab replay``.

    Raises:
        UsageError, storage.StoreError: the run or a flag cannot be used.
    """
    run = recorded.read(arguments)
    folder = figures.folder(arguments.output)
    named = arguments.estimators or recorded.ESTIMATORS
    candidates = recorded.sweep(named, arguments.discounts, arguments.priors)
    own = recorded.own_estimator(run.record)
    tries_own = own is not None and own.features != "hidden" and not arguments.estimators
    if own is not None and tries_own and specs.label(own) not in map(specs.label, candidates):
        candidates.append(own)
    outcomes = [evaluate(candidate, run.visits, run.probes) for candidate in candidates]
    usual = "probes" if run.probes is not None else "mse" if (run.visits.rollouts > 1).any() else "likelihood"
    criterion = arguments.criterion or usual
    ranking = judge(outcomes, run.visits, criterion, seed=arguments.seed)
    advice = recommendation(ranking, run.visits)
    if not arguments.json:
        print("\n".join(introduction(run, own)))
        print(f"\n{_table(ranking, outcomes, own)}\n")
        print("\n".join(advice), end="\n\n")
    paths = _write(folder, ranking, outcomes, run.visits)
    if arguments.json:
        found = {"run": run.record.name, "candidates": records(*csv_rows(ranking, outcomes))}
        print_json(found | {"recommendation": advice, "files": list(map(str, paths))})
    else:
        print(*paths, sep="\n")


def introduction(run: RecordedRun, own: RewardEstimator | None) -> list[str]:
    """What was replayed, and the caveats."""
    record, visits = run.record, run.visits
    several = visits.rollouts > 1  # one reward alone has no variance
    variance = ""
    if several.any():
        flat = ((visits.successes == 0) | (visits.successes == visits.rollouts))[several].mean()
        variance = f", {flat:.0%} of the groups have zero variance"
    lines = [
        f"run {record.name}: {len(visits.step)} visits of {visits.prompts} prompts, "
        f"{visits.rollouts.mean():.3g} rollouts a visit{variance}",
        f"trained with {specs.label(own) if own is not None else record.estimator + ', which is not installed here'}",
    ]
    if record.parent is not None:
        lines.append(
            f"warm-started from {record.parent['name']}: candidates are replayed from their own priors instead, "
            "which puts the first visits at a disadvantage"
        )
    if visits.lag.any():
        lines.append(f"lag: {visits.lag.mean():.3g} training steps on average, {visits.lag.max():.3g} at most")
    if run.probes is not None:
        lines.append(f"probes: {len(run.probes.visit)} visits, {run.probes.samples.mean():.3g} samples each")
    return lines


def recommendation(ranking: Ranking, visits: Visits) -> list[str]:
    """The estimator and the discount to use next, and how sure that is."""
    if not visits.earlier.any():
        return [
            "every prompt was visited once: discounts cannot be compared (on a first visit a discount only weakens the",
            "prior); keep what you have and replay again after the second pass",
        ]
    lines = [f"criterion: {CRITERIA[ranking.criterion]}"]
    if visits.prompts < _FEW_PROMPTS:
        lines.append(f"only {visits.prompts} prompts: the intervals below say little")
    bootstrap, best = ranking.bootstrap, ranking.best
    wins = bootstrap.wins([outcome.estimator.name for outcome in ranking.candidates])
    lines.append(f"best: {best.label}; {best.estimator.name} is first in {_percent(wins[best.estimator.name])} draws")
    lines += _second(ranking, visits)
    lines += _discount(ranking)
    return [*lines, f"use next: {recorded.flags(best.estimator)}"]


def _second(ranking: Ranking, visits: Visits) -> list[str]:
    """How far behind the best candidate of any other estimator is."""
    bootstrap, best = ranking.bootstrap, ranking.best
    at = next((ranking.best_of(name) for name in ranking.names()[1:]), None)
    if at is None:
        return []
    label = ranking.candidates[at].label
    excess, low, high = (values[at] for values in bootstrap.excess(bootstrap.best))
    relative = "" if ranking.criterion == "likelihood" else f" or {excess / bootstrap.mean_C[bootstrap.best]:.1%}"
    lines = [f"second: {label}; worse by {excess:.2g}{relative} (95 %: {low:.2g} to {high:.2g})"]
    if ranking.criterion == "mse" and best.estimator.shared_fields:
        optimism = criteria.OPTIMISM * float(np.nanmean(criteria.noise(visits))) / visits.prompts
        low -= optimism
        lines.append(f"{best.label} is fitted to these very groups, so its mse may be too low by {optimism:.2g}")
    if low <= 0:
        lines.append(f"this log cannot tell {best.label} from {label}: there may be no difference")
    return lines


def _discount(ranking: Ranking) -> list[str]:
    members = ranking.members("dbb")
    values = [float(ranking.candidates[at].value or 0) for at in members]
    if len(set(values)) < 2:
        return []
    value, low, high = ranking.bootstrap.best_value(members, values)
    line = f"best discount of dbb: {value:g} (95 %: {low:g} to {high:g})"
    if high - low >= (max(values) - min(values)) / 2:
        line += "; this log does not determine it"
    return [line]


def _percent(share: float) -> str:
    return f"{share:.0%} of {DRAWS} bootstrap" if share < 1 else f"all {DRAWS} bootstrap"


def _table(ranking: Ranking, outcomes: Sequence[Outcome], own: RewardEstimator | None) -> str:
    header = ("best of each", "mse (probes)", "mse (log)", "log-likelihood", "zero-advantage groups", "mean |A|")
    rows = [
        (
            outcome.label,
            outcome.mean("probes"),
            outcome.mean("mse"),
            _negative(outcome.mean("likelihood")),
            f"{outcome.advantages.zero_groups:.1%}",
            outcome.advantages.size,
        )
        for outcome in shown(ranking, outcomes, own)
    ]
    return f"{table(header, rows)}\n{len(outcomes)} candidates; all are in replay.csv"


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _write(folder: Path, ranking: Ranking, outcomes: Sequence[Outcome], visits: Visits) -> list[Path]:
    header, rows = csv_rows(ranking, outcomes)
    paths = [write_csv(folder / "replay.csv", header, rows)]
    bins = [f"{low:g} to {high:g}" for low, high in zip(criteria.EDGES[:-1], criteria.EDGES[1:], strict=True)]
    histograms = [(o.label, o.advantages.zeros, *o.advantages.histogram) for o in outcomes]
    paths.append(write_csv(folder / "replay_advantages.csv", ("estimator", "0", *bins), histograms))
    if visits.earlier.any():
        paths += draw_criterion(folder, ranking)
    return paths + draw_advantages(folder, shown(ranking, outcomes))


def csv_rows(ranking: Ranking, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of ``replay.csv``: every candidate with all its numbers."""
    header = ["estimator", "parameters", "discount or smoothing"]
    header += ["mse probes", "mse probes first visits", "mse log", "log-likelihood"]
    header += ["zero-advantage groups", "zero-advantage rollouts", "mean abs advantage"]
    header += ["criterion", "excess over best", "excess low", "excess high", "share of draws won"]
    excess = np.stack(ranking.bootstrap.excess(ranking.bootstrap.best), axis=1)
    wins = ranking.bootstrap.wins([outcome.label for outcome in ranking.candidates])
    judged = {
        outcome.label: [ranking.criterion, *excess[at], wins[outcome.label]]
        for at, outcome in enumerate(ranking.candidates)
    }
    rows = [
        [
            outcome.label,
            recorded.flags(outcome.estimator),
            outcome.value,
            outcome.mean("probes"),
            outcome.first_visits,
            outcome.mean("mse"),
            _negative(outcome.mean("likelihood")),
            outcome.advantages.zero_groups,
            outcome.advantages.zeros,
            outcome.advantages.size,
            *judged.get(outcome.label, [None] * 5),
        ]
        for outcome in outcomes
    ]
    return header, rows
