"""What the posteriors of a run begin with: another run's, or pass rates that were measured before.

Axes: P prompts of the run; V stored visits of another run; G rollouts of the largest group.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.arrays import Floats, Positions, numbers
from openrlhf_dbb.core.memory import MemorySupportError
from openrlhf_dbb.core.scale import supports_run
from openrlhf_dbb.estimators import RewardEstimator, State
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.storage.read import prompt_texts, read_log


def checked_pass_rates(pass_rates: Any, prompts: int) -> Floats:
    """Return successes and attempts of each prompt, (P, 2); NaN where unknown.

    Raises:
        ValueError: they have another shape, no prompt has both, or one has impossible ones.
    """
    rates_P_2 = numbers("pass_rates", pass_rates)
    if rates_P_2.shape != (prompts, 2):
        expected = f"pass successes and attempts of {prompts} prompts"
        raise ValueError(f"pass_rates have shape {rates_P_2.shape}; {expected}")
    measured = rates_P_2[~np.isnan(rates_P_2).any(axis=1)]
    successes = measured[:, 0]
    attempts = measured[:, 1]
    is_possible = (attempts >= 1) & (successes >= 0) & (successes <= attempts)
    if not len(measured) or not is_possible.all():
        problem = "pass_rates need 0 <= successes <= attempts and 1 attempt or more"
        raise ValueError(f"{problem}, for one prompt at least")
    return rates_P_2


def rewards_of(rollouts_V: Positions, successes_V: Floats) -> Floats:
    """Return rewards (V, G) of groups from their number N and sum S: S ones, N - S zeros; NaN fills up.

    If S is not a whole number from 0 to N, every reward of the group is S / N.
    """
    slot_G = np.arange(rollouts_V.max(initial=0))
    ones_V_G = np.where(slot_G < successes_V[:, None], 1.0, 0.0)
    means_V = successes_V / rollouts_V
    is_whole_V = successes_V == np.round(successes_V)
    counts_V = is_whole_V & (successes_V >= 0) & (successes_V <= rollouts_V)
    rewards_V_G = np.where(counts_V[:, None], ones_V_G, means_V[:, None])
    return np.where(slot_G < rollouts_V[:, None], rewards_V_G, np.nan)


def can_copy(source: storage.RunRecord, own: storage.RunRecord) -> bool:
    """Return whether the state of ``source`` means the same to run ``own``."""
    if source.state_fields != own.state_fields:
        return False
    memory = source.parameters.get("memory", source.estimator)
    own_memory = own.parameters.get("memory", own.estimator)
    return memory != own_memory or source.estimator_version == own.estimator_version


def of_pass_rates(
    belief: RewardEstimator, ids_P: Positions, texts: Sequence[str], rates_P_2: Floats
) -> storage.Replayed:
    """Return what ``belief`` knows after the successes and attempts of prompts.

    Args:
        belief: an estimator that remembers.
        ids_P: the store's id of each prompt; a prompt may be there twice.
        texts: (P,) of the prompts.
        rates_P_2: from :func:`checked_pass_rates`.
    """
    measured = np.flatnonzero(~np.isnan(rates_P_2).any(axis=1))
    prompt_ids, first = np.unique(ids_P[measured], return_index=True)
    rows = measured[first]
    state = belief.initial_state(len(rows))
    if belief.reads_texts:
        state["features"] = text_features([texts[row] for row in rows])
    successes = rates_P_2[rows, 0, None]
    attempts = rates_P_2[rows, 1, None]
    slot_G = np.arange(attempts.max())
    # 2.4 successes of 8 are 1, 1, 0.4, 0, 0, 0, 0, 0.
    rewards = np.where(slot_G < attempts, np.clip(successes - slot_G, 0, 1), np.nan)
    return _replayed(belief, belief.known(state, rewards), prompt_ids)


def _replayed(belief: RewardEstimator, state: State, prompt_ids: Positions) -> storage.Replayed:
    shared = {field: state[field] for field in belief.shared_fields}
    columns = belief.columns(state, np.arange(len(prompt_ids)))
    return storage.Replayed(prompt_ids, columns, shared)


def replay(
    store: storage.PosteriorStore, run: storage.RunRecord, belief: RewardEstimator
) -> storage.Replayed:
    """Return what ``belief`` would know after all visits of a run.

    Raises:
        MemorySupportError: the run has scores that ``belief`` does not take.
    """
    log = read_log(store, run)
    if not supports_run(store, run, belief):
        raise MemorySupportError(
            f"run {run.name!r} has scores that memory {belief.name!r} does not take, so that its "
            "visits cannot be replayed; begin without a warm start, or remember real rewards: "
            'estimator "gaussian", or "point" with parameters={"memory": "gaussian"} '
            "(--point.memory gaussian)"
        )
    prompt_ids, prompt_V = np.unique(log.prompt_id, return_inverse=True)
    state = belief.initial_state(len(prompt_ids))
    if belief.reads_texts:
        state["features"] = text_features([text for text, _ in prompt_texts(store, prompt_ids)])
    rewards_V_G = rewards_of(log.rollouts, log.successes)
    step_starts = np.flatnonzero(np.diff(log.step)) + 1
    for rows in np.split(np.arange(len(log.step)), step_starts):
        belief.observe_at(state, prompt_V[rows], rewards_V_G[rows])
    return _replayed(belief, state, prompt_ids)


def warm_start(
    run: storage.Run,
    ids_P: Positions,
    belief: RewardEstimator,
    source: storage.PosteriorStore,
    source_run: storage.RunRecord,
    weight: float,
) -> storage.WarmStart:
    """Let a run begin with the posteriors of ``source_run``, copied or replayed through ``belief``.

    Raises:
        MemorySupportError: they must be replayed, and ``belief`` does not take a score.
        storage.StoreError: nothing fits, or the database fails.
    """
    replayed = None
    if not can_copy(source_run, run.record):
        replayed = replay(source, source_run, belief)
    return run.warm_start(source, source_run, ids_P, weight=weight, replayed=replayed)
