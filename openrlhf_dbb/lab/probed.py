"""The probes of a stored run: success probabilities by prompt and visit, and how far the run's own estimates were off.

Axes: K probed visits, Q prompts, T visits.
"""

from __future__ import annotations

import numpy as np

from estimators.base import Floats
from estimators.probe_error import mean_variance, squared_errors
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab.probabilities import Probabilities
from openrlhf_dbb.lab.recorded import ProbedVisits, RecordedRun
from openrlhf_dbb.lab.visits import Integers, earlier_visits


def probes_of(run: RecordedRun) -> ProbedVisits:
    """The probes of a run, of rewards 0 and 1.

    Raises:
        UsageError: it has none, or its rewards are not 0 and 1.
    """
    name, probes = run.record.name, run.probes
    if probes is None:
        raise UsageError(
            f"run {name!r} has no probes of 2 or more rollouts; train with --probe.fraction 0.1, or see 'replay'"
        )
    if (probes.successes != probes.squares).any():
        raise UsageError(f"run {name!r} has rewards other than 0 and 1, for which there are no closed forms")
    return probes


def probabilities(run: RecordedRun) -> Probabilities:
    """The probed success probabilities: a row for each prompt that was probed.

    Raises:
        UsageError: as :func:`probes_of`.
    """
    probes = probes_of(run)
    _, row, visits = np.unique(run.visits.prompt[probes.visit], return_inverse=True, return_counts=True)
    p_Q_T, noise_Q_T = np.full((2, len(visits), visits.max()), np.nan)
    place = row, earlier_visits(row)
    p_Q_T[place] = probes.successes / probes.samples
    noise_Q_T[place] = mean_variance(probes.samples, probes.successes, probes.squares)
    return Probabilities(p_Q_T, noise_Q_T)


def realised_errors(run: RecordedRun) -> dict[str, tuple[float, float]]:
    """Mean squared error, without the probes' noise, and its standard error over prompts.

    Returns:
        For the estimates the run was trained with ("as trained"), and for its groups' own means ("point").

    Raises:
        UsageError: as :func:`probes_of`.
    """
    probes, visits = probes_of(run), run.visits
    estimates = {"as trained": probes.mean, "point": (visits.successes / visits.rollouts)[probes.visit]}
    return {
        name: _over_prompts(
            squared_errors(estimate, probes.samples, probes.successes, probes.squares), visits.prompt[probes.visit]
        )
        for name, estimate in estimates.items()
    }


def _over_prompts(squared: Floats, prompt: Integers) -> tuple[float, float]:
    """Mean over visits, and its standard error if visits of one prompt depend on each other."""
    mean = float(squared.mean())
    sums = np.bincount(np.unique(prompt, return_inverse=True)[1], squared - mean)
    return mean, float(np.sqrt(np.sum(sums**2)) / len(squared))
