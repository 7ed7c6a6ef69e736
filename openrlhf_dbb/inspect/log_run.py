"""A finished run of a log's rollouts; its advantages are the log's own, or none are known."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from openrlhf_dbb.core import IMPORTED
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.inspect.log_rollouts import Log, Rollout
from openrlhf_dbb.terminal import shown

_STEP = attrgetter("step")


def make_run(store_url: str | None, name: str, files: list[str], log: Log) -> list[str]:
    """Make a finished run of a log; no run is left if one of its rollouts is refused.

    Args:
        files: the log's files and folders as they were named.

    Returns:
        Lines that tell what was made and what was left out.

    Raises:
        UsageError: nothing has a reward, some rows lack an advantage, or a value is refused.
        StoreError: the store cannot be used, or has a run of this name.
    """
    used = _used(log.rollouts)
    if not used:
        raise UsageError(f"{files[0]} has no rows with a reward; name a log of rollouts")
    has_advantages = _has_advantages(used)
    is_binary = all(rollout.reward in (0, 1, None) for rollout in used)
    memory = "auto" if is_binary else "gaussian"
    try:
        with Posteriors.create(
            store_url,
            name,
            [rollout.prompt for rollout in used],
            [rollout.label for rollout in used],
            estimator="point",
            parameters={"memory": memory},
            method=IMPORTED,
            dataset=", ".join(files),
            config={"import": {"log": files, "columns": dict(log.columns)}},
        ) as posteriors:
            _fill(posteriors, used, has_advantages)
    except ValueError as error:
        raise UsageError(f"the log cannot be imported: {error}") from error
    prompts = len(posteriors.prompt_ids)
    advantages = "the log's own advantages" if has_advantages else "its advantages are not known"
    made = (
        f"run {name!r}: {posteriors.step} steps, {prompts} prompts, {len(used)} rollouts, "
        f"memory {memory}; {advantages}"
    )
    return [made, *_left_out(log.rollouts, used)]


def _used(rollouts: list[Rollout]) -> list[Rollout]:
    """Return the rollouts by step, without steps of which nothing was verified."""
    rewarded = {rollout.step for rollout in rollouts if rollout.reward is not None}
    used = [rollout for rollout in rollouts if rollout.step in rewarded]
    return sorted(used, key=_STEP)  # the rollouts of a step stay in their order


def _has_advantages(rollouts: Sequence[Rollout]) -> bool:
    """Return whether the log has advantages; refuse one that has some."""
    if all(rollout.advantage is None for rollout in rollouts):
        return False
    for rollout in rollouts:
        if rollout.advantage is None and rollout.reward is not None:
            raise UsageError(
                f"{rollout.place} has a reward and no advantage, and other rows have one; "
                "give a column that all rows have as --advantage_key"
            )
    return True


def _fill(posteriors: Posteriors, rollouts: list[Rollout], has_advantages: bool) -> None:
    """Do the steps of the log and finish the run; delete it if one is refused."""
    try:
        for number, (step, group) in enumerate(groupby(rollouts, key=_STEP), 1):
            _observe(posteriors, number, list(group), has_advantages)
            # A log may have every tenth step only.
            posteriors.record_metrics(number, {"import/step": step})
        posteriors.finish()
    except BaseException:
        posteriors.store.delete_run(posteriors.run.record)
        raise


def _observe(
    posteriors: Posteriors,
    number: int,
    group: list[Rollout],
    has_advantages: bool,
) -> None:
    advantages = None
    if has_advantages:  # a rollout without a reward may have none
        advantages = [rollout.advantage or 0.0 for rollout in group]
    posteriors.observe(
        number,
        [rollout.prompt for rollout in group],
        [rollout.label for rollout in group],
        np.array([rollout.reward for rollout in group], dtype=np.float64),  # None becomes NaN
        form=None,
        advantages=advantages,
        extras=StepExtras(responses=Responses([rollout.response for rollout in group])),
    )


def _left_out(rollouts: list[Rollout], used: list[Rollout]) -> list[str]:
    """Return a line on the rows without a reward, if there are any."""
    missing = [rollout.place for rollout in rollouts if rollout.reward is None]
    if not missing:
        return []
    steps = len(set(map(_STEP, rollouts)) - set(map(_STEP, used)))
    return [
        shown(
            f"{len(missing)} rows have no reward, first {missing[0]}; {steps} steps left out", None
        )
    ]
