"""Checks reward functions: the file before a training, and each result during it.

A process imports the file as OpenRLHF does, and scores some prompts, their labels and nothing as responses: a reward
function that pays for a repeated question teaches the model to repeat it.

Usage: python -m openrlhf_dbb.rewards.reward_file SECONDS    that process, as ``rewards.verifier_pool`` starts it
"""

import contextlib
import importlib.util
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.core.memory import refusal
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.estimators import RewardEstimator, RewardSupportError
from openrlhf_dbb.rewards.verifier_pool import VerifierPool, serve

LIMIT_S = 120.0  # for the import and the first verdicts
TRIED_PROMPTS = 16
_SCORING_S = 30.0  # a slow function is tried on fewer prompts
Scored = tuple[float | None, float | None, dict[str, Any], str | None]


class RewardError(RunError):
    """The reward function raised, or returned something that is not a reward."""


def scored(
    reward_func: Callable[..., Any], file: str, query: str, prompt: str, label: Any
) -> Scored:
    """Call a file's reward function for one response; return and raise as :func:`checked`."""
    source = f"reward_func of {Path(file).name}"
    try:
        result = reward_func([query], [prompt], [label])
    except (Exception, SystemExit) as error:  # asyncio would end its loop on SystemExit
        raise RewardError(f"{source} failed: {_failure(error, file)}") from error
    return checked(result, source)


def checked(result: Any, source: str) -> Scored:
    """Return reward, score, logs and what was read of one response; reward and score are both None if it is missing.

    Raise RewardError unless ``source`` gave a dictionary with one finite number or None as "rewards" (and "scores").
    """
    is_form = (
        isinstance(result, dict)
        and "rewards" in result
        and isinstance(result.get("extra_logs"), dict | None)
    )
    reward, score = (
        (_number(result.get(key)) for key in ("rewards", "scores")) if is_form else (math.nan, None)
    )
    read = result.get("read") if is_form else None
    read = read[0] if isinstance(read, (list, tuple)) and len(read) == 1 else read
    if math.nan in (reward, score) or not isinstance(read, str | None):
        shown = " ".join(repr(result)[:200].split())[:80]
        raise RewardError(
            f'{source} returned {shown}; return {{"rewards": [one number or None for each response]}}'
        )
    return (
        reward,
        reward if reward is None or score is None else score,
        result.get("extra_logs") or {},
        read,
    )


def _number(value: Any) -> float | None:
    """Return the number in a scalar or a list of one; None stays None, all else is math.nan."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    value = value.tolist() if hasattr(value, "tolist") else value
    is_number = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return None if value is None else float(value) if is_number else math.nan


def _failure(error: BaseException, file: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)
    ]
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return (
        f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ") + where
    )


def check(
    file: str, prompts: Sequence[str], labels: Sequence[str], estimator: RewardEstimator
) -> list[str]:
    """Return a warning if prompts are right as responses to themselves; refuse a broken file."""
    rows = rows_to_try(prompts, labels)
    with contextlib.closing(
        VerifierPool(1, LIMIT_S, "openrlhf_dbb.rewards.reward_file", 1.0)
    ) as pool:
        tried = pool.ask({"file": file, "rows": rows})
    source = f"reward_func of {Path(file).name}"
    if "scores" not in tried:
        raise UsageError(
            tried.get("failed")
            or f"{source}: {tried['unverified']}; call it by hand (docs/rewards.md)"
        )
    return judge(tried, source, estimator)


def rows_to_try(prompts: Sequence[str], labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return up to 16 prompts with their labels, from the whole data set."""
    step = max(1, len(prompts) // TRIED_PROMPTS)
    return list(zip(prompts, labels, strict=True))[::step][:TRIED_PROMPTS]


def judge(tried: dict[str, Any], source: str, estimator: RewardEstimator) -> list[str]:
    """Return a warning if ``source`` paid for prompts as responses to themselves.

    ``tried`` is as of :func:`try_file`. Raises UsageError if no score was given, or one that the
    estimator does not take.
    """
    name = source.removeprefix("reward_func of ")
    if not tried["scores"]:
        raise UsageError(f"{source} returned None for all responses that were tried")
    try:
        estimator.check(np.array([tried["scores"]]))
        estimator.belief.check(np.array([tried["scores"]]))
    except RewardSupportError as error:
        raise UsageError(str(refusal(estimator, error, source))) from error
    share, asked = tried["paid"] / tried["prompts"], tried["prompts"]
    warning = (
        f"{name}, given the prompt itself as the response, scores {share:.0%} of {asked} sampled prompts as right: the "
        "model can learn to repeat the question; use a stricter reward, or ask for the answer in another form"
    )
    return [warning] if share else []


# The functions below run in the process.


def try_file(file: str, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return "scores", the numbers of "prompts" and of those "paid"; or why it "failed"."""
    scores: list[float] = []
    paid, prompts, began = 0, 0, time.monotonic()
    try:
        spec: Any = importlib.util.spec_from_file_location("reward_func", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        reward_func: Any = getattr(module, "reward_func", None)
        if not callable(reward_func):
            raise RewardError(
                f"{file} has no reward_func; define reward_func(queries, prompts, labels, **kwargs)"
            )
        for prompt, label in rows:
            tried = [
                scored(reward_func, file, prompt + text, prompt, label)
                for text in (prompt, label, "")
            ]
            scores += [score for _, score, *_ in tried if score is not None]
            paid, prompts = paid + ((tried[0][0] or 0) >= 1), prompts + 1
            if time.monotonic() - began > _SCORING_S:
                break
    except (Exception, SystemExit) as error:
        return {
            "failed": str(error)
            if isinstance(error, RewardError)
            else f"{file} failed: {_failure(error, file)}"
        }
    return {"scores": scores, "prompts": prompts, "paid": paid}


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the file prints
    # OpenRLHF calls reward functions in threads, where no signal can be handled
    with ThreadPoolExecutor(1) as thread:
        serve(
            float(sys.argv[1]),
            "json",
            lambda **tried: thread.submit(try_file, **tried).result(),
            memory=None,
        )
