"""Reward function for the tasks of reasoning-gym; labels are those of ``openrlhf_dbb.tasks.problems``."""

from collections.abc import Sequence
from typing import Any

# OpenRLHF runs this file outside its package, so imports are absolute.
from openrlhf_dbb.rewards.answers import rewards
from openrlhf_dbb.rewards.verifier_pool import TASK_WORKER, VerifierPool

_pool = VerifierPool(worker=TASK_WORKER)


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]
) -> dict[str, Any]:
    """Verify responses; takes, returns and raises the same as ``math_answer.reward_func``."""
    return rewards(
        lambda response, label, _: (score(response, label), None), queries, prompts, labels
    )


def score(response: str, label: str) -> float | None:
    """Return 1.0 for an answer with full credit, 0.0 for another one or none, None if nobody could verify it.

    The last ``<answer>...</answer>`` is the answer, else the last number on the last line if the task's own answer is a
    number, else that line or the whole response. Raise ValueError for what is not the label of a task.
    """
    correct = _pool.verify(response, label)
    return None if correct is None else float(correct)
