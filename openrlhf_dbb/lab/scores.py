"""Measure estimators at a run's recorded visits, and rank them by one of several losses.

Axes: V visits (a prompt in a step), P prompts, C candidates, B bootstrap draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import betabinom

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import RewardEstimator, standardized
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.estimators.probe_error import mean_variance, squared_errors
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.recorded import Visits, rerun

# Losses that rank estimators; the first that a log allows is used. Probes are the truth but for noise; the log needs
# groups of two; forecasts favour longer memory.
CRITERIA = {
    "probes": "mean squared error against the probes",
    "mse": "mean squared error estimated from the log",
    "likelihood": "minus log-likelihood of the next visit's successes (nats)",
}
DRAWS = 1000  # of the bootstrap over prompts


@dataclass(frozen=True)
class Outcome:
    """The losses and advantages of one estimator at the visits."""

    estimator: RewardEstimator
    losses: dict[str, Floats]  # (V,) by criterion; NaN where a visit does not count, or the criterion does not apply
    zero_groups: float  # share of the groups in which every advantage is 0
    mean_advantage: float  # mean of abs(advantage) over rollouts, in standard deviations

    @property
    def label(self) -> str:
        return specs.label(self.estimator)

    def mean(self, criterion: str) -> float | None:
        """Return the mean loss over visits; None if the criterion does not apply."""
        loss = self.losses[criterion]
        return None if np.isnan(loss).all() else float(np.nanmean(loss))


def evaluate(estimator: RewardEstimator, visits: Visits) -> Outcome:
    """Replay the visits with ``estimator``, and measure it by every criterion."""
    again = rerun(estimator, visits)
    losses = {
        "probes": squared_errors(again.estimate.mean, *visits.probes_3_V),
        "mse": error_from_log(visits, again.estimate.mean, again.group_weight),
        "likelihood": -log_score(visits, *again.predictive),
    }
    advantages_V_G = standardized(visits.rewards_V_G, again.estimate)
    zero_groups = float((advantages_V_G == 0).all(axis=1).mean())
    size = float(np.abs(advantages_V_G[~np.isnan(visits.rewards_V_G)]).mean())
    return Outcome(estimator, losses, zero_groups, size)


def error_from_log(visits: Visits, mean: Floats, group_weight: Floats) -> Floats:
    """Return an unbiased estimate of ``(mean - p)^2`` from the recorded successes alone, (V,); NaN where N < 2.

    With x = S/N and w the group weight::

        (mean - x)^2 - (1 - 2 w) S (N - S) / (N^2 (N - 1))

    Given the past, mean = w x + c, so that ``E (mean - p)^2 = E (mean - x)^2 - (1 - 2 w) Var x``; the fraction is
    unbiased for Var x. Run-wide numbers that are fitted to the step's own groups make w and c depend on S: for ``auto``
    the result was too low by 8 Var x / P on average in simulations.
    """
    noise = mean_variance(visits.rollouts, visits.successes, visits.successes)
    return (mean - visits.successes / visits.rollouts) ** 2 - (1 - 2 * group_weight) * noise


def log_score(visits: Visits, alpha: Floats, beta: Floats) -> Floats:
    """Return the log-probability (nats) of S by the forecast, (V,); NaN at first visits."""
    score = betabinom.logpmf(visits.successes, visits.rollouts, alpha, beta)
    return np.where(visits.earlier > 0, score, np.nan)


@dataclass(frozen=True)
class Ranking:
    """The candidates that a criterion can judge, best first."""

    criterion: str
    candidates: list[Outcome]
    mean_C: Floats  # mean loss over visits
    draws_B_C: Floats  # the same over prompts resampled with replacement, alike for all candidates

    def best_of_each(self) -> list[int]:
        """Return the position of the best candidate of every registered name, best first."""
        best: dict[str, int] = {}
        for at, outcome in enumerate(self.candidates):
            best.setdefault(outcome.estimator.name, at)
        return list(best.values())

    def excess(self) -> tuple[Floats, Floats, Floats]:
        """Return the loss beyond the best candidate's, and its 95 % interval; (C,) each."""
        low, high = np.percentile(self.draws_B_C - self.draws_B_C[:, [0]], [2.5, 97.5], axis=0)
        return self.mean_C - self.mean_C[0], low, high

    def best_discount(self, name: str) -> tuple[float, float, float] | None:
        """Return an estimator's best discount and its 95 % interval; None for fewer than two."""
        members = [at for at, outcome in enumerate(self.candidates) if outcome.estimator.name == name]
        values = np.array([specs.knob_value(self.candidates[at].estimator) or 0.0 for at in members])
        if len(set(values.tolist())) < 2:
            return None
        # "nearest" keeps the ends of the interval among the discounts that were tried.
        best_B = values[self.draws_B_C[:, members].argmin(axis=1)]
        low, high = np.percentile(best_B, [2.5, 97.5], method="nearest")
        return float(values[self.mean_C[members].argmin()]), float(low), float(high)


def rank(outcomes: Sequence[Outcome], visits: Visits) -> Ranking:
    """Rank by the first criterion that judges a candidate, with a bootstrap over prompts."""
    judged = {name: [outcome for outcome in outcomes if outcome.mean(name) is not None] for name in CRITERIA}
    criterion = next((name for name, able in judged.items() if able), None)
    if criterion is None:
        raise UsageError(
            "this run has no probes, no group of two rollouts and no forecast of a second visit, so no candidate can "
            "be judged; train longer, or name other --estimators"
        )
    able = judged[criterion]
    # All candidates miss the same visits, so the first one tells which visits count.
    losses = [outcome.losses[criterion] for outcome in able]
    counted = ~np.isnan(losses[0])
    _, row = np.unique(visits.prompt[counted], return_inverse=True)
    visits_P = np.bincount(row)
    sums_P_C = np.stack([np.bincount(row, loss[counted]) for loss in losses], axis=1)
    rng, prompts, draws = np.random.default_rng(0), len(visits_P), []
    # Visits of one prompt depend on each other, so prompts are resampled, not visits.
    for _ in range(DRAWS):
        times_P = np.bincount(rng.integers(prompts, size=prompts), minlength=prompts)
        draws.append(times_P @ sums_P_C / (times_P @ visits_P))
    mean_C = sums_P_C.sum(axis=0) / visits_P.sum()
    order = np.argsort(mean_C, kind="stable")
    return Ranking(criterion, [able[at] for at in order], mean_C[order], np.stack(draws)[:, order])
