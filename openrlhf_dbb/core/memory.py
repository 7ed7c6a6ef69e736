"""The refusal of scores that a run's memory does not take: one sentence for every door."""

import numpy as np

from openrlhf_dbb.errors import RunError
from openrlhf_dbb.estimators import RewardEstimator, RewardSupportError


class MemorySupportError(RunError, ValueError):
    """A score is none that the memory of the run, or its estimator, takes. Nothing has changed."""


def refusal(estimator: RewardEstimator, error: RewardSupportError, source: str) -> MemorySupportError:
    """Return the error for a score; ``source`` is what it belongs to, such as a prompt, in words."""
    belief, kind = estimator.belief, "memory"
    if belief is estimator:
        cure = 'estimator="gaussian" (--estimator gaussian)'
    elif estimator.supports(np.array(error.value)):
        cure = f'parameters={{"memory": "gaussian"}} (--{estimator.name}.memory gaussian)'
    else:
        belief, kind = estimator, "estimator"
        cure = 'estimator="point", parameters={"memory": "gaussian"} (--estimator point --point.memory gaussian)'
    if getattr(belief, "partial_credit", None) is False and 0 < error.value < 1 and belief is estimator:
        cure = f'parameters={{"partial_credit": True}} (--{belief.name}.partial_credit), or {cure}'
    return MemorySupportError(
        f"score {error.value:g} of {source} is not {error.allowed}, as {kind} {belief.name!r} needs; real rewards need "
        f"{cure}; or give the verifier's verdict, 0 or 1, as the score (TRL: verifier)"
    )
