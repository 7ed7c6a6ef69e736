"""Reward function for answers with one way of writing: 1.0 if the whole response is the label, else 0.0."""

from collections.abc import Sequence
from typing import Any

# OpenRLHF runs this file outside its package, so imports are absolute.
from openrlhf_dbb.rewards.answers import rewards


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]
) -> dict[str, Any]:
    """Compare texts without spaces around them and special tokens; interface of ``math_answer.reward_func``."""
    return rewards(
        lambda response, label, _: (float(response == label), None), queries, prompts, labels
    )


reward_func.quick = True  # type: ignore[attr-defined]  # actors/vllm_actor.py then calls it without a thread
