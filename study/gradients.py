"""How well estimators direct an update: the cosine of their gradient with a low-noise one, at a frozen policy.

The policy is that of a finished run, and each prompt's history is the one that the run recorded. For a batch of
prompts, groups of N rollouts are drawn repeatedly. Each estimator turns the same groups into advantages, which give the
gradient that the trainer would follow (ratio 1, no clipping). Its direction is compared with two references from many
more, independent rollouts of the same prompts.

Axes: P prompts of a batch, G rollouts of a prompt, L tokens of the longest response, E update rules, D parameters of
the policy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from estimators import FORMS, Estimate, RewardEstimator, State, build, centered, standardized
from estimators.base import Floats
from openrlhf_dbb.lab import recorded
from openrlhf_dbb.lab.recorded import Visits
from storage import open_store
from study.policy_gradient import cosine, gradients, one_thread, sample, weights
from study.tokens import Tokens, load_policy, tokenize

RULES: dict[str, tuple[str, dict[str, float], str]] = {
    "point": ("point", {}, "group_norm"),
    "laplace": ("laplace", {}, "group_norm"),
    "dbb_0.25": ("dbb", {"discount": 0.25}, "group_norm"),
    "dbb_0.5": ("dbb", {"discount": 0.5}, "group_norm"),
    "dbb_1": ("dbb", {"discount": 1.0}, "group_norm"),
    "auto": ("auto", {}, "group_norm"),
    "dr_point": ("point", {}, "dr_grpo"),
    "dr_dbb_0.5": ("dbb", {"discount": 0.5}, "dr_grpo"),
    "dr_auto": ("auto", {}, "dr_grpo"),
}
"""Estimator, its parameters, and the form of its advantages."""
ORACLES: dict[str, str] = {"exact_sigma": "group_norm", "exact": "dr_grpo"}
"""Forms of the rules that know each prompt's success probability, taken from the reference rollouts."""


def measure(
    store_url: str,
    run_name: str,
    model: Path | str,
    *,
    seed: int,
    batches: int = 5,
    draws: int = 4,
    reference: int = 96,
    batch_size: int = 128,
) -> list[tuple[Any, ...]]:
    """Return rows for gradients.csv of all rules and oracles at a run's final policy.

    Prompts, labels, N and the maximum response length are the run's own. Sampling is at temperature 1. The reward is 1
    if the response is the label followed by the end token, else 0. The reference's own noise lowers the cosines of all
    rows of a batch by the same factor.

    Args:
        store_url, run_name: a finished run that was trained on rewards 0 and 1.
        model: folder of its policy and tokenizer (Hugging Face). Weights are taken as float32.
        seed: of the choice of prompts and of the draws.
        batches, batch_size: of different prompts, together at most those of the run.
        draws: of fresh groups for each batch.
        reference: rollouts per prompt behind the references, >= 2.

    Raises:
        UsageError: the run or the model cannot be used for this.
        storage.StoreError: there is no such store or run.
    """
    tokens, rollouts, visits = _history(store_url, run_name, Path(model))
    policy = load_policy(Path(model))
    estimators = {name: build(estimator, **parameters) for name, (estimator, parameters, _) in RULES.items()}
    states = {name: replay(estimator, visits) for name, estimator in estimators.items()}
    order = np.random.default_rng(seed).permutation(len(tokens.prompts))
    generator = torch.Generator().manual_seed(seed)
    rows: list[tuple[Any, ...]] = []
    progress = tqdm(total=batches * (draws + 1), desc=f"gradients {run_name}", unit="draw", mininterval=0.5)
    with one_thread(), progress:
        for batch in range(batches):
            members = order[batch * batch_size : (batch + 1) * batch_size]
            prompts = tokens.batch(members)
            responses_P_G_L, rewards_P_G = _rollouts(policy, prompts, reference, generator)
            exact_P = rewards_P_G.mean(axis=1)
            exact = Estimate(exact_P, exact_P * (1 - exact_P))
            noise_P = exact.variance / (reference - 1)  # of the reference's mean
            reference_weights = [
                weights(standardized(rewards_P_G, exact), responses_P_G_L, "group_norm"),
                weights(centered(rewards_P_G, exact), responses_P_G_L, "dr_grpo"),
            ]
            normalised_D, true_D = gradients(policy, prompts, responses_P_G_L, np.stack(reference_weights))
            progress.update()
            for draw in range(draws):
                responses_P_G_L, rewards_P_G = _rollouts(policy, prompts, rollouts, generator)
                estimates = {
                    name: (estimator.observe(estimator.state_at(states[name], members), rewards_P_G)[1], RULES[name][2])
                    for name, estimator in estimators.items()
                } | {name: (exact, form) for name, form in ORACLES.items()}
                weights_E_P_G = np.stack([
                    weights(FORMS.build(form).advantages(rewards_P_G, estimate), responses_P_G_L, form)
                    for estimate, form in estimates.values()
                ])  # fmt: skip
                updates_E_D = gradients(policy, prompts, responses_P_G_L, weights_E_P_G)
                for (name, (estimate, _)), update_D in zip(estimates.items(), updates_E_D, strict=True):
                    cosines = cosine(update_D, true_D), cosine(update_D, normalised_D)
                    error = float(((estimate.mean - exact_P) ** 2 - noise_P).mean())
                    rows.append((seed, rollouts, name, batch, draw, *cosines, math.nan if name in ORACLES else error))
                progress.update()
    return rows


def _history(store_url: str, run_name: str, model: Path) -> tuple[Tokens, int, Visits]:
    """Return a run's prompts as token ids, its N, and what it recorded of the prompts."""
    with open_store(store_url, create=False) as store:
        run = store.find_run(run_name)
        texts = store.query(
            "SELECT DISTINCT p.prompt_id, p.prompt, p.label FROM posterior_history h JOIN prompts p USING (prompt_id) "
            "WHERE h.run_id = :run ORDER BY p.prompt_id",
            run=run.run_id,
        )
    visits = recorded.read(store_url, str(run.run_id)).visits
    prompts, labels = [row.prompt for row in texts], [row.label for row in texts]
    tokens = tokenize(model, prompts, labels, int(run.config["rollout.max_new_tokens"]))
    return tokens, int(run.config["rollout.n_samples_per_prompt"]), visits


def replay(estimator: RewardEstimator, seen: Visits) -> State:
    """Return the estimator's state after the recorded visits, step by step from its prior."""
    state = estimator.initial_state(seen.prompts)
    for rows in np.split(np.arange(len(seen.step)), np.flatnonzero(np.diff(seen.step)) + 1):
        estimator.observe_at(state, seen.prompt[rows], seen.rewards_V_G[rows])
    return state


def _rollouts(policy: Any, tokens: Tokens, group: int, generator: torch.Generator) -> tuple[torch.Tensor, Floats]:
    """Return responses (P, G, L) and their rewards (P, G)."""
    responses_P_G_L = sample(policy, tokens, group, generator)
    right_P_G = (responses_P_G_L == tokens.answers_P_L[:, None]).all(-1)
    return responses_P_G_L, right_P_G.double().numpy()
