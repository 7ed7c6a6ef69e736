"""Read a stored run's visits and probes, and compute an estimator's output at each visit.

Axes: V visits (a prompt in a step) ordered by step, P prompts, G rollouts of the largest group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import estimators
from openrlhf_dbb.core.replayed_visits import rewards_of
from openrlhf_dbb.core.step import earlier_visits
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import Estimate, RewardEstimator
from openrlhf_dbb.estimators.base import Floats
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.lab import specs
from openrlhf_dbb.options import chosen
from openrlhf_dbb.storage import RunRecord, open_store
from openrlhf_dbb.storage.read import ProbeLog, StepLog, read_log, read_probes, whole_prompts
from openrlhf_dbb.storage.records import Integers


@dataclass(frozen=True)
class Visits(StepLog):
    """The groups that a run recorded, one a visit: S successes of N rollouts."""

    prompt: Integers  # (V,) its position, 0 to P - 1
    earlier: Integers  # (V,) number of earlier visits of its prompt
    rewards_V_G: Floats  # S ones, then N - S zeros, then NaN
    prompts: int  # P
    probes_3_V: Floats  # samples, successes and squares of each visit's probe; NaN without one of 2 or more samples
    texts: Sequence[str] = ()  # (P,); empty if they are not known


class Rerun(NamedTuple):
    """The output of an estimator at V visits."""

    estimate: Estimate  # that the visit's rollouts would have been scored with
    group_weight: Floats  # (V,) share of the mean that is S/N; NaN if there is none
    predictive: tuple[Floats, Floats]  # (alpha, beta) before the visit, (V,); NaN if there is none


def read(store_url: str | None, ref: str | None) -> tuple[RunRecord, Visits]:
    """Return a run, by default the latest with a step, and its visits; refuse one without rollouts."""
    with open_store(store_url, create=False) as store:
        record = chosen(store, ref)
        log, probes = read_log(store, record), read_probes(store, record)
        texts = [text for text, _ in whole_prompts(store, np.unique(log.prompt_id))]
    if not len(log.step):
        raise UsageError(f"run {record.name!r} has recorded no rollouts yet; train it first, or name another run")
    return record, visits(log, probes, texts)


def own_estimator(record: RunRecord) -> RewardEstimator | None:
    """Return the run's estimator; None if it is not installed or not imported here."""
    try:
        estimators.check_stored(record.estimator)
        return estimators.build(record.estimator, **record.parameters)
    except ValueError:
        return None


def unreplayable(log: StepLog) -> NDArray[np.bool_]:
    """Return where successes are not a whole number from 0 to N, (V,)."""
    return (log.successes != np.round(log.successes)) | (log.successes < 0) | (log.successes > log.rollouts)


def visits(log: StepLog, probes: ProbeLog | None = None, texts: Sequence[str] = ()) -> Visits:
    """Return visits from a run's log; ``texts`` are of the distinct prompts, by ascending id."""
    rollouts, successes, wrong = log.rollouts, log.successes, unreplayable(log)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"step {log.step[at]}, prompt {log.prompt_id[at]}: {successes[at]:g} successes of {rollouts[at]} rollouts; "
            "only rewards 0 and 1 can be replayed, since the store keeps a group's sum; choose another run"
        )
    probes_3_V = np.full((3, len(log.step)), np.nan)
    if probes is not None:
        width = max(log.prompt_id.max(), probes.prompt_id.max(initial=0)) + 1
        logged, probed = (of.step * width + of.prompt_id for of in (log, probes))
        # A group without a single verified rollout is probed but not logged.
        _, visit, probe = np.intersect1d(logged, probed, assume_unique=True, return_indices=True)
        probes_3_V[:, visit] = np.array([probes.samples, probes.successes, probes.squares])[:, probe]
        probes_3_V[:, probes_3_V[0] < 2] = np.nan
    # Ids of a store may have gaps; the estimators want prompts numbered from 0.
    ids, prompt = np.unique(log.prompt_id, return_inverse=True)
    return Visits(
        **vars(log),
        prompt=prompt,
        earlier=earlier_visits(prompt),
        rewards_V_G=rewards_of(rollouts, successes),
        prompts=len(ids),
        probes_3_V=probes_3_V,
        texts=texts,
    )


def rerun(estimator: RewardEstimator, visits: Visits) -> Rerun:
    """Feed the visits to ``estimator``, from its prior, in recorded order."""
    # Prompts that share no state may be taken visit by visit instead of step by step: same result, fewer calls.
    when = visits.step if estimator.shared_fields else visits.earlier
    order = np.argsort(when, kind="stable")
    state = estimator.initial_state(visits.prompts)
    if estimator.reads_texts and visits.texts:
        state["features"] = text_features(visits.texts)
    mean, variance, weight, alpha, beta = np.full((5, len(when)), np.nan)
    baseline = np.full(visits.rewards_V_G.shape, np.nan)
    for rows in np.split(order, np.flatnonzero(np.diff(when[order])) + 1):
        members, rewards_P_G = visits.prompt[rows], visits.rewards_V_G[rows]
        try:
            forecast = estimator.predictive(estimator.state_at(state, members))
            estimate = estimator.observe_at(state, members, rewards_P_G)
        except ValueError as error:
            raise UsageError(f"{specs.label(estimator)}: {error}") from error
        mean[rows], variance[rows], baseline[rows] = estimate.mean, estimate.variance, estimate.baseline
        if forecast is not None:
            alpha[rows], beta[rows] = forecast
        share = estimator.group_weight(estimator.state_at(state, members), rewards_P_G)
        weight[rows] = np.nan if share is None else share
    return Rerun(Estimate(mean, variance, baseline), weight, (alpha, beta))
