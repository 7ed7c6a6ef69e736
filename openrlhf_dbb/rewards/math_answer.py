"""Reward function for mathematics: 1.0 right, 0.0 wrong or no answer, None not verified.

Give OpenRLHF the path of this file (``--reward.remote_url .../math_answer.py``). The last complete
``\\boxed{...}`` of the response is the answer; without one, what Math-Verify finds: the number or formula
after "answer", or else the last one. OpenRLHF runs the file outside its package, so imports are absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.rewards.answers import answer_expression, compare_integers, label_expression, response_text
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

_pool = VerifierPool.from_environment()


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Verify responses against labels, under OpenRLHF's interface for reward functions.

    Args:
        queries: (B,) prompt + response, decoded with special tokens kept.
        prompts: (B,) the prompts as the model got them.
        labels: (B,) right answers: LaTeX with or without box or dollars, or a number.

    Returns:
        ``rewards`` and ``scores``: (B,) each 1.0, 0.0, or None. None is a missing observation, not a wrong
        answer: the verification ran out of time or its process died, or Math-Verify failed on the response.

    Raises:
        ValueError: lengths differ, a query does not start with its prompt, or a label cannot be read.
    """
    rewards = [_reward(*row) for row in zip(queries, prompts, labels, strict=True)]
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}


def _reward(query: str, prompt: str, label: str | int) -> float | None:
    response, label = response_text(query, prompt), str(label)
    if not label.strip():
        raise ValueError(f"the label of {prompt[:80]!r} is empty; name the column of the answers with --data.label_key")
    correct = compare_integers(response, label)
    if correct is None:
        answer = answer_expression(response)
        # An empty answer goes to Math-Verify too: the label must be readable either way.
        correct = _pool.verify(answer, label_expression(label))
    return None if correct is None else float(correct)
