"""Reward function for work shown step by step: 1.0 if what follows the response's last "=" is the label, else 0.0.

Give OpenRLHF the path of this file (``--reward.remote_url .../last_result.py``). How it was reached does not count; a
response without "=" is all result. OpenRLHF runs the file outside its package, so imports are absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.rewards import exact_match
from openrlhf_dbb.rewards.answers import response_text


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Compare last results with labels as text, under OpenRLHF's interface for reward functions.

    Args:
        queries: (B,) prompt + response, decoded with special tokens kept; those at the end of the response, and
            spaces around the last result, are ignored.
        prompts: (B,) the prompts as the model got them.
        labels: (B,) right last results without "="; spaces around them are ignored.

    Returns:
        ``rewards`` and ``scores``: (B,) each 1.0 or 0.0.

    Raises:
        ValueError: lengths differ, a query does not start with its prompt, or a label is empty.
    """
    last = [
        prompt + response_text(query, prompt).rpartition("=")[2] for query, prompt in zip(queries, prompts, strict=True)
    ]
    return exact_match.reward_func(last, prompts, labels)


reward_func.quick = True  # type: ignore[attr-defined]  # see openrlhf_dbb.actors.vllm_actor
