"""Our verifiers as reward functions of TRL, for a column "label" of the data set.

They log what they read of each completion as TRL's extra column "read", which the posteriors store.

    PosteriorGRPOTrainer(model, math_answer, ..., label_column="label")
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from openrlhf_dbb.core.texts import prompt_text, response_text
from openrlhf_dbb.rewards import math_answer as mathematics
from openrlhf_dbb.rewards import reasoning_gym as tasks

_template_end: ContextVar[str] = ContextVar("_template_end", default="")


@contextmanager
def prompts_end_with(template_end: str) -> Iterator[None]:
    """Tell the verifiers what the chat template adds behind prompts of messages, which TRL does not pass on.

    A template may open a thought there, with "<think>". An unfinished thought earns 0. ``PosteriorGRPOTrainer``
    and ``remember`` call this function; with a plain ``GRPOTrainer`` nobody does.
    """
    token = _template_end.set(template_end)
    try:
        yield
    finally:
        _template_end.reset(token)


def math_answer(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    label: Sequence[str],
    log_extra: Callable[[str, list[str]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return (B,) 1.0, 0.0, or None where nobody could verify.

    Raises:
        ValueError: a label cannot be read.
    """
    return _scored(mathematics.reward_func, prompts, completions, label, log_extra)


def reasoning_gym(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    label: Sequence[str],
    log_extra: Callable[[str, list[str]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the same as :func:`math_answer`, for labels of :func:`openrlhf_dbb.tasks.problems`."""
    return _scored(tasks.reward_func, prompts, completions, label, log_extra)


def _scored(
    reward_func: Callable[..., dict[str, Any]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    labels: Sequence[str],
    log_extra: Callable[[str, list[str]], None] | None,
) -> list[float | None]:
    questions = []
    for prompt in prompts:
        template_end = "" if isinstance(prompt, str) else _template_end.get()
        questions.append(prompt_text(prompt) + template_end)
    responses = [response_text(completion) for completion in completions]
    queries = [question + response for question, response in zip(questions, responses, strict=True)]
    result = reward_func(queries, questions, labels)
    scores: list[float | None] = result["scores"]
    if log_extra is not None:
        read = result.get("read") or [None] * len(scores)
        log_extra("read", [text or "" for text in read])
    return scores
