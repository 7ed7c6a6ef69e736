"""Our verifiers as reward functions of verl, which keeps what they read beside the score.

reward.custom_reward_function.path=pkg://openrlhf_dbb.rewards.for_verl
reward.custom_reward_function.name=math_answer
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from openrlhf_dbb.rewards import math_answer as mathematics
from openrlhf_dbb.rewards import reasoning_gym as tasks


def math_answer(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    opened: str = "",
    **_: Any,
) -> dict[str, Any]:
    """Return ``score`` and ``acc``, 1.0, 0.0 or NaN where nobody could verify, and ``read``, "" where nothing is told.

    ``extra_info["question"]``, if it is there, is the question, which repeated is no answer.
    ``opened`` is the thought that the chat template opens, as "<think>": verl passes responses alone. Give it as
    ``+reward.custom_reward_function.reward_kwargs.opened``. An unfinished thought earns 0.

    Raises:
        ValueError: the label cannot be read.
    """
    return _scored(mathematics.reward_func, solution_str, ground_truth, extra_info, opened)


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    opened: str = "",
    **_: Any,
) -> dict[str, Any]:
    """Return the same as :func:`math_answer`, for labels of :func:`openrlhf_dbb.tasks.problems`."""
    return _scored(tasks.reward_func, solution_str, ground_truth, extra_info, opened)


def _scored(
    reward_func: Callable[..., dict[str, Any]],
    response: str,
    label: str,
    extra_info: Mapping[str, Any] | None,
    opened: str,
) -> dict[str, Any]:
    question = str((extra_info or {}).get("question") or "") + opened
    result = reward_func([question + response], [question], [label])
    [score] = result["scores"]
    [read] = result.get("read") or [None]
    if score is None:
        score = math.nan
    return {"score": score, "acc": score, "read": read or ""}
