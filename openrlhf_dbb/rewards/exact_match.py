"""Reward function for answers that can be written in one way only: 1.0 if the response is the label, else 0.0.

Give OpenRLHF the path of this file (``--reward.remote_url .../exact_match.py``). The whole response is the answer.
OpenRLHF runs the file outside its package, so imports are absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.rewards.answers import response_text


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Compare responses with labels as text, under OpenRLHF's interface for reward functions.

    Args:
        queries: (B,) prompt + response, decoded with special tokens kept; those at the end of the response, and
            spaces around it, are ignored.
        prompts: (B,) the prompts as the model got them.
        labels: (B,) right answers; spaces around them are ignored.

    Returns:
        ``rewards`` and ``scores``: (B,) each 1.0 or 0.0.

    Raises:
        ValueError: lengths differ, a query does not start with its prompt, or a label is empty.
    """
    rewards = [_reward(*row) for row in zip(queries, prompts, labels, strict=True)]
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}


def _reward(query: str, prompt: str, label: str | int) -> float:
    text = str(label).strip()
    if not text:
        raise ValueError(f"the label of {prompt[:80]!r} is empty; name the column of the answers with --data.label_key")
    return float(response_text(query, prompt) == text)


reward_func.quick = True  # type: ignore[attr-defined]  # see openrlhf_dbb.actors.vllm_actor
