"""RLOO's advantage: each reward against a mean that has not seen it."""

from __future__ import annotations

from typing import ClassVar

from estimators.base import Estimate, Floats
from estimators.forms.base import Form, centered, register


@register
class Rloo(Form):
    """``X - p_without``: p_without is the estimated mean, had this rollout not been seen.

    A baseline that does not depend on the rollout it scores leaves the policy gradient unbiased. With c the share of
    one rollout in the mean p, it is ``(X - p) / (1 - c)``:

    - ``point``: c = 1 / N, so N / (N - 1) (X - p), the published form.
    - ``dbb``: c = 1 / M with M = alpha + beta after the update, so M / (M - 1) (X - p).

    This holds where the estimator has seen X itself. Where it has seen the score behind it (before a length penalty),
    the score is left out of p and X is compared with the rest. An estimator that reads before the update has c = 0. One
    whose prior is fitted to all prompts (``auto``, ``empirical_bayes``) has also seen X in that prior: nearly exact.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; RLOO (Ahmadian et al. 2024, arXiv
    2402.14740); with a posterior: our own.
    """

    name: ClassVar[str] = "rloo"
    formula: ClassVar[str] = "X - (p without X)"
    leave_one_out: ClassVar[bool] = True

    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        if estimate.without_each is None:
            raise ValueError(
                "form 'rloo' needs the mean without each rollout; call the estimator's observe with "
                "leave_one_out=True, or use dr_grpo"
            )
        return centered(rewards_P_G, estimate)
