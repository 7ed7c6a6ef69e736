"""A stored run as the laboratory replays it, and the estimators to try on it.

Axes: V visits (a prompt in a step), K of them with probes.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import estimators
from estimators import RewardEstimator
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.probed import visit_of_probe
from openrlhf_dbb.lab.visits import Floats, Visits, Whole, visits
from storage import DEFAULT_URL, URL_VARIABLE, RunRecord, open_store
from storage.log import ProbeLog, StepLog, read_log, read_probes

ESTIMATORS = ("point", "dbb", "ema", "laplace", "empirical_bayes", "auto")


@dataclass(frozen=True)
class Probes:
    """Probe rollouts of K of the recorded visits.

    Attributes:
        visit: (K,) which visit.
        samples, successes, squares: (K,) number of scores, their sum and sum of squares.
    """

    visit: Whole
    samples: Floats
    successes: Floats
    squares: Floats


@dataclass(frozen=True)
class Recorded:
    """A stored run as the laboratory needs it; ``probes`` is None if it has none."""

    run: RunRecord
    visits: Visits
    probes: Probes | None


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add ``--run`` and ``--store.url``."""
    parser.add_argument("--run", metavar="RUN", required=True, help="name, number or start of the uuid of a stored run")
    url = f"the store (default: ${URL_VARIABLE}, else {DEFAULT_URL})"
    parser.add_argument("--store.url", dest="store_url", metavar="URL", help=url)


def read(arguments: argparse.Namespace) -> Recorded:
    """The run of ``--run``, whole.

    Raises:
        UsageError: it has recorded no rollouts, or rewards other than 0 and 1.
        storage.StoreError: there is no such store or run.
    """
    with open_store(arguments.store_url, create=False) as store:
        run = store.find_run(arguments.run)
        log, probe_log = read_log(store, run), read_probes(store, run)
    if not len(log.step):
        raise UsageError(f"run {run.name!r} has recorded no rollouts yet; train it first, or name another run")
    seen = visits(log.step, log.prompt_id, log.successes, log.rollouts)
    return Recorded(run, seen, _probes(log, probe_log))


def own_estimator(run: RunRecord) -> RewardEstimator | None:
    """The estimator that the run was trained with; None if it is not known here."""
    try:
        return estimators.build(run.estimator, **run.parameters)
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
        UsageError: an estimator or a value that is none.
    """
    found: dict[str, RewardEstimator] = {}
    for text in texts:
        estimator, knob = specs.parse(text), specs.knob(specs.parse(text))
        swept: list[RewardEstimator | None] = [estimator]
        if knob and f"{knob}=" not in text:
            swept = [specs.turned(estimator, value) for value in discounts]
        for candidate in swept:
            if candidate is not None:
                found |= {specs.label(variant): variant for variant in _with_priors(candidate, priors)}
    if not found:
        given = " ".join(map(str, discounts))
        raise UsageError(f"--discounts {given}: no estimator allows these; give numbers above 0, up to 1")
    return list(found.values())


def _with_priors(estimator: RewardEstimator, priors: Sequence[tuple[float, float]]) -> list[RewardEstimator]:
    if not priors or "prior_alpha" not in estimator.parameter_names():
        return [estimator]
    try:
        return [dataclasses.replace(estimator, prior_alpha=a, prior_beta=b) for a, b in priors]  # type: ignore[type-var]
    except ValueError as error:
        raise UsageError(f"--priors: {error}") from error


def flags(estimator: RewardEstimator) -> str:
    """What to give to the training command, for this estimator.

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


def _probes(log: StepLog, probe_log: ProbeLog) -> Probes | None:
    at = visit_of_probe(log, probe_log)
    # A group without a single verified rollout is probed, but was never a visit.
    use = (at >= 0) & (probe_log.samples > 1)
    if not use.any():
        return None
    samples = probe_log.samples[use].astype(np.float64)
    return Probes(at[use], samples, probe_log.successes[use], probe_log.squares[use])
