"""Advantage forms: how the rewards of a group and an estimate become advantages.

X is a reward, p and v are the estimated mean and variance of one reward.
"""

from typing import ClassVar

import numpy as np

from openrlhf_dbb.estimators.base import Estimate, Floats, Training
from openrlhf_dbb.estimators.registry import Owner, Refusal, Registry, Rule


def no_mean_without_each(form: "Form", training: Training) -> Refusal:
    """A form such as rloo scores a rollout by the mean without it, which not every estimator can tell."""
    if not form.leave_one_out or training.estimator.can_leave_one_out():
        return None
    return (
        f"{training.shown('form', form.name)} with {training.shown_estimator}: the form scores a "
        "rollout by the mean without it, which this estimator cannot tell (its group_weight is "
        f"None); use {training.shown('form', 'dr_grpo')}, or {training.shown('estimator', 'dbb')}"
    )


class Form(Owner):
    """Turns rewards and an estimate into advantages: ``(X - baseline) / scale``.

    A form with another formula overrides :meth:`advantages`.

    Attributes:
        name: the word after ``--algo.advantage.estimator``.
        formula: the advantage in a few words.
        whitened: the trainer has the last step: once the advantages are spread over the response
            tokens, it subtracts their mean over the batch's tokens and divides by their standard
            deviation.
        sums_to_zero: the advantages of a step sum to 0, which weights of the rollouts then keep.
        leave_one_out: :meth:`advantages` needs the estimate's ``without_each``.
    """

    name: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = (no_mean_without_each,)
    formula: ClassVar[str]
    whitened: ClassVar[bool] = False
    sums_to_zero: ClassVar[bool] = False
    leave_one_out: ClassVar[bool] = False

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        """Return the advantages of the optimized rewards, (P, G); 0 for a missing rollout (NaN)."""
        centered_P_G = centered(rewards_P_G, estimate)
        scale_P_1 = self.scale(estimate)[:, None]
        advantages_P_G = np.zeros(np.shape(rewards_P_G))
        return np.divide(centered_P_G, scale_P_1, out=advantages_P_G, where=scale_P_1 > 0)

    def scale(self, estimate: Estimate) -> Floats:
        """Return what the advantages are divided by, (P,); where it is 0 they are 0."""
        return np.ones(len(estimate.mean))


FORMS: Registry[Form] = Registry("advantage form", Form, __name__, "openrlhf_dbb.forms")
"""The forms by name; others declare theirs in the entry points of ``openrlhf_dbb.forms``."""

register = FORMS.register


def centered(rewards_P_G: Floats, estimate: Estimate) -> Floats:
    """Return ``X - baseline``, shape (P, G).

    It is 0 for a missing rollout (NaN), or one with nothing to compare it with. The baseline is the
    mean, or the mean without the rollout.
    """
    baseline = estimate.without_each
    if baseline is None:
        baseline = estimate.mean[:, None]
    rewards = np.asarray(rewards_P_G, dtype=np.float64)
    return np.nan_to_num(rewards - baseline)


def standardized(rewards_P_G: Floats, estimate: Estimate) -> Floats:
    """Return ``(X - baseline) / sqrt(v)``, shape (P, G).

    It is 0 where :func:`centered` is, and where the variance is 0.
    """
    return GroupNorm().advantages(rewards_P_G, estimate)


@register
class GroupNorm(Form):
    """``(X - p) / sqrt(v)``, without GRPO's 1e-9 in the divisor.

    Source: GRPO (Shao et al. 2024, arXiv 2402.03300), section 4.1.
    """

    name = "group_norm"
    formula = "(X - p) / sqrt(variance)"

    def scale(self, estimate: Estimate) -> Floats:
        """Return the standard deviation of one reward, (P,), in reward units."""
        return np.sqrt(estimate.variance)


@register
class DrGrpo(Form):
    """``X - p``.

    Source: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), section 3.
    """

    name = "dr_grpo"
    formula = "X - p"


@register
class BatchCentered(Form):
    """``X - p`` minus its mean over the step's rollouts: the advantages of a step sum to 0.

    Source: our own; ``docs/evidence.md`` says why, ``python -m study rare`` measures it.
    """

    name = "batch_centered"
    formula = "X - p, minus its mean over the step"
    sums_to_zero = True

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        """Return ``X - p`` minus its mean over the step, (P, G); 0 for a missing rollout (NaN)."""
        advantages_P_G = super().advantages(rewards_P_G, estimate)
        seen_P_G = ~np.isnan(rewards_P_G)
        mean = advantages_P_G[seen_P_G].mean() if seen_P_G.any() else 0.0
        if abs(mean) < 1e-12:  # rounding must not give an advantage to a group that has none
            return advantages_P_G
        return np.where(seen_P_G, advantages_P_G - mean, 0.0)


@register
class BatchMean(BatchCentered):
    """``X`` minus the mean of the step's rewards: one baseline for all prompts.

    The estimate is not read.

    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 5.
    """

    name = "batch_mean"
    formula = "X - mean of the step's rewards"

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        """Return ``X`` minus its mean over the step, (P, G); 0 for a missing rollout (NaN)."""
        without_mean = Estimate(np.zeros(len(rewards_P_G)), estimate.variance)
        return super().advantages(rewards_P_G, without_mean)


@register
class Rloo(Form):
    """``X - p_without``: p_without is the estimated mean, had this rollout not been seen.

    With c the share of one rollout in the mean p, it is ``(X - p) / (1 - c)``. c is 1 / N with
    ``point``, as published, and 1 / (alpha + beta) after the update with ``dbb``. A prior that is
    fitted to all prompts still holds X.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; RLOO (Ahmadian et
    al. 2024, arXiv 2402.14740); with a posterior: our own.
    """

    name = "rloo"
    formula = "X - (p without X)"
    leave_one_out = True

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        """Return ``X - p_without``, (P, G); 0 for a missing rollout (NaN).

        Raises:
            ValueError: the estimate lacks ``without_each``.
        """
        if estimate.without_each is None:  # the mean as baseline would be dr_grpo, in silence
            raise ValueError(
                "form 'rloo' needs the mean without each rollout; observe with leave_one_out=True"
            )
        return super().advantages(rewards_P_G, estimate)


@register
class ReinforceBaseline(Form):
    """``X - p`` here; the trainer then whitens over all response tokens of the batch.

    Source: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), the variant with a baseline.
    """

    name = "reinforce_baseline"
    formula = "X - p, whitened over the tokens of the batch"
    whitened = True


@register
class MaxRl(Form):
    """``(X - p) / p``: the policy gradient of log p, so that a prompt weighs 1 / p.

    Exactly 0 where p <= 0: with ``point`` an all-wrong group has no advantage, as published; with a
    posterior it has -1 for every rollout.

    Source: MaxRL (Tajwar et al. 2026, arXiv 2602.02710), the estimator with the group's mean as
    control variate.
    """

    name = "max_rl"
    formula = "(X - p) / p"

    def scale(self, estimate: Estimate) -> Floats:
        """Return the estimated mean, (P,), in reward units."""
        return estimate.mean
