"""The refusal of scores that a run's memory does not take: one sentence for every door."""

import numpy as np

from openrlhf_dbb.errors import RunError
from openrlhf_dbb.estimators import RewardEstimator, RewardSupportError
from openrlhf_dbb.estimators.base import exact


class MemorySupportError(RunError, ValueError):
    """A score is none that the memory of the run, or its estimator, takes. Nothing has changed."""


def refusal(
    estimator: RewardEstimator, error: RewardSupportError, source: str
) -> MemorySupportError:
    """Return the error for a score; ``source`` says in words what it belongs to, such as a prompt."""
    belief = estimator.belief
    kind = "memory"
    if belief is estimator:
        cure = 'estimator="gaussian" (--estimator gaussian)'
        if 0 < error.value < 1 and getattr(estimator, "partial_credit", None) is False:
            partial = f'parameters={{"partial_credit": True}} (--{estimator.name}.partial_credit)'
            cure = f"{partial}, or {cure}"
    elif estimator.supports(np.array(error.value)):
        cure = f'parameters={{"memory": "gaussian"}} (--{estimator.name}.memory gaussian)'
    else:
        belief = estimator
        kind = "estimator"
        flags = "--estimator point --point.memory gaussian"
        cure = f'estimator="point", parameters={{"memory": "gaussian"}} ({flags})'
    return MemorySupportError(
        f"score {exact(error.value)} of {source} is not {error.allowed}, as {kind} {belief.name!r} "
        f"needs; real rewards need {cure}; or give the verifier's verdict, 0 or 1, as the score (TRL: verifier)"
    )
