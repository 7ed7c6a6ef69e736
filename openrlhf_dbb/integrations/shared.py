"""Serves both integrations: allowed releases, prompts as text, runs and their checkpoints."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.posteriors import Posteriors, as_estimator
from openrlhf_dbb.core.step import Key
from openrlhf_dbb.estimators import RewardEstimator

# The integrations override methods that another release may change. The extras in setup.py allow the same releases.
ALLOWED = {"trl": ">=1.16,<1.17", "verl": ">=0.9.1,<0.10"}


def check_release(distribution: str) -> None:
    """Refuse a release of a trainer that its integration was not written for."""
    from packaging.specifiers import SpecifierSet  # the command import uses this module without the extras

    allowed, installed = ALLOWED[distribution], importlib.metadata.version(distribution)
    if installed not in SpecifierSet(allowed):
        raise ImportError(
            f"{distribution} {installed} is installed, and openrlhf_dbb.integrations.{distribution} is written for "
            f"{allowed}; pip install '{distribution}{allowed}'"
        )


def text_of(prompt: Any) -> str:
    """Return a prompt as one text: a single user message as its text, other messages as JSON.

    Raises:
        ValueError: the messages hold something that is no JSON, such as an image.

    Example:
        >>> text_of("1+1="), text_of([{"role": "user", "content": "1+1="}])
        ('1+1=', '1+1=')
        >>> text_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}])
        '[{"content": "Be brief.", "role": "system"}, {"content": "1+1=", "role": "user"}]'
    """
    # The chat template is not applied: some templates insert the date, so that every day would have new prompts.
    if isinstance(prompt, str):
        return prompt
    messages = [{key: value for key, value in dict(message).items() if value is not None} for message in prompt]
    match messages:
        case [{"role": "user", "content": str(content), **other}] if not other:
            return content
    try:
        return json.dumps(messages, ensure_ascii=False, sort_keys=True)
    except TypeError as error:
        raise ValueError(
            f"a prompt's messages are not text ({error}), and posteriors tell prompts apart by text and label"
        ) from None


def label_of(label: Any) -> str:
    """Return a label as text: text as it is, "" for None, other values as JSON.

    Example:
        >>> label_of("12"), label_of(12), label_of(["a", "b"]), label_of(None)
        ('12', '12', '["a", "b"]', '')
    """
    if label is None or isinstance(label, str):
        return label or ""
    return json.dumps(label, ensure_ascii=False, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def run_exists(store: storage.PosteriorStore | str | None, name: str) -> bool:
    """Return whether the store has a run of this name."""
    with nullcontext(store) if isinstance(store, storage.PosteriorStore) else storage.open_store(store) as opened:
        return any(run.name == name for run in opened.runs())


def open_run(
    resume: bool,
    store: storage.PosteriorStore | str | None,
    name: str,
    keys: Iterable[Key],
    *,
    estimator: str | RewardEstimator,
    parameters: Mapping[str, Any] | None = None,
    take_over: bool,
    **options: Any,
) -> Posteriors:
    """Create a run (``options`` of :meth:`Posteriors.create`), or resume it with its estimator; refuse another one."""
    prompts, labels = zip(*keys, strict=True)
    if not resume:
        return Posteriors.create(store, name, prompts, labels, estimator=estimator, parameters=parameters, **options)
    given = as_estimator(estimator, parameters)
    posteriors = Posteriors.resume(store, name, prompts, labels, take_over=take_over)
    if posteriors.estimator != given:
        posteriors.close()
        raise ValueError(
            f"run {name!r} was begun with {posteriors.estimator}, not {given}: resume it with the same one, or "
            f"start another run with warm_start={name!r}"
        )
    return posteriors


def check_checkpoint(posteriors: Posteriors, folder: Path, run: str, step: int, tag: str) -> None:
    """Refuse a checkpoint of another run, or of steps that were undone."""
    record = posteriors.run.record
    if run != record.uuid:
        raise ValueError(
            f"checkpoint {folder} belongs to run {run}, not to {record.name!r} ({record.uuid}): resume that run, or "
            f"begin another run with the checkpoint as its model and warm_start={record.name!r}"
        )
    # The store forgets a checkpoint when the run goes back behind it.
    if (step, tag) not in posteriors.store.checkpoints(record):
        raise ValueError(f"checkpoint {folder} is of steps that run {record.name!r} has undone; use an older one")


def check_start_over(posteriors: Posteriors, folder: Path) -> None:
    """Refuse to start over if the run must have whole checkpoints outside of ``folder``: it would lose its steps."""
    record = posteriors.run.record
    checkpoints = posteriors.store.checkpoints(record)
    if len(checkpoints) > 1:  # a kill may have cut the only one short
        raise ValueError(
            f"run {record.name!r} has recorded {', '.join(tag for _, tag in checkpoints)}, and no checkpoint in "
            f"{folder} is whole: name the folder where one is, or choose another run_name"
        )
