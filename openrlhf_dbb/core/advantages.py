"""What becomes of the advantages between the store, which keeps those of the form, and the trainer.

Axes: R rollouts of a step.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from openrlhf_dbb.core.arrays import Floats
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.plan import Part, Plan
from openrlhf_dbb.core.step import Scored
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.estimators.registry import Refusal

MOST_THIN = 100.0


def check_thin(value: Any) -> None:
    """Raise ValueError for what is no number from 0 (off) to 100."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_THIN:
        raise ValueError(
            f"thin = {value!r:.80}; give a number from 0, which is off, to {MOST_THIN:g}"
        )


def thinned_and_whitened(thinning: "Thinning", plan: Plan) -> Refusal:
    """Thinning drops advantages near 0, and whitening leaves none there."""
    if plan.form is None or not FORMS.get(plan.form).whitened:
        return None
    both = f"{thinning.shown(plan)} with {plan.shown('form', plan.form)}"
    return f"{both}: whitening moves every advantage away from 0; leave one out"


@dataclass(frozen=True)
class Thinning(Part):
    """Advantages below ``least``, in (0, 100], are dropped or raised to it by chance, as :func:`thin` says."""

    least: float

    name: ClassVar[str] = "thin"
    rules = (thinned_and_whitened,)

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities of a host that it needs."""
        return frozenset({Capability.THIN})

    def shown(self, plan: Plan) -> str:
        """Return how the trainer's user has chosen it."""
        return plan.shown("thin", self.least)


def thinned(scored: Scored, least: float, seed: int, step: int) -> Scored:
    """Return a step with thin advantages (R,); as it is if ``least`` is 0. A step that is done again has the same."""
    if least == 0:
        return scored
    random = np.random.default_rng([seed, step])
    return replace(scored, advantages=thin(scored.advantages, least, random))


def thin(advantages_R: Floats, least: float, random: np.random.Generator) -> Floats:
    """Make each advantage A below ``least`` (c, > 0) 0, or c with the sign of A with probability |A| / c.

    Its expectation stays A, and that of PPO's gradient too, since the sign stays. Its second moment grows from A^2 to
    c |A|. The draws are systematic (Madow and Madow 1944): about as many of a group are kept as expected.
    """
    kept_R = np.minimum(np.abs(advantages_R) / least, 1.0)
    drawn_R = np.diff(np.floor(random.random() + np.cumsum(kept_R)), prepend=0.0)
    return np.where(kept_R < 1, np.copysign(least * drawn_R, advantages_R), advantages_R)


def whitened(scored: Scored, tokens_R: Floats) -> Scored:
    """Return a step with advantages of mean 0 and variance 1 over the tokens that are trained on, (R,)."""
    if not tokens_R.any():
        return scored
    mean, scale = whitening(scored.advantages, tokens_R)
    white_R = (scored.advantages - mean) * scale
    return replace(scored, advantages=np.where(tokens_R > 0, white_R, scored.advantages))


def whitening(advantages: Floats, tokens: Floats) -> tuple[float, float]:
    """Return the mean to subtract and the factor that gives variance 1; each value counts for its tokens.

    Source: OpenRLHF 0.11.2, the end of ``compute_advantages_and_returns``; its floor of the variance is kept.
    """
    mean = float(np.average(advantages, weights=tokens))
    variance = float(np.average((advantages - mean) ** 2, weights=tokens))
    return mean, 1 / np.sqrt(max(variance, 1e-8))
