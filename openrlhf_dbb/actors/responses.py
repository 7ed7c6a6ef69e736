"""What the engines answer, in the form in which OpenRLHF trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.actors.rewards import RewardError, single_value
from openrlhf_dbb.core.strategies import Drawn

VERSION = "policy_version"
"""In an experience's ``info``, of async training: training steps that the policy had seen, mean over the tokens."""
INCLUSION, WEIGHT = "inclusion", "weight"
"""In an experience's ``info``, where the strategy chooses the prompts: see :class:`core.strategies.Drawn`."""


def experiences(
    responses: Sequence[dict[str, Any]],
    *,
    max_len: int = 2048,
    first_version: int | None = None,
    drawn: Drawn | None = None,
    **_: Any,
) -> list[Experience]:
    """Responses in the form in which OpenRLHF trains on them, cut to ``max_len`` tokens.

    Upstream's takes twice as long, by more tensor operations. The tensors are the same, but for a missing score in
    ``info``, which is averaged for the log: 0 there.

    Args:
        first_version: of the policy when the engines were made; each rollout's own is then put into ``info``.
        drawn: how the strategy chose the prompt; put into ``info``.
    """
    tokens = [response["observation_tokens"][:max_len] for response in responses]
    spans = [_actions(response, len(each)) for response, each in zip(responses, tokens, strict=True)]
    columns = {
        "rewards": _column([response.get("reward") for response in responses]),
        "scores": _column([response.get("scores") for response in responses]),
        "response_length": _column([each[-1][1] - each[0][0] if each else 0 for each in spans]),
        "truncated": _column([response.get("truncated", False) for response in responses]),
        "total_length": _column([float(len(each)) for each in tokens]),
    }
    clipped = _column([len(each) >= max_len for each in tokens])
    made = []
    for place, response in enumerate(responses):
        numbers = {name: column[place] for name, column in columns.items()}
        sequences = torch.tensor([tokens[place]], dtype=torch.long)
        action_mask = torch.zeros(1, len(tokens[place]) - 1, dtype=torch.long)
        for start, end in spans[place]:
            action_mask[0, start - 1 : end - 1] = 1  # of the token that comes next
        info = {"response_clip_ratio": clipped[place]}
        if numbers["rewards"] is not None:
            info["reward"] = numbers["rewards"]
        if numbers["scores"] is not None:
            info["score"] = numbers["scores"].nan_to_num()
        for name, value in response.get("extra_logs", {}).items():
            info[name] = torch.tensor([value.flatten()[0].item() if isinstance(value, torch.Tensor) else value])
        if first_version is not None:
            info[VERSION] = torch.tensor([first_version + response["policy_updates"]], dtype=torch.float64)
        if drawn is not None:
            info[INCLUSION], info[WEIGHT] = torch.tensor([[drawn.inclusion], [drawn.weight]], dtype=torch.float64)
        log_probs = response["rollout_log_probs"]
        rollout = Experience(
            sequences=sequences,
            attention_mask=torch.ones_like(sequences),
            action_mask=action_mask,
            rollout_log_probs=None if log_probs is None else torch.tensor([log_probs[1:max_len]]),
            prompts=[response["prompt"]],
            labels=[response["label"]],
            images=[response.get("images")],
            mm_train_inputs=[response.get("mm_train_inputs")],
            info=info,
            **numbers,
        )
        made.append(rollout)
    return made


def _actions(response: dict[str, Any], length: int) -> list[tuple[int, int]]:
    """Where the generated tokens are among the first ``length``; the first of all is none."""
    spans = [(max(start, 1), min(end, length)) for start, end in response["action_ranges"]]
    return [(start, end) for start, end in spans if start < end]


def _column(values: list[Any]) -> Sequence[Any]:
    """Each value as a tensor of its own, shape (1,); None stays None."""
    if {type(value) for value in values} in ({float}, {int}, {bool}):
        return torch.tensor(values).split(1)  # in half the time
    return [None if value is None else torch.tensor([value]) for value in values]


def scores(group: list[Experience]) -> NDArray[np.float64] | None:
    """The verifier's scores, or else the rewards; None if a reward model gives them later."""
    values = [rollout.rewards if rollout.scores is None else rollout.scores for rollout in group]
    if any(value is None for value in values):
        return None
    return np.array([value.item() for value in values], dtype=np.float64)


def to_observe(rollout: Experience) -> Experience:
    """What is needed of a rollout that is not trained on; its tokens, in half the space, may be read."""
    return Experience(
        sequences=rollout.sequences.int(),
        action_mask=rollout.action_mask.bool(),
        rollout_log_probs=rollout.rollout_log_probs,
        rewards=rollout.rewards,
        scores=rollout.scores,
        response_length=rollout.response_length,
        truncated=rollout.truncated,
        prompts=rollout.prompts,
        labels=rollout.labels,
        images=rollout.images,
        info={name: rollout.info[name] for name in (VERSION, INCLUSION, WEIGHT) if name in rollout.info},
    )


def score(response: dict[str, Any]) -> float:
    """The verifier's score, or else the reward, as in training."""
    given = response.get("scores")
    value = single_value(response.get("reward") if given is None else given)
    if value is None:
        raise RewardError(f"no score came with a probe of prompt {response['prompt'][:80]!r}; fix the agent")
    return float(value)
