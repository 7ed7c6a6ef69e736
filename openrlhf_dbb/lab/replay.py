"""Replays a run's recorded successes with other estimators, and ranks these by their errors.

Axes: V visits (a prompt in a step) ordered by step, P prompts, G rollouts of the largest group,
C candidates, B bootstrap draws.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import options
from openrlhf_dbb.core.beginnings import rewards_of
from openrlhf_dbb.core.groups import earlier_visits
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import Estimate, RewardEstimator, standardized
from openrlhf_dbb.estimators.base import Floats, exact
from openrlhf_dbb.estimators.probe_error import mean_variance, squared_errors
from openrlhf_dbb.lab.candidates import flags, label
from openrlhf_dbb.storage import RunRecord, open_store
from openrlhf_dbb.storage.read import ProbeLog, StepLog, kept_scores, read_log, read_probes
from openrlhf_dbb.storage.records import Integers

# Losses that rank estimators; the first that a log allows is used. The log alone needs groups of
# two.
CRITERIA = {
    "probes": "mean squared error against the probes",
    "mse": "mean squared error estimated from the log",
}

# On pretrained models no estimator was shown better than GRPO's group mean (docs/evidence.md).
_TELLS = (
    "a replay tells which estimator is nearest to the success rates, "
    "not which one trains better"
)  # fmt: skip
_WITH_PROBES = f"{_TELLS}: only trainings tell that"
_WITHOUT_PROBES = f"{_TELLS}; to name one to try, it needs a training with --probe.fraction 0.1"
_VISITED_ONCE = (
    "Every prompt was visited once, so discounts cannot be compared: on a first visit a discount "
    "only weakens",
    "the prior; replay again after the second pass.",
)  # fmt: skip
_DRAWS = 1000  # B


@dataclass(frozen=True)
class Visits(StepLog):
    """The groups that a run recorded, one a visit: S successes of N rollouts."""

    prompt: Integers  # (V,) its position, 0 to P - 1
    earlier: Integers  # (V,) number of earlier visits of its prompt
    rewards_V_G: Floats  # S ones, then N - S zeros, then NaN
    prompts: int  # P
    # samples, successes and squares of each visit's probe; NaN without one of 2 or more samples
    probes_3_V: Floats


def read(store_url: str | None, ref: str | None) -> tuple[RunRecord, Visits]:
    """Return a run, by default the latest with a step, and its visits.

    Args:
        ref: the run's name, number or uuid.

    Raises:
        UsageError: the run has no rollouts, or rewards other than 0 and 1.
    """
    with open_store(store_url, create=False) as store:
        record = options.chosen(store, ref)
        log = read_log(store, record)
        probes = read_probes(store, record)
        kept = kept_scores(store, record)
    if not set(kept.ends) <= {0, 1}:
        low, high = kept.ends
        raise UsageError(
            f"scores of run {record.name!r} go from {exact(low)} to {exact(high)}; "
            "only rewards 0 and 1 can be replayed; choose another run"
        )
    if not len(log.step):
        raise UsageError(
            f"run {record.name!r} has recorded no rollouts yet; train it first, or name another run"
        )
    return record, visits(log, probes)


def unreplayable(log: StepLog) -> NDArray[np.bool_]:
    """Return where successes are not a whole number from 0 to N, (V,)."""
    successes = log.successes
    outside = (successes < 0) | (successes > log.rollouts)
    return outside | (successes != np.round(successes))


def visits(log: StepLog, probes: ProbeLog | None = None) -> Visits:
    """Return visits from a run's log.

    Raises:
        UsageError: a sum is not of rewards 0 and 1.
    """
    for at in np.flatnonzero(unreplayable(log)):
        raise UsageError(
            f"step {log.step[at]}, prompt {log.prompt_id[at]}: "
            f"{exact(log.successes[at])} successes of {log.rollouts[at]} rollouts; "
            "only rewards 0 and 1 can "
            "be replayed, since the store keeps a group's sum; choose another run"
        )
    # Ids of a store may have gaps; the estimators want prompts numbered from 0.
    ids, prompt = np.unique(log.prompt_id, return_inverse=True)
    return Visits(
        **vars(log),
        prompt=prompt,
        earlier=earlier_visits(prompt),
        rewards_V_G=rewards_of(log.rollouts, log.successes),
        prompts=len(ids),
        probes_3_V=_probes_of(log, probes),
    )


def _probes_of(log: StepLog, probes: ProbeLog | None) -> Floats:
    """Return samples, successes and squares of each visit's probe, (3, V)."""
    probes_3_V = np.full((3, len(log.step)), np.nan)
    if probes is None:
        return probes_3_V
    width = max(log.prompt_id.max(), probes.prompt_id.max(initial=0)) + 1
    logged = log.step * width + log.prompt_id
    probed = probes.step * width + probes.prompt_id
    # A group without a single verified rollout is probed but not logged.
    _, visit, probe = np.intersect1d(logged, probed, assume_unique=True, return_indices=True)
    probes_3_V[:, visit] = np.array([probes.samples, probes.successes, probes.squares])[:, probe]
    probes_3_V[:, probes_3_V[0] < 2] = np.nan
    return probes_3_V


def rerun(estimator: RewardEstimator, visits: Visits) -> Floats:
    """Feed the visits to ``estimator``, from its prior, in recorded order.

    Return (2, V): the mean that the visit's rollouts would have been scored with; the share of it
    that is S/N, NaN where there is none. No texts of prompts are needed: only forecasts read them.
    """
    # Prompts that share no state may be taken visit by visit instead of step by step: same result,
    # fewer calls.
    when = visits.step if estimator.shared_fields else visits.earlier
    order = np.argsort(when, kind="stable")
    begins = np.flatnonzero(np.diff(when[order])) + 1
    state = estimator.initial_state(visits.prompts)
    replayed_2_V = np.full((2, len(when)), np.nan)
    for rows in np.split(order, begins):
        prompts = visits.prompt[rows]
        rewards_P_G = visits.rewards_V_G[rows]
        replayed_2_V[0, rows] = estimator.observe_at(state, prompts, rewards_P_G).mean
        share = estimator.group_weight(estimator.state_at(state, prompts), rewards_P_G)
        if share is not None:
            replayed_2_V[1, rows] = share
    return replayed_2_V


@dataclass(frozen=True)
class Outcome:
    """The losses of one estimator at the visits."""

    estimator: RewardEstimator
    # (V,) by criterion; NaN where a visit does not count, or the criterion does not apply
    losses: dict[str, Floats]
    thinned: dict[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """The estimator in a few words."""
        return label(self.estimator)

    def mean(self, criterion: str) -> float | None:
        """Return the mean loss over visits; None if the criterion does not apply."""
        loss = self.losses[criterion]
        return None if np.isnan(loss).all() else float(np.nanmean(loss))

    def measures(self) -> dict[str, float | None]:
        """Return what a table shows of the outcome, by heading."""
        return {
            "mse (probes)": self.mean("probes"),
            "mse (log)": self.mean("mse"),
            **self.thinned,
        }


def evaluate(estimator: RewardEstimator, visits: Visits) -> Outcome:
    """Replay the visits with ``estimator``, and measure it by every criterion."""
    mean, group_weight = rerun(estimator, visits)
    losses = {
        "probes": squared_errors(mean, *visits.probes_3_V),
        "mse": error_from_log(visits, mean, group_weight),
    }
    return Outcome(estimator, losses, thinned(mean, visits))


def thinned(mean: Floats, visits: Visits) -> dict[str, float | None]:
    """Return what ``--train.thin 1`` would do.

    That is the share of the rollouts that it keeps, and the factor on the advantages' mean square.
    The advantages are ``(X - p) / sqrt(p (1 - p))``; if all are 0 there is no factor.
    """
    estimate = Estimate(mean, mean * (1 - mean))
    size_V_G = np.abs(standardized(visits.rewards_V_G, estimate))
    square_V_G = size_V_G**2
    kept = float(np.minimum(size_V_G, 1).sum()) / float(visits.rollouts.sum())
    square = float(square_V_G.sum())
    raised = float(np.maximum(size_V_G, square_V_G).sum())
    return {"thin: kept": kept, "thin: A^2": raised / square if square else None}


def error_from_log(visits: Visits, mean: Floats, group_weight: Floats) -> Floats:
    """Return an unbiased estimate of ``(mean - p)^2`` from the recorded successes alone, (V,).

    It is NaN where N < 2. With x = S/N and w the group weight::

        (mean - x)^2 - (1 - 2 w) S (N - S) / (N^2 (N - 1))

    It is slightly too low for an estimator that fits run-wide numbers to the step's own groups,
    such as ``auto``.
    """
    noise = mean_variance(visits.rollouts, visits.successes, visits.successes)
    distance = mean - visits.successes / visits.rollouts
    return distance**2 - (1 - 2 * group_weight) * noise


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

    def excess(self, at: int) -> tuple[float, float, float]:
        """Return a candidate's loss beyond the best one's, and its 95 % interval."""
        draws_B = self.draws_B_C[:, at] - self.draws_B_C[:, 0]
        low, high = np.percentile(draws_B, [2.5, 97.5])
        return self.mean_C[at] - self.mean_C[0], low, high


def rank(outcomes: Sequence[Outcome], visits: Visits) -> Ranking:
    """Rank by the first criterion that judges a candidate, with a bootstrap over prompts.

    Raises:
        UsageError: no criterion judges any.
    """
    for criterion in CRITERIA:
        judged = [outcome for outcome in outcomes if outcome.mean(criterion) is not None]
        if judged:
            break
    else:
        raise UsageError(
            "this run has no probes and no group of two rollouts, so no candidate can be judged; "
            "train with --probe.fraction, or with more rollouts a prompt"
        )
    losses = [outcome.losses[criterion] for outcome in judged]
    # All candidates miss the same visits, so the first one tells which visits count.
    counted = ~np.isnan(losses[0])
    _, row = np.unique(visits.prompt[counted], return_inverse=True)
    visits_P = np.bincount(row)
    sums_P_C = np.stack([np.bincount(row, loss[counted]) for loss in losses], axis=1)
    mean_C = sums_P_C.sum(axis=0) / visits_P.sum()
    order = np.argsort(mean_C, kind="stable")
    candidates = [judged[at] for at in order]
    draws_B_C = _resampled(sums_P_C, visits_P)
    return Ranking(criterion, candidates, mean_C[order], draws_B_C[:, order])


def _resampled(sums_P_C: NDArray[Any], visits_P: NDArray[np.intp]) -> Floats:
    """Return mean losses over prompts drawn with replacement, (B, C).

    Visits of one prompt depend on each other, so prompts are resampled, not visits.
    """
    rng = np.random.default_rng(0)
    prompts = len(visits_P)
    draws = []
    for _ in range(_DRAWS):
        times_P = np.bincount(rng.integers(prompts, size=prompts), minlength=prompts)
        # Not by @, whose threads wait for each other where other processes have the cores.
        sums_C = np.einsum("p,pc->c", times_P.astype(np.float64), sums_P_C)
        draws.append(sums_C / (times_P @ visits_P))
    return np.stack(draws)


def recommendation(ranking: Ranking, visits: Visits) -> list[str]:
    """Return lines with the best candidate and how sure that is.

    What to use next is there only with probes.
    """
    if not visits.earlier.any():
        return list(_VISITED_ONCE)
    best = ranking.candidates[0]
    lines = [f"criterion: {CRITERIA[ranking.criterion]}", f"best: {best.label}"]
    _, *others = ranking.best_of_each()
    if others:
        second = ranking.candidates[others[0]].label
        excess, low, high = ranking.excess(others[0])
        lines.append(f"second: {second}; worse by {excess:.2g} (95 %: {low:.2g} to {high:.2g})")
        if low <= 0:
            lines.append(
                f"this log cannot tell {best.label} from {second}: there may be no difference"
            )
    if ranking.criterion != "probes":
        return [*lines, _WITHOUT_PROBES]
    return [*lines, _WITH_PROBES, f"use next: {flags(best.estimator)}"]
