"""How well estimators point an update: the cosine with a low-noise gradient, at a policy that stands still.

The policy is that of a finished run, and each prompt's history is what the run recorded. For a batch of prompts a
group of N rollouts is drawn again and again; each estimator turns the same groups into advantages, these give the
gradient that the trainer would step along (ratio 1, no clipping), and its direction is compared with two references
from many more, independent rollouts of the same prompts.

Axes: P prompts of a batch, G rollouts of a prompt, L tokens of the longest response, E weightings, D parameters of the
policy.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from estimators import Estimate, RewardEstimator, State, build, centered, standardized
from estimators.base import Floats
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab.visits import Visits, visits
from estimators import FORMS, Form
from study.data import Gradient
from study.policy_gradient import NOTHING, Tokens, cosine, gradients, sample, weights
from storage import open_store, read_log
from storage.inspection import prompt_texts

_LONGEST_TEXT = 100_000


class Arm(NamedTuple):
    """An estimator by registered name and parameters, and the form of its advantages."""

    name: str
    parameters: dict[str, float]
    form: Form


ESTIMATORS: dict[str, Arm] = {
    "point": Arm("point", {}, "group_norm"),
    "laplace": Arm("laplace", {}, "group_norm"),
    "dbb_0.25": Arm("dbb", {"discount": 0.25}, "group_norm"),
    "dbb_0.5": Arm("dbb", {"discount": 0.5}, "group_norm"),
    "dbb_1": Arm("dbb", {"discount": 1.0}, "group_norm"),
    "auto": Arm("auto", {}, "group_norm"),
    "dr_point": Arm("point", {}, "dr_grpo"),
    "dr_dbb_0.5": Arm("dbb", {"discount": 0.5}, "dr_grpo"),
    "dr_auto": Arm("auto", {}, "dr_grpo"),
}
ORACLES: dict[str, Form] = {"exact_sigma": "group_norm", "exact": "dr_grpo"}
"""What would be had if a prompt's success probability were known: its value from the reference rollouts."""


@dataclass(frozen=True)
class History:
    """What a run recorded, and the texts to go on from there.

    Attributes:
        visits: of its prompts; ``visits.prompt`` counts into the lists.
        prompts, labels: texts.
        rollouts: per prompt (N).
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
) -> list[Gradient]:
    """The rows of all estimators and oracles at the policy that a run ended with.

    Prompts, labels, N and the longest response are the run's own; sampling is at temperature 1. A reward is 1 if the
    response is the label followed by the end token, else 0.

    Args:
        store_url: the store that holds the run.
        run_name: a finished run, trained on rewards 0 and 1.
        model: folder of its policy and tokenizer (Hugging Face); weights are taken as float32.
        seed: of the choice of prompts and of the draws.
        batches: of different prompts, >= 1.
        draws: groups drawn anew for each batch, >= 1.
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
            raise UsageError(f"{name} = {value} is too few; give {least} or more")
    history = read_history(store_url, run_name)
    if batches * batch_size > len(history.prompts):
        raise UsageError(
            f"run {run_name!r} has {len(history.prompts)} prompts, fewer than {batches} batches of {batch_size}; "
            "measure fewer batches or train on more prompts"
        )
    policy, tokens = load(Path(model), history)
    estimators = {name: build(arm.name, **arm.parameters) for name, arm in ESTIMATORS.items()}
    states = {name: replay(estimator, history.visits) for name, estimator in estimators.items()}
    order = np.random.default_rng(seed).permutation(len(history.prompts))
    generator = torch.Generator().manual_seed(seed)
    rows: list[Gradient] = []
    progress = tqdm(total=batches * (draws + 1), desc=f"gradients {run_name}", unit="draw", mininterval=0.5)
    with _one_thread(), progress:
        for batch in range(batches):
            members = order[batch * batch_size : (batch + 1) * batch_size]
            prompts = tokens.batch(members)
            responses_P_G_L, rewards_P_G = _rollouts(policy, prompts, reference, generator)
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
                    name: (observe(estimators[name], states[name], members, rewards_P_G), arm.form)
                    for name, arm in ESTIMATORS.items()
                } | {name: (exact, form) for name, form in ORACLES.items()}
                weights_E_P_G = np.stack(
                    [weights(FORMS[form](rewards_P_G, said), responses_P_G_L, form) for said, form in found.values()]
                )
                updates_E_D = gradients(policy, prompts, responses_P_G_L, weights_E_P_G)
                for (name, (said, _)), update_D in zip(found.items(), updates_E_D, strict=True):
                    cosines = cosine(update_D, true_D), cosine(update_D, normalised_D)
                    error = math.nan if name in ORACLES else squared_error(said.mean, exact.mean, reference)
                    rows.append(Gradient(seed, history.rollouts, name, batch, draw, *cosines, error))
                progress.update()
    return rows


def write(rows: Sequence[Gradient], path: Path) -> None:
    """Write ``gradients.csv`` anew: 6 significant digits, NaN as an empty field."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Gradient._fields)
        writer.writerows(map(_texts, rows))


def append(rows: Sequence[Gradient], path: Path) -> None:
    """Add rows to a file of :func:`write`, which is made if it is not there."""
    if not path.exists():
        return write(rows, path)
    with open(path, "a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(map(_texts, rows))


def read(path: Path) -> list[Gradient]:
    """The rows of a file of :func:`write`; none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [
            Gradient(
                int(row["seed"]), int(row["n"]), row["estimator"], int(row["batch"]), int(row["draw"]),
                *(float(row[name] or "nan") for name in ("cosine", "cosine_normalised", "mse")),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def read_history(store_url: str, run_name: str) -> History:
    """All that a run recorded of its prompts.

    Raises:
        UsageError: it is not finished, has recorded nothing or rewards other than 0 and 1, or its configuration is not
            that of this package's training command.
        storage.StoreError: there is no such store or run.
    """
    with open_store(store_url, create=False) as store:
        run = store.find_run(run_name)
        if run.status != "finished":
            raise UsageError(f"run {run.name!r} is {run.status}, its policy not the last one; finish it with --resume")
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
    """The policy in float32, and the prompts as its tokenizer sees them.

    Raises:
        UsageError: the folder holds no model, its tokenizer no end token, or a label is longer than any response.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model (config.json); name the folder the run's policy was saved to")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer in {folder} has no end token, so no response would end; use one that has")
    answers_P_L = torch.full((len(history.labels), history.max_new_tokens), NOTHING)
    for row, label in enumerate(history.labels):
        answer = [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]
        if len(answer) > history.max_new_tokens:
            raise UsageError(
                f"label {label[:80]!r} has {len(answer)} tokens with its end, a response at most "
                f"{history.max_new_tokens}; such a prompt cannot be solved, leave it out of the training"
            )
        answers_P_L[row, : len(answer)] = torch.tensor(answer)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in history.prompts]
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for a file of 0.2 MB
    try:
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
    return policy, Tokens(prompts, answers_P_L, int(tokenizer.eos_token_id))


def replay(estimator: RewardEstimator, seen: Visits) -> State:
    """What the estimator knows after the recorded visits, fed step by step from its prior.

    Returns:
        The state of ``seen.prompts`` prompts, and of the run.
    """
    state = estimator.initial_state(seen.prompts)
    for rows in np.split(np.arange(len(seen.step)), np.flatnonzero(np.diff(seen.step)) + 1):
        observe_into(estimator, state, seen.prompt[rows], seen.rewards_V_G[rows])
    return state


def observe_into(estimator: RewardEstimator, state: State, members: NDArray[np.int64], rewards_P_G: Floats) -> Estimate:
    """What these prompts' groups are scored with, and ``state`` as it is after them."""
    after, estimate = estimator.observe(_of(estimator, state, members), rewards_P_G)
    for field in estimator.state_fields:
        state[field][members] = after[field]
    state |= {field: after[field] for field in estimator.shared_fields}
    return estimate


def observe(estimator: RewardEstimator, state: State, members: NDArray[np.int64], rewards_P_G: Floats) -> Estimate:
    """What these prompts' groups would be scored with on one more visit; ``state`` stays as it is."""
    return estimator.observe(_of(estimator, state, members), rewards_P_G)[1]


def exact_estimate(rewards_P_G: Floats) -> Estimate:
    """Success probability p and variance p (1 - p) by many rollouts, taken for the truth."""
    mean = rewards_P_G.mean(axis=1)
    return Estimate(mean, mean * (1 - mean))


def squared_error(mean_P: Floats, reference_P: Floats, samples: int) -> float:
    """Mean over prompts of ``(mean - p)^2``, p known from ``samples`` >= 2 independent rollouts of each.

    The reference's own squared error, p (1 - p) / samples, is estimated without bias and taken off: the result is
    right on average, and may be negative.
    """
    noise = reference_P * (1 - reference_P) / (samples - 1)
    return float(np.mean((mean_P - reference_P) ** 2 - noise))


def _rollouts(policy: Any, tokens: Tokens, group: int, generator: torch.Generator) -> tuple[torch.Tensor, Floats]:
    """Responses (P, G, L) and their rewards (P, G)."""
    responses_P_G_L = sample(policy, tokens, group, generator)
    right_P_G = (responses_P_G_L == tokens.answers_P_L[:, None]).all(-1)
    return responses_P_G_L, right_P_G.double().numpy()


def _of(estimator: RewardEstimator, state: State, members: NDArray[np.int64]) -> State:
    """The state of some prompts, and of the run."""
    shared = estimator.shared_fields
    return {field: values if field in shared else values[members] for field, values in state.items()}


def _texts(row: Gradient) -> list[str]:
    return ["" if value != value else f"{value:.6g}" if isinstance(value, float) else str(value) for value in row]


@contextmanager
def _one_thread() -> Iterator[None]:
    """At this size a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
