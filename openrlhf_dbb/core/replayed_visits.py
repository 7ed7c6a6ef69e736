"""Posteriors from another run's visits, replayed through this run's estimator, and from known pass rates."""

from collections.abc import Sequence

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.step import Floats, Positions
from openrlhf_dbb.estimators import RewardEstimator, State
from openrlhf_dbb.estimators.text_prior import text_features
from openrlhf_dbb.storage.read import read_log, whole_prompts


def rewards_of(rollouts_V: Positions, successes_V: Floats) -> Floats:
    """Return rewards (V, G) of groups from their number N and sum S: S ones, N - S zeros; NaN fills up.

    If S is not a whole number from 0 to N, every reward of the group is S / N.
    """
    slot = np.arange(rollouts_V.max(initial=0))
    ones_V_G = np.where(slot < successes_V[:, None], 1.0, 0.0)
    whole_V = (successes_V == np.round(successes_V)) & (successes_V >= 0) & (successes_V <= rollouts_V)
    rewards_V_G = np.where(whole_V[:, None], ones_V_G, (successes_V / rollouts_V)[:, None])
    return np.where(slot < rollouts_V[:, None], rewards_V_G, np.nan)


def can_copy(source: storage.RunRecord, own: storage.RunRecord) -> bool:
    """Return whether the state of ``source`` means the same to run ``own``."""
    kept_by, kept_by_own = (run.parameters.get("memory", run.estimator) for run in (source, own))
    same_version = kept_by != kept_by_own or source.estimator_version == own.estimator_version
    return source.state_fields == own.state_fields and same_version


def of_pass_rates(
    belief: RewardEstimator, ids_P: Positions, texts: Sequence[str], known_P_2: Floats
) -> storage.Replayed:
    """Return what ``belief`` knows of prompts with successes and attempts measured before, NaN where unknown."""
    known = np.flatnonzero(~np.isnan(known_P_2).any(axis=1))
    prompt_ids, first = np.unique(ids_P[known], return_index=True)  # a prompt may be there twice
    rows = known[first]
    state = belief.initial_state(len(rows))
    if belief.reads_texts:
        state["features"] = text_features([texts[row] for row in rows])
    successes_P, attempts_P = known_P_2[rows].T[:, :, None]
    attempt_G = np.arange(known_P_2[rows, 1].max())
    # 2.4 successes of 8 are 1, 1, 0.4, 0, 0, 0, 0, 0.
    rewards_P_G = np.where(attempt_G < attempts_P, np.clip(successes_P - attempt_G, 0, 1), np.nan)
    return _of_state(belief, belief.known(state, rewards_P_G), prompt_ids, np.arange(len(prompt_ids)))


def _of_state(belief: RewardEstimator, state: State, prompt_ids: Positions, seen: Positions) -> storage.Replayed:
    shared = {field: state[field] for field in belief.shared_fields}
    return storage.Replayed(prompt_ids[seen], belief.columns(state, seen), shared)


def replay(store: storage.PosteriorStore, run: storage.RunRecord, belief: RewardEstimator) -> storage.Replayed:
    """Return what ``belief`` would know after all visits of a run. Rewards that it does not support are left out."""
    log = read_log(store, run)
    prompt_ids, prompt_V = np.unique(log.prompt_id, return_inverse=True)
    state = belief.initial_state(len(prompt_ids))
    if belief.reads_texts:
        state["features"] = text_features([text for text, _ in whole_prompts(store, prompt_ids)])
    rewards_V_G = rewards_of(log.rollouts, log.successes)
    rewards_V_G = np.where(belief.supports(rewards_V_G), rewards_V_G, np.nan)
    some_V = np.asarray(~np.isnan(rewards_V_G).all(axis=1))
    for rows in np.split(np.arange(len(log.step)), np.flatnonzero(np.diff(log.step)) + 1):
        rows = rows[some_V[rows]]
        belief.observe_at(state, prompt_V[rows], rewards_V_G[rows])
    return _of_state(belief, state, prompt_ids, np.unique(prompt_V[some_V]))
