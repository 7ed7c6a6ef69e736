"""A run in the store, begun or continued by a trainer that is not ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import storage
from estimators import RewardEstimator
from openrlhf_dbb.core.posteriors import Posteriors


def exists(store: storage.PosteriorStore | str | None, name: str) -> bool:
    """Whether there is a run of this name; the store is as for :class:`openrlhf_dbb.Posteriors`."""
    if isinstance(store, storage.PosteriorStore):
        return any(run.name == name for run in store.runs())
    with storage.open_store(store) as opened:
        return any(run.name == name for run in opened.runs())


def check_features(estimator: RewardEstimator) -> None:
    """Raise ValueError for an estimator that reads the policy's hidden states, which we do not have there."""
    if estimator.features == "hidden":
        raise ValueError(
            f"estimator {estimator.name!r} reads features 'hidden', which only openrlhf-dbb train has; choose "
            "features='text'"
        )


def resume(
    store: storage.PosteriorStore | str | None,
    name: str,
    prompts: Sequence[str],
    labels: Sequence[str],
    *,
    estimator: RewardEstimator,
    take_over: bool,
) -> Posteriors:
    """:meth:`openrlhf_dbb.Posteriors.resume`, by the script that began the run.

    Raises:
        ValueError: the script has another estimator than the run.
        storage.StoreError: as there.
    """
    found = Posteriors.resume(store, name, prompts, labels, take_over=take_over)
    if found.estimator != estimator:
        found.close()
        raise ValueError(
            f"run {name!r} was begun with {found.estimator}, not {estimator}: resume it with the same one, or start "
            f"another run with warm_start={name!r}"
        )
    return found


def check_checkpoint(posteriors: Posteriors, folder: Path, run: str, step: int, tag: str) -> None:
    """Whether a checkpoint, which says that it is of this run and step, may be continued from.

    Raises:
        ValueError: it is another run's, or of steps that were undone since.
    """
    record = posteriors.run.record
    if run != record.uuid:
        raise ValueError(
            f"checkpoint {folder} belongs to run {run}, not to {record.name!r} ({record.uuid}): resume that one, or "
            f"begin another run with the checkpoint as its model, warm_start={record.name!r} if it is to know these"
        )
    if (step, tag) not in posteriors.store.checkpoints(record):
        raise ValueError(f"checkpoint {folder} is of steps that run {record.name!r} has undone; use an older one")


def check_beginning(posteriors: Posteriors, folder: Path) -> None:
    """Whether a run may begin anew because there is no whole checkpoint of it in ``folder``.

    Its last recorded one may have been cut short; if there is an earlier one, that must be somewhere.

    Raises:
        ValueError: the run has checkpoints elsewhere, and would lose its steps.
    """
    record = posteriors.run.record
    steps = {step: tag for step, tag in posteriors.store.checkpoints(record)}
    if len(steps) > 1:
        raise ValueError(
            f"run {record.name!r} has recorded {', '.join(steps.values())}, and no checkpoint in {folder} is whole: "
            "name the folder where one is, or choose another run_name"
        )
