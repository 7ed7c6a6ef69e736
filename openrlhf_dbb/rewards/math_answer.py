r"""Reward function for mathematics: 1.0 right, 0.0 wrong or no answer, None not verified.

Give OpenRLHF the path of this file (``--reward.remote_url .../math_answer.py``). The answer is the last complete
``\boxed{...}``, else the last number or formula that stands for itself. Math-Verify compares it with the label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# OpenRLHF runs this file outside its package, so imports are absolute.
from openrlhf_dbb.rewards import answers
from openrlhf_dbb.rewards.verifier_pool import VerifierPool

_pool = VerifierPool()


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | int]) -> dict[str, Any]:
    """Verify responses against labels, under OpenRLHF's interface for reward functions.

    Args:
        queries: (B,) prompt + response, decoded with special tokens.
        prompts: (B,) the prompts as the model got them.
        labels: (B,) right answers: LaTeX with or without box or dollars, or a number.

    Returns:
        ``rewards`` and ``scores``: (B,) each 1.0, 0.0 or None. None is a missing observation, not a wrong answer: the
        time ran out, the verifier's process died, or Math-Verify failed on the response.

    Raises:
        ValueError: lengths differ, a query does not start with its prompt, or a label cannot be read.
    """
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        text = answers.label_text(label, prompt)
        answer = answers.final_answer(answers.response_text(query, prompt), text, prompt)
        rewards.append(score(answer, text))
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}


def score(answer: str | None, label: str) -> float | None:
    """Return 1.0 if the answer equals the label, 0.0 if it does not or is None, and None if nobody could verify it.

    Raise ValueError if Math-Verify cannot read the label.
    """
    if answer is None and answers.is_value(label):
        return 0.0
    correct = answers.same_integer(answer or "", label)
    if correct is None:
        # A missing answer goes to Math-Verify too, which refuses a label that it cannot read.
        correct = _pool.verify(answers.boxed(answer) if answer else "", answers.label_expression(label))
    return None if correct is None else float(correct)


def unreadable_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return the labels that Math-Verify cannot read, each with a reason. Plain integers need no check."""
    asked = [label for label in dict.fromkeys(labels) if not answers.same_integer(label, label)]
    with ThreadPoolExecutor(_pool.size) as threads:
        reasons = threads.map(_pool.why_unreadable, map(answers.label_expression, asked))
        unreadable = {label: why for label, why in zip(asked, reasons, strict=True) if why is not None}
    _pool.close()
    return unreadable
