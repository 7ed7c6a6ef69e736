r"""Reward function for mathematics: 1.0 right, 0.0 wrong or no answer, None not verified.

Give OpenRLHF the path of this file (``--reward.remote_url .../math_answer.py``). The last complete ``\boxed{...}`` of
the response is the answer; without a box the last number or formula that stands for itself is
(:mod:`openrlhf_dbb.rewards.final_answer`). Math-Verify then compares it with the label. A calculation that is not
carried out is no answer. OpenRLHF runs the file outside its package, so imports are absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.rewards.answers import boxed, label_expression, response_text, same_integer
from openrlhf_dbb.rewards.final_answer import final_answer, is_value
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
    correct = same_integer(response, label)
    if correct is not None:  # the response is nothing else, as of a small model that was taught to answer so
        return float(correct)
    answer = final_answer(response, label, prompt)
    if answer is None and is_value(label):
        return 0.0
    correct = same_integer(answer or "", label)
    if correct is None:
        # A missing answer goes to Math-Verify too, which refuses a label that it cannot read.
        correct = _pool.verify(boxed(answer) if answer else "", label_expression(label))
    return None if correct is None else float(correct)
