"""How candidates did on a run's recorded visits, and their ranking by one of several criteria.

Axes: V visits (a prompt in a step), P prompts, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimators import RewardEstimator
from estimators.base import Floats
from estimators.probe_error import squared_errors
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import criteria, specs
from openrlhf_dbb.lab.bootstrap import Bootstrap, bootstrap
from openrlhf_dbb.lab.criteria import Advantages
from openrlhf_dbb.lab.recorded import ProbedVisits
from openrlhf_dbb.lab.visits import Visits, rerun

CRITERIA = {
    "probes": "mean squared error against the probes",
    "mse": "mean squared error estimated from the log",
    "likelihood": "minus log-likelihood of the next visit's successes (nats)",
}


@dataclass(frozen=True)
class Outcome:
    """How a candidate did.

    Attributes:
        losses: by criterion, (V,), lower is better; NaN where a visit does not count. Criteria that
            do not apply to the candidate are left out.
        first_visits: mean squared error against the probes at prompts' first visits; None if none was probed.
        advantages: of all rollouts.
    """

    estimator: RewardEstimator
    losses: dict[str, Floats]
    advantages: Advantages
    first_visits: float | None = None

    @property
    def label(self) -> str:
        return specs.label(self.estimator)

    @property
    def value(self) -> float | None:
        """Its discount or smoothing."""
        knob = specs.knob(self.estimator)
        return None if knob is None else float(getattr(self.estimator, knob))

    def mean(self, criterion: str) -> float | None:
        """Mean loss over visits; None if the criterion does not apply."""
        loss = self.losses.get(criterion)
        return None if loss is None or np.isnan(loss).all() else float(np.nanmean(loss))


def evaluate(estimator: RewardEstimator, visits: Visits, probes: ProbedVisits | None) -> Outcome:
    """Replay the visits with ``estimator`` and measure it by every criterion that applies."""
    again = rerun(estimator, visits)
    losses, first_visits = {}, None
    if probes is not None:
        losses["probes"] = np.full(len(visits.step), np.nan)
        losses["probes"][probes.visit] = squared_errors(
            again.estimate.mean[probes.visit], probes.samples, probes.successes, probes.squares
        )
        first = losses["probes"][probes.visit[visits.earlier[probes.visit] == 0]]
        first_visits = float(first.mean()) if len(first) else None
    if again.group_weight is not None:
        losses["mse"] = criteria.error_from_log(visits, again.estimate.mean, again.group_weight)
    if again.predictive is not None:
        losses["likelihood"] = -criteria.log_score(visits, *again.predictive)
    return Outcome(estimator, losses, criteria.advantages(visits, again.estimate), first_visits)


@dataclass(frozen=True)
class Ranking:
    """The candidates that a criterion can judge; ``bootstrap`` has them in the same order."""

    criterion: str
    candidates: list[Outcome]
    bootstrap: Bootstrap

    @property
    def best(self) -> Outcome:
        return self.candidates[self.bootstrap.best]

    def best_of(self, name: str) -> int | None:
        """Position of the best candidate of an estimator; None if there is none."""
        members = self.members(name)
        return min(members, key=lambda at: float(self.bootstrap.mean_C[at]), default=None)

    def members(self, name: str) -> list[int]:
        """Positions of an estimator's candidates."""
        return [at for at, outcome in enumerate(self.candidates) if outcome.estimator.name == name]

    def names(self) -> list[str]:
        """Estimators, best first."""
        order = np.argsort(self.bootstrap.mean_C, kind="stable")
        return list(dict.fromkeys(self.candidates[at].estimator.name for at in order))


def judge(outcomes: Sequence[Outcome], visits: Visits, criterion: str, *, seed: int = 0) -> Ranking:
    """Rank the candidates by ``criterion``.

    Raises:
        UsageError: the criterion applies to no candidate on this log.
    """
    able = [outcome for outcome in outcomes if outcome.mean(criterion) is not None]
    if not able:
        needs = {
            "probes": "the run has no probes; use --criterion mse",
            "mse": "no group has two rollouts, or no candidate allows it; use --criterion likelihood",
            "likelihood": "no prompt was visited twice, or no candidate predicts the next visit; use --criterion mse",
        }
        raise UsageError(f"--criterion {criterion}: {needs[criterion]}")
    draws = bootstrap([outcome.losses[criterion] for outcome in able], visits.prompt, seed=seed)
    return Ranking(criterion, able, draws)


def shown(ranking: Ranking, outcomes: Sequence[Outcome], own: RewardEstimator | None = None) -> list[Outcome]:
    """The best candidate of every estimator, best first, then those the criterion cannot judge, then the run's own."""
    best = [ranking.best_of(name) for name in ranking.names()]
    shown = [ranking.candidates[at] for at in best if at is not None]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.mean("mse") or 0):
        if outcome.estimator.name not in [other.estimator.name for other in shown]:
            shown.append(outcome)
    if own is not None and specs.label(own) not in [outcome.label for outcome in shown]:
        shown += [outcome for outcome in outcomes if outcome.label == specs.label(own)]
    return shown
