"""The study's training without its pipeline, as a control: one process of plain PyTorch in float32.

Same task, model, estimators, loss, clip, optimizer and batches; no vLLM, DeepSpeed or bf16. A result that both show is
not caused by the pipeline. It can also do what no pipeline can: draw prompts by their exact success probabilities.

Axes: P prompts of a batch, T training prompts, G rollouts of a prompt, L tokens of the longest response, R responses in
one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from openrlhf_dbb import estimators
from openrlhf_dbb.core.strategies.posterior import inclusion, systematic
from openrlhf_dbb.estimators import FORMS
from study.exact import Task, read
from study.protocol import LEARNING_RATE, PlannedRun
from study.rows import CONTROL_OF
from study.sampling import NOTHING, Tokens, sample, token_log_probabilities

Row = tuple[Any, ...]

POINTS = 4
"""Equal parts of a training, after each of which the policy is measured."""
_FLOOR = 0.1  # share of the draws by exact probabilities that goes to all prompts alike


@dataclass(frozen=True)
class Arm:
    """How a training turns rollouts into updates."""

    estimator: str
    clip: tuple[float, float]  # lower and upper bound on how far the ratio may be from 1
    parameters: dict[str, Any] = field(default_factory=dict)
    form: str = "group_norm"  # "dr_grpo" sums over tokens, the others take their mean
    like: str = ""  # the arm of the protocol whose N, batches and learning rate it has, if not that of its own name
    # Draw prompts in proportion to p (1 - p), p their exact success probability
    exact: bool = False


NARROW, WIDE = (0.2, 0.28), (0.98, 0.98)
ARMS = {
    "grpo": Arm("point", NARROW),
    "grpo-wide": Arm("point", WIDE),
    "laplace": Arm("laplace", WIDE),
    "dbb": Arm("dbb", WIDE, {"discount": 0.5}),
    "auto": Arm("auto", WIDE),
    "dr_grpo": Arm("point", NARROW, form="dr_grpo"),
    "dr_grpo-dbb": Arm("dbb", WIDE, {"discount": 0.5}, form="dr_grpo"),
    "single": Arm("auto", WIDE, form="rloo"),
    "drawn-exact": Arm("auto", WIDE, form="rloo", like="single", exact=True),
    "no-history": Arm("empirical_bayes", WIDE, form="rloo", like="single"),
    "group-norm": Arm("auto", WIDE, like="single"),
}


def train(
    task: Task,
    arm: Arm,
    *,
    rollouts: int,
    seed: int,
    rate: float,
    epochs: int = 4,
    prompts: int = 128,
    mini_batch: int = 64,
) -> tuple[list[float], float]:
    """Train, and measure the policy before, in between and after.

    Args:
        rollouts, prompts: G and P.
        rate: learning rate of AdamW.
        epochs: as many steps as that many passes over the training prompts have; a multiple of ``POINTS``.
        mini_batch: prompts of a gradient step.

    Returns:
        The held-out accuracy, ``Task.accuracy``, before training and after each of the ``POINTS`` parts, in [0, 1]; and
        the mean probability of ending a response at once, after training.
    """
    policy, tokens = task.policy(), task.train
    optimizer = adamw(policy, rate)
    estimator = estimators.build(arm.estimator, **arm.parameters)
    state, form = estimator.initial_state(len(tokens.prompts)), FORMS.build(arm.form)
    generator, order = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    found = [task.accuracy(policy)]
    steps = epochs * len(tokens.prompts) // prompts
    drawn = _drawn(task, policy, prompts, order) if arm.exact else in_turn(task, prompts, order)
    for step, members in zip(range(1, steps + 1), drawn, strict=False):
        batch = tokens.batch(members)
        responses_P_G_L = sample(policy, batch, rollouts, generator)
        rewards_P_G = task.right(responses_P_G_L, batch).double().numpy()
        estimate = estimator.observe_at(
            state, members, rewards_P_G, leave_one_out=form.leave_one_out
        )
        advantages_R = torch.from_numpy(form.advantages(rewards_P_G, estimate).ravel()).float()
        update(
            policy,
            optimizer,
            batch,
            responses_P_G_L,
            advantages_R,
            arm,
            mini_batch * rollouts,
            generator,
        )
        if step % (steps // POINTS) == 0:
            found.append(task.accuracy(policy))
    return found, task.ends_at_once(policy)


def adamw(policy: Any, rate: float) -> torch.optim.AdamW:
    """The pipeline's optimizer: betas 0.9 and 0.95, no weight decay."""
    return torch.optim.AdamW(
        policy.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )


def update(
    policy: Any,
    optimizer: torch.optim.AdamW,
    batch: Tokens,
    responses_P_G_L: torch.Tensor,
    advantages_R: torch.Tensor,
    arm: Arm,
    mini_batch: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Train the policy on one batch: one optimizer step for each ``mini_batch`` rollouts, gradients clipped to norm 1.

    Returns:
        The log-probability of each response before the update, (R,).
    """
    responses_R_L = responses_P_G_L.flatten(0, 1)
    prompt_R = np.repeat(np.arange(len(responses_P_G_L)), responses_P_G_L.shape[1])
    with torch.no_grad():
        old_R_L = token_log_probabilities(policy, batch, prompt_R, responses_R_L)
    for rows in torch.randperm(len(prompt_R), generator=generator).split(mini_batch):
        logs_R_L = token_log_probabilities(policy, batch, prompt_R[rows], responses_R_L[rows])
        there = responses_R_L[rows] != NOTHING
        loss = _loss(logs_R_L - old_R_L[rows], advantages_R[rows, None], there, arm)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return old_R_L.sum(-1)


@torch.no_grad()
def response_log_probabilities(
    policy: Any, batch: Tokens, responses_P_G_L: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each response, (R,)."""
    prompt_R = np.repeat(np.arange(len(responses_P_G_L)), responses_P_G_L.shape[1])
    return token_log_probabilities(policy, batch, prompt_R, responses_P_G_L.flatten(0, 1)).sum(-1)


def in_turn(task: Task, prompts: int, order: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Batches of one pass over the training prompts after the other, each (P,)."""
    while True:
        yield from order.permutation(len(task.train.prompts)).reshape(-1, prompts)


def _drawn(
    task: Task, policy: Any, prompts: int, order: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Batches drawn by the exact p (1 - p) of the policy as it is when a batch is asked for, each (P,)."""
    while True:
        p_T = task.probabilities(policy)
        yield systematic(inclusion(p_T * (1 - p_T), prompts, _FLOOR), order)


def measure(folder: Path, run: PlannedRun, name: str, seed: int) -> tuple[Row, list[Row]]:
    """Train arm ``name`` with N, batches, passes and learning rate of a run of the study, on the task in a folder.

    Returns:
        A row for control.csv, and rows for points.csv.
    """
    torch.set_num_threads(1)  # with a model this small a second thread mostly waits
    rate = float(run.flags[LEARNING_RATE])
    task = read(folder)
    sizes = {
        "epochs": int(run.flags["train.num_episodes"]),
        "prompts": int(run.flags.get("rollout.batch_size", 128)),
    }
    sizes["mini_batch"] = int(run.flags["train.batch_size"]) // run.n
    accuracy, at_once = train(task, ARMS[name], rollouts=run.n, seed=seed, rate=rate, **sizes)
    half, part = accuracy[len(accuracy) // 2], sizes["epochs"] * len(task.train.prompts) // POINTS
    row = (run.experiment, name, run.n, seed, rate, accuracy[0], half, accuracy[-1], at_once)
    experiment = CONTROL_OF + run.experiment
    key = (f"{experiment}-{name}-s{seed}", experiment, name, run.n, seed, rate)
    steps = part // sizes["prompts"]
    return row, [(*key, i * steps, i * part * run.n, value) for i, value in enumerate(accuracy)]


def _loss(
    log_ratio_R_L: torch.Tensor, advantage_R_1: torch.Tensor, there: torch.Tensor, arm: Arm
) -> torch.Tensor:
    ratio = log_ratio_R_L.exp()
    clipped = ratio.clamp(1 - arm.clip[0], 1 + arm.clip[1])
    gain = torch.minimum(ratio * advantage_R_1, clipped * advantage_R_1) * there
    lengths = there.shape[1] if arm.form == "dr_grpo" else there.sum(-1)
    return -(gain.sum(-1) / lengths).mean()
