"""Probes: extra rollouts of some prompts, which measure a step's estimates.

The probed prompts are chosen by a hash, so that a resume and another database choose the same.

Axes: V prompts of a step that have a verified rollout; Q probed prompts with M samples each.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.arrays import Key, Positions, numbers, whole
from openrlhf_dbb.core.groups import Groups
from openrlhf_dbb.core.step import Probes
from openrlhf_dbb.estimators.probe_error import squared_errors


def check_probes(fraction: Any, samples: Any) -> None:
    """Raise ValueError for what is no share, or no number of rollouts that tells its own noise."""
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not is_number or not 0 <= fraction <= 1:
        raise ValueError(
            f"probe_fraction = {fraction!r:.80}; give a share from 0, which is off, to 1"
        )
    if whole("probe_samples", samples) < 2:
        raise ValueError(
            f"probe_samples = {samples}; give 2 or more, or probe_fraction=0 for no probes"
        )


def probed_prompts(prompts: Iterable[Key], fraction: float, seed: int) -> set[Key]:
    """Choose about ``fraction`` of the prompts to be probed.

    A larger fraction chooses the same prompts and more.

    Source: paper, section 5.3, probes a tenth of the prompts with M = 128.
    """

    salt = str(seed).encode()

    def draw(prompt: Key) -> float:
        digest = hashlib.blake2b(storage.prompt_hash(*prompt), digest_size=6, key=salt).digest()
        return int.from_bytes(digest, "big") / 2**48

    return {prompt for prompt in prompts if draw(prompt) < fraction}


def measure(
    probes: Probes, positions_Q: Positions, groups: Groups, rows: storage.StepRows
) -> tuple[storage.ProbeRows, dict[str, float]]:
    """Compare a step's estimates and group means with its probes.

    Args:
        probes: of the step.
        positions_Q: of their prompts, in the run's.
        groups: of the step.
        rows: of the step's V prompts.

    Returns:
        The probes to store: those with a score and an estimate. Mean squared errors for the log.

    Raises:
        ValueError: the scores are no matrix with a row for each probed prompt.
    """
    scores_Q_M = numbers("the probes' scores", probes.scores_Q_M)
    if scores_Q_M.ndim != 2 or len(scores_Q_M) != len(positions_Q):
        shape = f"the probes' scores have shape {scores_Q_M.shape}"
        raise ValueError(f"{shape}; pass a row for each probed prompt")
    usable_Q = np.isin(positions_Q, groups.prompts_V) & ~np.isnan(scores_Q_M).all(axis=1)
    at_Q = np.searchsorted(groups.prompts_V, positions_Q[usable_Q])
    scores_Q_M = scores_Q_M[usable_Q]
    measured = storage.ProbeRows(
        prompt_ids=rows.prompt_ids[at_Q],
        samples=np.sum(~np.isnan(scores_Q_M), axis=1),
        successes=np.nansum(scores_Q_M, axis=1),
        squares=np.nansum(np.square(scores_Q_M), axis=1),
    )
    errors = {"probe/groups": float(len(at_Q))}
    if (measured.samples >= 2).any():  # the noise of a single sample is unknown
        estimates = {"probe/mse": rows.mean, "probe/mse_point": rows.successes / rows.rollouts}
        for name, estimates_V in estimates.items():
            errors_Q = squared_errors(
                estimates_V[at_Q], measured.samples, measured.successes, measured.squares
            )
            errors[name] = float(np.nanmean(errors_Q))
    return measured, errors
