"""A stored run as the laboratory replays it, and the estimators to try on it.

Axes: V visits (a prompt in a step), K of them with probes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import estimators
from estimators import RewardEstimator
from estimators.base import Floats
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.visits import Integers, Visits, visits
from openrlhf_dbb.options import chosen
from storage import RunRecord, open_store
from storage.inspection import prompt_texts
from storage.log import ProbeLog, StepLog, read_log, read_probes

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes", "auto")
_WHOLE = 2**31 - 1  # characters of a prompt


@dataclass(frozen=True)
class ProbedVisits:
    """Probe rollouts of K of the recorded visits.

    Attributes:
        visit: (K,) position of the visit.
        samples: (K,) M >= 2, number of scores.
        successes, squares: (K,) sum and sum of squares of the scores.
        mean: (K,) the estimate that the run scored the visit with.
    """

    visit: Integers
    samples: Floats
    successes: Floats
    squares: Floats
    mean: Floats


@dataclass(frozen=True)
class RecordedRun:
    """A stored run as the laboratory needs it; ``probes`` is None if it has none."""

    record: RunRecord
    visits: Visits
    probes: ProbedVisits | None


def read(arguments: argparse.Namespace) -> RecordedRun:
    """All that the laboratory needs of the run ``RUN``, or of the latest.

    Raises:
        UsageError: it has recorded no rollouts, or rewards other than 0 and 1.
        storage.StoreError: there is no such store or run.
    """
    with open_store(arguments.store_url, create=False) as store:
        record = chosen(store, arguments.run)
        log, probe_log = read_log(store, record), read_probes(store, record)
        texts = [prompt for _, prompt, _, _ in prompt_texts(store, np.unique(log.prompt_id), length=_WHOLE)]
    if not len(log.step):
        raise UsageError(f"run {record.name!r} has recorded no rollouts yet; train it first, or name another run")
    seen = visits(log.step, log.prompt_id, log.successes, log.rollouts, log.lag, texts)
    return RecordedRun(record, seen, _probed_visits(log, probe_log))


def own_estimator(record: RunRecord) -> RewardEstimator | None:
    """The estimator that the run was trained with; None if it is not installed here."""
    try:
        return estimators.build(record.estimator, **record.parameters)
    except ValueError:
        return None


def prior(text: str) -> tuple[float, float]:
    """``ALPHA,BETA`` as two numbers; for argparse."""
    alpha, comma, beta = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not ALPHA,BETA, as in 0.5,0.5")
    try:
        return float(alpha), float(beta)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ALPHA,BETA, as in 0.5,0.5") from None


def sweep(
    texts: Sequence[str], discounts: Sequence[float], priors: Sequence[tuple[float, float]] = ()
) -> list[RewardEstimator]:
    """The candidates that some names stand for, each once.

    An estimator given without its discount (or smoothing) is tried at all ``discounts`` that it allows, and one
    with a Beta prior also with all ``priors``.

    Raises:
        UsageError: an unknown estimator, or a value outside its range.
    """
    found: dict[str, RewardEstimator] = {}
    for text in texts:
        estimator = specs.parse(text)
        knob, candidates = specs.knob(estimator), [estimator]
        if knob and f"{knob}=" not in text:
            candidates = list(specs.swept(estimator, discounts).values())
        for candidate in candidates:
            try:
                variants = [specs.with_prior(candidate, alpha, beta) for alpha, beta in priors] or [candidate]
            except ValueError as error:
                raise UsageError(f"--priors: {error}") from error
            found |= {specs.label(variant): variant for variant in variants}
    if not found:
        given = " ".join(map(str, discounts))
        raise UsageError(f"--discounts {given}: no estimator allows these; give numbers above 0, up to 1")
    return list(found.values())


def flags(estimator: RewardEstimator) -> str:
    """The training command's flags for this estimator.

    Example:
        >>> flags(specs.parse("dbb:discount=0.4"))
        '--estimator dbb --dbb.discount 0.4'
    """
    cls = type(estimator)
    named = estimators.available().get(estimator.name) is cls
    parts = [f"--estimator {estimator.name if named else f'{cls.__module__}:{cls.__qualname__}'}"]
    default = cls()
    for name in estimator.parameter_names():
        value = getattr(estimator, name)
        if value == getattr(default, name) and name != specs.knob(estimator):
            continue
        if isinstance(value, bool):
            parts.append(f"--{'' if value else 'no-'}{estimator.name}.{name}")
        else:
            parts.append(f"--{estimator.name}.{name} {value}")
    return " ".join(parts)


def _probed_visits(log: StepLog, probes: ProbeLog) -> ProbedVisits | None:
    """The probes whose noise can be measured, each with the row of the log that has its step and prompt.

    A group without a single verified rollout is probed but not logged.
    """
    width = max(log.prompt_id.max(), probes.prompt_id.max(initial=0)) + 1
    logged, wanted = log.step * width + log.prompt_id, probes.step * width + probes.prompt_id
    row = np.minimum(np.searchsorted(logged, wanted), len(logged) - 1)
    use = (logged[row] == wanted) & (probes.samples >= 2)
    if not use.any():
        return None
    samples = probes.samples[use].astype(np.float64)
    return ProbedVisits(row[use], samples, probes.successes[use], probes.squares[use], probes.mean[use])
