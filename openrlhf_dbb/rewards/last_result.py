"""Reward function for work shown step by step: 1.0 if the text after the response's last "=" is the label, else 0.0.

Give OpenRLHF the path of this file (``--reward.remote_url .../last_result.py``). The steps before do not count. A
response without "=" is all result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# OpenRLHF runs this file outside its package, so imports are absolute.
from openrlhf_dbb.rewards import exact_match
from openrlhf_dbb.rewards.answers import response_text


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Compare last results with labels as text; takes, returns and raises the same as ``exact_match.reward_func``."""
    results = [
        prompt + response_text(query, prompt).rpartition("=")[2] for query, prompt in zip(queries, prompts, strict=True)
    ]
    return exact_match.reward_func(results, prompts, labels)


reward_func.quick = True  # type: ignore[attr-defined]  # actors/vllm_actor.py then calls it without a thread
