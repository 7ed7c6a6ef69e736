"""What is counted and logged of a step.

Axes: R rollouts (rows) of the step; P distinct prompts among them; V of these prompts that have a verified rollout; G
rollouts of the largest group.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb import storage
from openrlhf_dbb.core import NO_ANSWER
from openrlhf_dbb.core.arrays import Floats, Positions
from openrlhf_dbb.core.groups import Groups
from openrlhf_dbb.core.step import Rollouts, Scored


def metrics(step: int, rollouts: Rollouts, groups: Groups, scored: Scored) -> dict[str, float]:
    """Return what is logged of a step's rollouts, by name; see :class:`Scored`."""
    trained_R = rollouts.trained
    logged = {}
    for name, values_R in _averaged(rollouts, groups, scored).items():
        logged[f"estimator/{name}"] = float(values_R[trained_R].mean()) if trained_R.any() else 0.0
    logged["rollout/filtered"] = float((~trained_R).mean())
    logged["rollout/skipped"] = float(rollouts.skipped)
    readings = [reading for reading in rollouts.read or () if reading is not None]
    if readings:
        unreadable = sum(reading.startswith(NO_ANSWER) for reading in readings)
        logged["rollout/unreadable"] = unreadable / len(readings)
    if rollouts.policy_versions is not None and trained_R.any():
        lag_R = step - 1 - rollouts.policy_versions[trained_R]
        logged["async/lag"] = float(lag_R.mean())
        logged["async/lag_max"] = float(lag_R.max())
    return logged


def _averaged(rollouts: Rollouts, groups: Groups, scored: Scored) -> dict[str, NDArray[Any]]:
    """Return by name the columns (R,) whose means over the trained rollouts are logged."""
    has_advantages = not np.isnan(scored.advantages).any()
    columns = {"mean": scored.mean, "variance": scored.variance}
    columns["missing"] = np.isnan(rollouts.scores)
    if has_advantages:
        columns["abs_advantage"] = abs(scored.advantages)
    if groups.slot_R.any():  # a single rollout always has zero variance
        columns["zero_variance"] = scored.zero_variance
        if has_advantages:
            columns["rescued"] = scored.rescued
    return columns


def usage(rollouts: Rollouts, groups: Groups, scored: Scored) -> storage.Usage:
    """Count where the rollouts of a step went.

    Without advantages nobody knows what was trained on.
    """
    trained_R = rollouts.trained
    zero_variance_R = scored.zero_variance > 0
    informative_P = np.bincount(groups.group_R, trained_R & (scored.advantages != 0)) > 0
    informative_R = trained_R & informative_P[groups.group_R]
    counted = storage.Usage(
        generated=len(trained_R),
        generated_tokens=int(rollouts.tokens.sum()),
        trained=int(trained_R.sum()),
        zero_variance=int(zero_variance_R.sum()),
        informative=int(informative_R.sum()),
        rescued=int((informative_R & zero_variance_R).sum()),
        skipped=rollouts.skipped,
        groups=len(groups.prompts_P),
    )
    if np.isnan(scored.advantages).any():
        return replace(counted, trained=None, informative=None, rescued=None)
    return counted


def by_source(
    sources_V: NDArray[np.str_], successes_V: Floats, rollouts_V: Positions, scores_V_G: Floats
) -> dict[str, float]:
    """Return for each source its groups in the step, and two shares: rollouts right, groups mixed.

    The share right is the mean score, if scores are others than 0 and 1. The scores of a mixed group
    differ.
    """
    logged = {}
    mixed_V = np.nanmin(scores_V_G, axis=1) < np.nanmax(scores_V_G, axis=1)
    for source in np.unique(sources_V):
        among_V = sources_V == source
        right = successes_V[among_V].sum() / rollouts_V[among_V].sum()
        logged[f"source/{source}/groups"] = float(among_V.sum())
        logged[f"source/{source}/right"] = float(right)
        logged[f"source/{source}/mixed"] = float(mixed_V[among_V].mean())
    return logged


def of_hardest(
    expected_P: Floats, at_V: Positions, successes_V: Floats, rollouts_V: Positions
) -> dict[str, float]:
    """Return the share right among the rollouts of the hardest 10, 25 and 50 % of all prompts.

    ``expected_P`` is the forecast before the step: prompts ranked by the step's own outcome would
    always do worst where they are hardest. ``at_V`` are the positions of the step's prompts in it.
    Prompts of equal expectation share their mean rank. A share of no rollouts is left out.
    """
    expected_V = expected_P[at_V]
    ordered_P = np.sort(expected_P)
    first_V = ordered_P.searchsorted(expected_V)
    last_V = ordered_P.searchsorted(expected_V, side="right")
    share_V = (first_V + last_V + 1) / (2 * len(expected_P))
    logged = {}
    for percent in (10, 25, 50):
        among_V = share_V <= percent / 100
        if among_V.any():
            right = successes_V[among_V].sum() / rollouts_V[among_V].sum()
            logged[f"hardest/{percent}"] = float(right)
    return logged
