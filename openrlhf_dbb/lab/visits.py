"""A run's recorded visits, and what any estimator would have said at each of them.

Axes: V visits (a prompt in a step) ordered by step, P prompts, G rollouts of the largest group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from estimators import Estimate, RewardEstimator
from estimators.base import Floats
from estimators.text_features import text_features
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import specs

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Visits:
    """What a run recorded of its rollouts.

    Attributes:
        step: (V,) ascending.
        prompt: (V,) position of the prompt, 0 to ``prompts`` - 1.
        earlier: (V,) how many earlier visits its prompt had, 0 for the first.
        successes, rollouts: (V,) S and N.
        rewards_V_G: S ones, then N - S zeros, then NaN; the order within a group is not stored and does not matter.
        prompts: P.
        lag: (V,) training steps between the policy that generated a group and its step's, >= 0; 0: on-policy.
        texts: (P,) of the prompts, for estimators that read them; empty: not known.
    """

    step: Integers
    prompt: Integers
    earlier: Integers
    successes: Floats
    rollouts: Floats
    rewards_V_G: Floats
    prompts: int
    lag: Floats
    texts: Sequence[str] = ()

    @cached_property
    def text_features(self) -> Floats:
        """Features of the prompts' texts, (P, D)."""
        return text_features(self.texts)

    @property
    def usual_rollouts(self) -> int:
        """The most frequent N."""
        return int(np.bincount(self.rollouts.astype(np.int64)).argmax())


@dataclass(frozen=True)
class Rerun:
    """An estimator's output at each of V visits.

    Attributes:
        estimate: what the visit's rollouts would have been scored with.
        group_weight: (V,) share of the mean that is the visit's own S/N; None if the mean is not of that form.
        predictive: (alpha, beta) before the visit, each (V,); None if the estimator has none.
    """

    estimate: Estimate
    group_weight: Floats | None
    predictive: tuple[Floats, Floats] | None


def visits(
    step: Integers,
    prompt_id: Integers,
    successes: Floats,
    rollouts: Integers,
    lag: Floats | None = None,
    texts: Sequence[str] = (),
) -> Visits:
    """Visits from the columns of a run's log, each (V,) and ordered by step.

    Args:
        lag: None: all groups are on-policy.
        texts: of the distinct prompts, by ascending id.

    Raises:
        UsageError: a group's successes are not a whole number from 0 to N.
    """
    wrong = (successes != np.round(successes)) | (successes < 0) | (successes > rollouts)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"step {step[at]}, prompt {prompt_id[at]}: {successes[at]:g} successes of {rollouts[at]} rollouts; only "
            "rewards 0 and 1 can be replayed, since the single scores of a group are not stored; choose another run"
        )
    known, prompt = np.unique(prompt_id, return_inverse=True)
    slot = np.arange(rollouts.max(initial=0))
    rewards_V_G = np.where(slot < rollouts[:, None], 1.0 * (slot < successes[:, None]), np.nan)
    lag = np.zeros(len(step)) if lag is None else lag
    counted, earlier = rollouts.astype(np.float64), earlier_visits(prompt)
    return Visits(step, prompt, earlier, successes, counted, rewards_V_G, len(known), lag, texts)


def rerun(estimator: RewardEstimator, visits: Visits) -> Rerun:
    """Feed the visits to ``estimator``, from its prior, in the order they were recorded and as late as they were.

    Raises:
        UsageError: the estimator cannot be used on these rewards, or reads what no store keeps.
    """
    if estimator.features == "hidden":
        raise UsageError(
            f"{specs.label(estimator)}: no store keeps the policy's hidden states, which it reads; use "
            f"{estimator.name}:features=text"
        )
    steps_per_epoch = len(np.unique(visits.step)) * visits.prompts / len(visits.step)
    estimator = specs.with_updates_per_epoch(estimator, max(round(steps_per_epoch), 1))
    # Prompts that share no state may be taken visit by visit instead of step by step: same result, fewer calls.
    when = visits.step if estimator.shared_fields else visits.earlier
    order = np.argsort(when, kind="stable")
    state = estimator.initial_state(visits.prompts)
    if estimator.features == "text":
        state["features"] = visits.text_features
    mean, variance, weight, alpha, beta = np.full((5, len(when)), np.nan)
    baseline = np.full(visits.rewards_V_G.shape, np.nan)
    weight_known = predictive_known = True
    for rows in np.split(order, np.flatnonzero(np.diff(when[order])) + 1):
        members, rewards_P_G = visits.prompt[rows], visits.rewards_V_G[rows]
        try:
            expected = estimator.predictive(estimator.state_at(state, members))
            estimate = estimator.observe_at(state, members, rewards_P_G, visits.lag[rows])
        except ValueError as error:
            raise UsageError(f"{specs.label(estimator)}: {error}") from error
        mean[rows], variance[rows], baseline[rows] = estimate.mean, estimate.variance, estimate.baseline
        # An estimator that reads before it updates has seen nothing of the group.
        share: Floats | None = np.zeros(len(rows))
        if estimator.reads == "after":
            share = estimator.group_weight(estimator.state_at(state, members), rewards_P_G)
        if share is None:
            weight_known = False
        else:
            weight[rows] = share
        if expected is None:
            predictive_known = False
        else:
            alpha[rows], beta[rows] = expected
    predicted = (alpha, beta) if predictive_known else None
    return Rerun(Estimate(mean, variance, baseline), weight if weight_known else None, predicted)


def earlier_visits(prompt: Integers) -> Integers:
    """For each entry the number of earlier entries with the same value, (V,).

    Example:
        >>> earlier_visits(np.array([7, 9, 7, 7]))
        array([0, 0, 1, 2])
    """
    _, member, sizes = np.unique(prompt, return_inverse=True, return_counts=True)
    order = np.argsort(member, kind="stable")
    earlier = np.empty(len(prompt), dtype=np.int64)
    earlier[order] = np.arange(len(prompt)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return earlier
