"""Tells whether a run's scores are right and wrong, or other numbers. The sums in the history cannot tell."""

import numpy as np

from openrlhf_dbb import estimators
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.storage import PosteriorStore, RunRecord, read


def own_estimator(run: RunRecord) -> RewardEstimator | None:
    """Return the run's estimator; None if it is not installed or not imported here."""
    try:
        estimators.check_stored(run.estimator)
        return estimators.build(run.estimator, **run.parameters)
    except ValueError:
        return None


def verdicts(store: PosteriorStore, run: RunRecord) -> tuple[float, float] | None:
    """Return the scores of a wrong and of a right rollout, such as (-1, 1); None if not known.

    They are the two scores that the kept rollouts have. A run whose memory takes 0 and 1 alone has
    these, unless its kept rollouts or sums show others.
    """
    kept = read.kept_scores(store, run)
    estimator = own_estimator(run)
    wrong = 0.0
    right = 1.0
    if kept.different == 2:
        wrong, right = kept.ends
    elif estimator is None or estimator.belief.support != "binary" or not set(kept.ends) <= {0, 1}:
        return None
    return (wrong, right) if read.all_fit(store, run, wrong, right) else None


def supports_run(store: PosteriorStore, run: RunRecord, estimator: RewardEstimator) -> bool:
    """Return whether an estimator takes a run's scores, as far as kept ones and sums tell."""
    if estimator.support == "real":
        return True
    kept = read.kept_scores(store, run)
    if not estimator.supports(np.array(kept.ends)).all():
        return False
    if estimator.support == "binary":
        return kept.different <= 2 and read.all_fit(store, run, 0.0, 1.0)
    log = read.read_log(store, run)
    return bool(((log.successes >= 0) & (log.successes <= log.rollouts)).all())
