"""A run's recorded visits, and what any estimator would have said at each of them.

Axes: V visits (a prompt in a step) ordered by step, P prompts, G rollouts of the largest group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimators import Estimate, RewardEstimator
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.simulation import with_updates

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Visits:
    """What a run recorded of its rollouts.

    Attributes:
        step: (V,) ascending.
        prompt: (V,) position of the prompt, 0 to ``prompts`` - 1.
        number: (V,) 0 for a prompt's first visit, 1 for its second, and so on.
        successes, rollouts: (V,) S and N.
        rewards_V_G: S ones, then N - S zeros, then NaN; the order within a group is not stored and does not matter.
        prompts: P.
    """

    step: Whole
    prompt: Whole
    number: Whole
    successes: Floats
    rollouts: Floats
    rewards_V_G: Floats
    prompts: int


@dataclass(frozen=True)
class Rerun:
    """What an estimator says at each of V visits.

    Attributes:
        estimate: what the visit's rollouts would have been scored with.
        group_weight: (V,) share of the mean that is the visit's own S/N; None if the mean is not of that form.
        predictive: (alpha, beta) before the visit, each (V,); None if the estimator has none.
    """

    estimate: Estimate
    group_weight: Floats | None
    predictive: tuple[Floats, Floats] | None


def visits(step: Whole, prompt_id: Whole, successes: Floats, rollouts: Whole) -> Visits:
    """Visits from the columns of a run's log, each (V,) and ordered by step.

    Raises:
        UsageError: a group's successes are not a whole number from 0 to N.
    """
    wrong = (successes != np.round(successes)) | (successes < 0) | (successes > rollouts)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"step {step[at]}, prompt {prompt_id[at]}: {successes[at]:g} successes of {rollouts[at]} rollouts; only "
            "rewards 0 and 1 can be replayed, since a group's single scores are not stored; choose another run"
        )
    known, prompt = np.unique(prompt_id, return_inverse=True)
    order = np.argsort(prompt, kind="stable")
    sizes = np.bincount(prompt, minlength=len(known))
    number = np.empty_like(prompt)
    number[order] = np.arange(len(prompt)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    slot = np.arange(rollouts.max(initial=0))
    rewards_V_G = np.where(slot < rollouts[:, None], 1.0 * (slot < successes[:, None]), np.nan)
    return Visits(step, prompt, number, successes, rollouts.astype(np.float64), rewards_V_G, len(known))


def rerun(estimator: RewardEstimator, visits: Visits) -> Rerun:
    """Feed the visits to ``estimator``, from its prior, in the order they were recorded.

    Raises:
        UsageError: the estimator refuses.
    """
    steps_an_epoch = len(np.unique(visits.step)) * visits.prompts / len(visits.step)
    estimator = with_updates(estimator, max(round(steps_an_epoch), 1))
    shared = estimator.shared_fields
    # Prompts that share nothing may be taken together visit by visit: the same result in fewer calls.
    when = visits.step if shared else visits.number
    order = np.argsort(when, kind="stable")
    state = estimator.initial_state(visits.prompts)
    mean, variance, weight, alpha, beta = np.full((5, len(when)), np.nan)
    weight_known = predictive_known = True
    for rows in np.split(order, np.flatnonzero(np.diff(when[order])) + 1):
        members, rewards_P_G = visits.prompt[rows], visits.rewards_V_G[rows]
        before = {field: values if field in shared else values[members] for field, values in state.items()}
        try:
            expected = estimator.predictive(before)
            after, estimate = estimator.observe(before, rewards_P_G)
        except ValueError as error:
            raise UsageError(f"{specs.label(estimator)}: {error}") from error
        mean[rows], variance[rows] = estimate.mean, estimate.variance
        # An estimator that reads first has seen nothing of the group.
        share = estimator.group_weight(after, rewards_P_G) if estimator.reads == "after" else np.zeros(len(rows))
        if share is None:
            weight_known = False
        else:
            weight[rows] = share
        if expected is None:
            predictive_known = False
        else:
            alpha[rows], beta[rows] = expected
        for field, values in after.items():
            if field in shared:
                state[field] = values
            else:
                state[field][members] = values
    return Rerun(
        Estimate(mean, variance), weight if weight_known else None, (alpha, beta) if predictive_known else None
    )
