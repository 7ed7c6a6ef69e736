"""Reward function for answers with one way of writing: 1.0 if the whole response is the label, else 0.0."""

from collections.abc import Sequence
from typing import Any

# OpenRLHF runs this file outside its package, so imports are absolute.
from openrlhf_dbb.rewards.answers import label_text, response_text


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Compare texts without spaces around them and special tokens; interface of ``math_answer.reward_func``."""
    rows = zip(queries, prompts, labels, strict=True)
    rewards = [float(response_text(query, prompt) == label_text(label, prompt)) for query, prompt, label in rows]
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}


reward_func.quick = True  # type: ignore[attr-defined]  # actors/vllm_actor.py then calls it without a thread
