r"""Reward function for mathematics as generous as Math-Verify itself: 1.0 right, 0.0 wrong, None not verified.

Give OpenRLHF the path of this file (``--reward.remote_url .../math_answer_generous.py``). The last complete
``\boxed{...}`` is the answer; without a box Math-Verify takes the number or formula after "answer", or the last one,
and it calculates: for label 5, a response that repeats the question "7 + 4 - 6" is right. ``math_answer`` is strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_dbb.rewards.answers import TAIL_CHARACTERS, boxed, label_expression, last_box, response_text
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

_pool = VerifierPool.from_environment()


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Verify responses against labels; arguments, returns and errors as ``math_answer.reward_func``."""
    rewards = [_reward(*row) for row in zip(queries, prompts, labels, strict=True)]
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}


def _reward(query: str, prompt: str, label: str | int) -> float | None:
    response = response_text(query, prompt)
    box = last_box(response)
    answer = response[-TAIL_CHARACTERS:] if box is None else boxed(box) if box.strip() else ""
    correct = _pool.verify(answer, label_expression(str(label)))
    return None if correct is None else float(correct)
