"""The rollouts of one training step, and their advantages.

Axes: R rollouts (rows) of the step; P distinct prompts among them; V of these prompts that have a verified rollout; G
rollouts of the largest group; Q probed prompts with M samples each.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from openrlhf_dbb.core import KEEP
from openrlhf_dbb.core.arrays import (
    Column,
    Floats,
    Key,
    Positions,
    column,
    flags,
    keys_of,
    same_number,
    texts_of,
    token_counts,
    whole,
    within,
)
from openrlhf_dbb.core.groups import Groups
from openrlhf_dbb.estimators import Estimate, Form
from openrlhf_dbb.estimators.simple import PointEstimator


@dataclass(frozen=True)
class Responses:
    """The texts that the model generated in a step. A sample of the texts is stored.

    Attributes:
        texts: (R,) responses, or a function that decodes the response of a row; only stored rows are decoded.
        truncated: (R,) whether a response was cut at the length limit; None if unknown.
        log_probs: (R,) sum of the response tokens' log-probabilities at sampling time; NaN or None where unknown.
        keep: how many rollouts are stored, >= 0; None stores all.
    """

    texts: Sequence[str] | Callable[[int], str]
    truncated: ArrayLike | None = None
    log_probs: ArrayLike | None = None
    keep: int | None = KEEP


@dataclass(frozen=True)
class Probes:
    """Extra rollouts of some prompts. They measure the estimates; no model and no posterior learns from them.

    Attributes:
        prompts: Q different prompts.
        scores_Q_M: the verifier's scores, shape (Q, M); NaN where missing.
    """

    prompts: Sequence[Key]
    scores_Q_M: Floats


@dataclass(frozen=True)
class StepExtras:
    """Holds the optional facts about a step; prompts, labels and rewards are passed beside it.

    Attributes:
        tokens: (R,) length of each response, >= 0, for the token counts.
        trained: (R,) False for a rollout that updates the posterior but is not trained on; None: all are trained on.
        skipped: how often a prompt was drawn without generating for it; only counted.
        probes: probes of the step's prompts.
        responses: the generated texts; None stores no texts.
        policy_versions: (R,) in [0, step - 1], training steps that the policy had seen when it generated the rollout;
            None: ``step - 1``. The lag of a group is the mean over its rollouts.
        inclusion: (R,) in (0, 1], probability with which a rollout strategy drew the rollout's prompt; only stored.
        weights: (R,) > 0, importance weights that multiply the advantages.
        read: (R,) what the verifier read as the answer, or "no answer" and why; None where it does not tell.
    """

    tokens: Column = None
    trained: Column = None
    skipped: int = 0
    probes: Probes | None = None
    responses: Responses | None = None
    policy_versions: Column = None
    inclusion: Column = None
    weights: Column = None
    read: Iterable[str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step as checked arrays; fields without a comment are of the extras."""

    prompts: list[Key]
    rewards: Floats  # (R,) the optimized values; NaN where missing
    scores: Floats  # (R,) the verifier's before penalties; NaN where missing
    tokens: Positions  # (R,)
    trained: NDArray[np.bool_]  # (R,)
    skipped: int
    probes: Probes | None
    responses: Responses | None
    policy_versions: Floats | None
    inclusion: Floats | None
    weights: Floats | None
    read: list[str | None] | None

    @classmethod
    def checked(
        cls,
        step: int,
        prompts: Iterable[str],
        labels: Iterable[str],
        rewards: Column,
        scores: Column,
        extras: StepExtras,
    ) -> "Rollouts":
        """Return the arguments of :meth:`openrlhf_dbb.Posteriors.observe` as arrays.

        Raises:
            ValueError: a column has another length, or a value of another kind.
        """
        keys = keys_of(prompts, labels)
        size = len(keys)
        rewards_R = column("rewards", rewards, size)
        scores_R = rewards_R if scores is None else column("scores", scores, size)
        # Without a reward a rollout gets no advantage, and without a score no posterior can learn from it.
        missing_R = np.isnan(rewards_R) | np.isnan(scores_R)
        return cls(
            prompts=keys,
            rewards=np.where(missing_R, np.nan, rewards_R),
            scores=np.where(missing_R, np.nan, scores_R),
            tokens=token_counts(extras.tokens, size),
            trained=flags("trained", extras.trained, size),
            skipped=whole("skipped", extras.skipped),
            probes=extras.probes,
            responses=_checked_responses(extras.responses, size),
            policy_versions=within("policy_versions", extras.policy_versions, size, 0, step - 1),
            inclusion=within("inclusion", extras.inclusion, size, 0, 1, above=True),
            weights=within("weights", extras.weights, size, 0, np.inf, above=True),
            read=_checked_read(extras.read, size),
        )


def _checked_responses(responses: Responses | None, size: int) -> Responses | None:
    if responses is None or callable(responses.texts):
        return responses
    texts = texts_of("response texts", responses.texts)
    same_number("response texts", len(texts), size)
    return replace(responses, texts=texts)


def _checked_read(read: Iterable[str | None] | None, size: int) -> list[str | None] | None:
    if read is None:
        return None
    listed = list(read)
    texts_of("texts that were read", [text or "" for text in listed])
    same_number("texts that were read", len(listed), size)
    return listed


@dataclass(frozen=True)
class Scored:
    """The advantages of a step's R rollouts; all arrays have shape (R,).

    Attributes:
        advantages: 0 for a missing or filtered rollout; NaN if only the trainer knows them.
        mean, variance: the estimate of one reward that the rollout was scored with.
        zero_variance: 1.0 if all rewards of the rollout's group are equal.
        rescued: 1.0 if the group has zero variance and still yields an advantage.
        group_std: N-1 standard deviation of the group's rewards.
        baseline, scale, weight: ``advantage = weight * (reward - baseline) / scale``, and 0 where the scale is 0; NaN
            for a missing or filtered rollout.
        metrics: numbers to log by name, see docs/training.md.
    """

    advantages: Floats
    mean: Floats
    variance: Floats
    zero_variance: Floats
    rescued: Floats
    group_std: Floats
    baseline: Floats
    scale: Floats
    weight: Floats
    metrics: dict[str, float] = field(default_factory=dict)


def score(rollouts: Rollouts, groups: Groups, estimate: Estimate, form: Form) -> Scored:
    """Compute the advantages of a step from the estimates of its V prompts."""
    rewards_V_G = groups.matrix(rollouts.rewards)
    # A filtered rollout is missing for the form, which may compare the rollouts of a step with each other.
    trained_V_G = groups.matrix(np.where(rollouts.trained, rollouts.rewards, np.nan))
    advantages_V_G = form.advantages(trained_V_G, estimate)
    weights_V_G = np.ones_like(trained_V_G)
    if rollouts.weights is not None:
        weights_V_G = np.where(np.isnan(trained_V_G), 0.0, groups.matrix(rollouts.weights))
        if form.sums_to_zero:  # the mean over the step is weighted too, so that they still sum to 0
            mean = (weights_V_G * advantages_V_G).sum() / (weights_V_G.sum() or 1.0)
            if abs(mean) > 1e-12:  # as the form: no rounding errors
                advantages_V_G = advantages_V_G - mean
    trained_R = rollouts.trained & ~np.isnan(rollouts.rewards)
    scale_R = groups.rows(form.scale(estimate))
    baseline_R = rollouts.rewards - groups.rows(advantages_V_G) * scale_R
    advantages_V_G = weights_V_G * advantages_V_G
    zero_variance_V = np.nanmin(rewards_V_G, axis=1) == np.nanmax(rewards_V_G, axis=1)
    rescued_V = zero_variance_V & (np.abs(advantages_V_G).max(axis=1) > 0)
    reward_variance_V = PointEstimator().estimate({}, rewards_V_G).variance
    return Scored(
        advantages=groups.rows(advantages_V_G),
        mean=groups.rows(estimate.mean),
        variance=groups.rows(estimate.variance),
        zero_variance=groups.rows(zero_variance_V),
        rescued=groups.rows(rescued_V),
        group_std=groups.rows(np.sqrt(reward_variance_V)),
        baseline=np.where(trained_R, baseline_R, np.nan),
        scale=np.where(trained_R, scale_R, np.nan),
        weight=np.where(trained_R, groups.rows(weights_V_G), np.nan),
    )


# In float32 the mean of eight times 1.2 is not 1.2. TRL divides the difference, up to 2e-7 of the reward, by 1e-4.
_ROUNDING = 4e-3


def as_trained(scored: Scored, groups: Groups, rewards_R: Floats, advantages: Column) -> Scored:
    """Return a step with the trainer's own advantages (R,); NaN for each rollout if it is None.

    Where all rewards of a group are equal, an advantage below 0.004 (times the reward, if that is
    above 1) is rounding, and becomes 0.

    Raises:
        ValueError: there is not one finite advantage for each rollout.
    """
    size = len(scored.advantages)
    unknown_R = np.full(size, np.nan)
    scored = replace(scored, baseline=unknown_R, scale=unknown_R)
    if advantages is None:
        return replace(scored, advantages=unknown_R, rescued=unknown_R, weight=unknown_R)
    advantages_R = column("advantages", advantages, size)
    if np.isnan(advantages_R).any():
        raise ValueError(
            "a rollout has no advantage; pass one for each rollout, or advantages=None"
        )
    rounding_R = _ROUNDING * np.maximum(1.0, np.abs(np.nan_to_num(rewards_R)))
    is_rounding_R = (scored.zero_variance > 0) & (np.abs(advantages_R) < rounding_R)
    advantages_R = np.where(is_rounding_R, 0.0, advantages_R)
    informative_P = np.bincount(groups.group_R, advantages_R != 0) > 0
    rescued_R = scored.zero_variance * informative_P[groups.group_R]
    return replace(scored, advantages=advantages_R, rescued=rescued_R, weight=np.ones(size))
