"""How well estimators direct an update: the cosine of their gradient with a low-noise one, at a frozen policy.

The policy is that of a finished run, and each prompt's history is the one that the run recorded. For a batch of
prompts, groups of N rollouts are drawn repeatedly. Each estimator turns the same groups into advantages; these give the
gradient that the trainer would follow (ratio 1, no clipping). Its direction is compared with two references from many
more, independent rollouts of the same prompts.

Axes: P prompts of a batch, G rollouts of a prompt, L tokens of the longest response, E update rules, D parameters of
the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from estimators import FORMS, Estimate, RewardEstimator, State, build, centered, standardized
from estimators.base import Floats
from estimators.probe_error import squared_errors
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab.recorded import Visits, visits
from storage import open_store, read_log
from storage.inspection import prompt_texts
from study.data import GradientRow
from study.policy_gradient import cosine, gradients, one_thread, sample, weights
from study.tokens import Tokens, load_policy, tokenize

_LONGEST_TEXT = 100_000


class UpdateRule(NamedTuple):
    """An estimator by registered name and parameters, and the form of its advantages."""

    estimator: str
    parameters: dict[str, float]
    form: str


ESTIMATORS: dict[str, UpdateRule] = {
    "point": UpdateRule("point", {}, "group_norm"),
    "laplace": UpdateRule("laplace", {}, "group_norm"),
    "dbb_0.25": UpdateRule("dbb", {"discount": 0.25}, "group_norm"),
    "dbb_0.5": UpdateRule("dbb", {"discount": 0.5}, "group_norm"),
    "dbb_1": UpdateRule("dbb", {"discount": 1.0}, "group_norm"),
    "auto": UpdateRule("auto", {}, "group_norm"),
    "dr_point": UpdateRule("point", {}, "dr_grpo"),
    "dr_dbb_0.5": UpdateRule("dbb", {"discount": 0.5}, "dr_grpo"),
    "dr_auto": UpdateRule("auto", {}, "dr_grpo"),
}
ORACLES: dict[str, str] = {"exact_sigma": "group_norm", "exact": "dr_grpo"}
"""Update rules that know each prompt's success probability, taken from the reference rollouts."""


@dataclass(frozen=True)
class History:
    """What a run recorded, and its prompts.

    Attributes:
        visits: of its prompts; ``visits.prompt`` indexes the lists.
        prompts, labels: texts.
        rollouts: per prompt and step (N).
        max_new_tokens: longest response.
    """

    visits: Visits
    prompts: list[str]
    labels: list[str]
    rollouts: int
    max_new_tokens: int


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
) -> list[GradientRow]:
    """The rows of all estimators and oracles at a run's final policy.

    Prompts, labels, N and the maximum response length are the run's own; sampling is at temperature 1. The reward is 1
    if the response is the label followed by the end token, else 0.

    Args:
        store_url: the store that holds the run.
        run_name: a finished run, trained on rewards 0 and 1.
        model: folder of its policy and tokenizer (Hugging Face); weights are taken as float32.
        seed: of the choice of prompts and of the draws.
        batches: of different prompts, >= 1.
        draws: of fresh groups for each batch, >= 1.
        reference: rollouts per prompt behind the references, >= 2.
        batch_size: prompts of a batch (P).

    Returns:
        ``batches * draws`` rows for each name, by batch and draw.

    Raises:
        UsageError: the run or the model cannot be used for this.
        storage.StoreError: there is no such store or run.
    """
    for name, value, least in (("batches", batches, 1), ("draws", draws, 1), ("reference", reference, 2)):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    history = read_history(store_url, run_name)
    if batches * batch_size > len(history.prompts):
        raise UsageError(
            f"run {run_name!r} has {len(history.prompts)} prompts, fewer than {batches} batches of {batch_size}; "
            "measure fewer batches or train on more prompts"
        )
    policy, tokens = load(Path(model), history)
    estimators = {name: build(rule.estimator, **rule.parameters) for name, rule in ESTIMATORS.items()}
    states = {name: replay(estimator, history.visits) for name, estimator in estimators.items()}
    order = np.random.default_rng(seed).permutation(len(history.prompts))
    generator = torch.Generator().manual_seed(seed)
    rows: list[GradientRow] = []
    progress = tqdm(total=batches * (draws + 1), desc=f"gradients {run_name}", unit="draw", mininterval=0.5)
    with one_thread(), progress:
        for batch in range(batches):
            members = order[batch * batch_size : (batch + 1) * batch_size]
            prompts = tokens.batch(members)
            responses_P_G_L, rewards_P_G = _rollouts(policy, prompts, reference, generator)
            successes_P, samples_P = rewards_P_G.sum(axis=1), np.full(len(members), float(reference))
            exact = exact_estimate(rewards_P_G)
            reference_weights = [
                weights(standardized(rewards_P_G, exact), responses_P_G_L, "group_norm"),
                weights(centered(rewards_P_G, exact), responses_P_G_L, "dr_grpo"),
            ]
            normalised_D, true_D = gradients(policy, prompts, responses_P_G_L, np.stack(reference_weights))
            progress.update()
            for draw in range(draws):
                responses_P_G_L, rewards_P_G = _rollouts(policy, prompts, history.rollouts, generator)
                found = {
                    name: (observe(estimators[name], states[name], members, rewards_P_G), rule.form)
                    for name, rule in ESTIMATORS.items()
                } | {name: (exact, form) for name, form in ORACLES.items()}
                weights_E_P_G = np.stack(
                    [
                        weights(FORMS.build(form).advantages(rewards_P_G, of), responses_P_G_L, form)
                        for of, form in found.values()
                    ]
                )
                updates_E_D = gradients(policy, prompts, responses_P_G_L, weights_E_P_G)
                for (name, (estimate, _)), update_D in zip(found.items(), updates_E_D, strict=True):
                    cosines = cosine(update_D, true_D), cosine(update_D, normalised_D)
                    error = math.nan
                    if name not in ORACLES:
                        error = float(squared_errors(estimate.mean, samples_P, successes_P, successes_P).mean())
                    rows.append(GradientRow(seed, history.rollouts, name, batch, draw, *cosines, error))
                progress.update()
    return rows


def read_history(store_url: str, run_name: str) -> History:
    """What a run recorded of its prompts.

    Raises:
        UsageError: it is not finished, recorded nothing or rewards other than 0 and 1, or its configuration is not one
            of this package's training command.
        storage.StoreError: there is no such store or run.
    """
    with open_store(store_url, create=False) as store:
        run = store.find_run(run_name)
        if run.status != "finished":
            raise UsageError(f"run {run.name!r} is {run.status}, so its policy is not final; finish it with --resume")
        log = read_log(store, run)
        ids = np.unique(log.prompt_id)
        texts = list(prompt_texts(store, ids, length=_LONGEST_TEXT)) if len(ids) else []
    if not texts:
        raise UsageError(f"run {run.name!r} has recorded no rollouts; name another run")
    missing = [key for key in ("rollout.n_samples_per_prompt", "rollout.max_new_tokens") if not run.config.get(key)]
    if missing:
        raise UsageError(f"run {run.name!r} has no {missing[0]} in its configuration; name a run of the study")
    return History(
        visits(log.step, log.prompt_id, log.successes, log.rollouts),
        [prompt for _, prompt, _, _ in texts],
        [label for _, _, label, _ in texts],
        int(run.config["rollout.n_samples_per_prompt"]),
        int(run.config["rollout.max_new_tokens"]),
    )


def load(folder: Path, history: History) -> tuple[Any, Tokens]:
    """The policy in float32, and the prompts as its tokenizer encodes them.

    Raises:
        UsageError: the folder holds no model, its tokenizer no end token, or a label is longer than any response.
    """
    policy = load_policy(folder)
    return policy, tokenize(folder, history.prompts, history.labels, history.max_new_tokens)


def replay(estimator: RewardEstimator, seen: Visits) -> State:
    """The estimator's state after the recorded visits, step by step from its prior.

    Returns:
        The state of ``seen.prompts`` prompts, and of the run.
    """
    state = estimator.initial_state(seen.prompts)
    for rows in np.split(np.arange(len(seen.step)), np.flatnonzero(np.diff(seen.step)) + 1):
        estimator.observe_at(state, seen.prompt[rows], seen.rewards_V_G[rows])
    return state


def observe(estimator: RewardEstimator, state: State, members: NDArray[np.int64], rewards_P_G: Floats) -> Estimate:
    """The estimate that would score these prompts' groups on one more visit; ``state`` is not changed."""
    return estimator.observe(estimator.state_at(state, members), rewards_P_G)[1]


def exact_estimate(rewards_P_G: Floats) -> Estimate:
    """Success probability p and variance p (1 - p) from many rollouts, taken as the truth."""
    mean = rewards_P_G.mean(axis=1)
    return Estimate(mean, mean * (1 - mean))


def _rollouts(policy: Any, tokens: Tokens, group: int, generator: torch.Generator) -> tuple[torch.Tensor, Floats]:
    """Responses (P, G, L) and their rewards (P, G)."""
    responses_P_G_L = sample(policy, tokens, group, generator)
    right_P_G = (responses_P_G_L == tokens.answers_P_L[:, None]).all(-1)
    return responses_P_G_L, right_P_G.double().numpy()
