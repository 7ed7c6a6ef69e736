"""The probes of a stored run: reference probabilities by prompt and visit, and what the run's own estimates missed.

Axes: V probed visits, Q prompts, T visits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab.error_curves import Floats
from openrlhf_dbb.lab.probabilities import Known
from storage import RunRecord, open_store
from storage.log import ProbeLog, StepLog, read_log, read_probes


@dataclass(frozen=True)
class Probed:
    """What a run's probes say.

    Attributes:
        run: the run.
        known: the probed probabilities, prompt by prompt.
        rollouts: N, the most frequent size of its groups.
        realised: for the estimates it was trained with ("as trained"), and for the groups' own means ("point"):
            mean squared error with the probes' noise taken out, and its standard error over prompts.
    """

    run: RunRecord
    known: Known
    rollouts: int
    realised: dict[str, tuple[float, float]]


def read(url: str | None, name: str) -> Probed:
    """The probes of the run called ``name``.

    Raises:
        UsageError: it has none, or its rewards are not 0 and 1.
        storage.StoreError: the store or the run cannot be found.
    """
    with open_store(url, create=False) as store:
        run = store.find_run(name)
        log, probes = read_log(store, run), read_probes(store, run)
    if not len(probes.step):
        raise UsageError(f"run {run.name!r} has no probes; train with --probe.fraction 0.1, or see 'replay'")
    if (probes.successes != probes.squares).any():
        raise UsageError(f"run {run.name!r} has rewards other than 0 and 1, for which there are no closed forms")
    at = visit_of_probe(log, probes)
    used = (at >= 0) & (probes.samples >= 2)
    if not used.any():
        raise UsageError(f"run {run.name!r} has no probe of two or more rollouts of a prompt it was trained on")
    prompt = probes.prompt_id[used]
    samples = probes.samples[used].astype(np.float64)
    p = probes.successes[used] / samples
    known = Known(*_by_prompt(prompt, p, samples))
    own = (log.successes / log.rollouts)[at[used]]
    realised = {
        name: _missed(estimate, p, samples, prompt)
        for name, estimate in (("as trained", probes.mean[used]), ("point", own))
    }
    return Probed(run, known, int(np.bincount(log.rollouts).argmax()), realised)


def visit_of_probe(log: StepLog, probes: ProbeLog) -> NDArray[np.int64]:
    """For each probe the row of the log with its step and prompt, (V,); -1 if there is none."""
    width = max(log.prompt_id.max(initial=0), probes.prompt_id.max(initial=0)) + 1
    logged, wanted = log.step * width + log.prompt_id, probes.step * width + probes.prompt_id
    if not len(logged):
        return np.full(len(wanted), -1)
    at = np.minimum(np.searchsorted(logged, wanted), len(logged) - 1)
    return np.where(logged[at] == wanted, at, -1)


def _by_prompt(prompt: NDArray[np.int64], *columns: Floats) -> list[Floats]:
    """Columns (V,) in the order of the steps, as arrays (Q, T): a row for each prompt, NaN after its last visit."""
    _, row, visits = np.unique(prompt, return_inverse=True, return_counts=True)
    order = np.argsort(row, kind="stable")
    column = np.empty(len(prompt), dtype=np.int64)
    column[order] = np.arange(len(prompt)) - np.repeat(np.cumsum(visits) - visits, visits)
    arrays = []
    for values in columns:
        arrays.append(np.full((len(visits), visits.max()), np.nan))
        arrays[-1][row, column] = values
    return arrays


def _missed(estimate: Floats, p: Floats, samples: Floats, prompt: NDArray[np.int64]) -> tuple[float, float]:
    """Mean of (estimate - p)^2 with the noise of the probed p taken out, and its standard error over prompts."""
    squared = (estimate - p) ** 2 - p * (1 - p) / (samples - 1)
    mean = float(squared.mean())
    of_prompt = np.bincount(np.unique(prompt, return_inverse=True)[1], squared - mean)
    return mean, float(np.sqrt(np.sum(of_prompt**2)) / len(squared))
