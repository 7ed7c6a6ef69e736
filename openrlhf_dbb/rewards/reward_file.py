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

    Raises:
        RewardError: ``source`` gave no dictionary with one finite number or None as "rewards" (and "scores").
    """
    if not isinstance(result, dict):
        raise _no_reward(result, source)
    reward = _number(result.get("rewards", math.nan))
    score = _number(result.get("scores"))
    logs = result.get("extra_logs") or {}
    read = _only(result.get("read"))
    is_form = isinstance(logs, dict) and isinstance(read, str | None)
    if not is_form or math.nan in (reward, score):
        raise _no_reward(result, source)
    if reward is None or score is None:
        score = reward
    return reward, score, logs, read


def _no_reward(result: Any, source: str) -> RewardError:
    shown = " ".join(repr(result)[:200].split())[:80]
    form = '{"rewards": [one number or None for each response]}'
    return RewardError(f"{source} returned {shown}; return {form}")


def _only(value: Any) -> Any:
    """Return the item of a list of one, or of an array; any other value as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _number(value: Any) -> float | None:
    """Return the number in a scalar or a list of one; None stays None, all else is math.nan."""
    value = _only(value)
    if hasattr(value, "tolist"):  # a NumPy number in a list
        value = value.tolist()
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return float(value) if is_number else math.nan


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


class Trial:
    """What a reward function gave for ``prompts`` prompts: its ``scores``, and how many questions it ``paid``."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.prompts = 0
        self.paid = 0

    def add(self, results: Sequence[Scored]) -> None:
        """Add the results for the question as a response, the label and nothing."""
        self.scores += [score for _, score, *_ in results if score is not None]
        reward_of_question = results[0][0]
        if reward_of_question is not None and reward_of_question >= 1:
            self.paid += 1
        self.prompts += 1


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
    share = tried["paid"] / tried["prompts"]
    warning = (
        f"{name}, given the prompt itself as the response, scores {share:.0%} of {tried['prompts']} "
        "sampled prompts as right: the model can learn to repeat the question; use a stricter "
        "reward, or ask for the answer in another form"
    )
    return [warning] if share else []


# The functions below run in the process.


def try_file(file: str, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return "scores", the numbers of "prompts" and of those "paid"; or why it "failed"."""
    try:
        return _tried(file, rows)
    except RewardError as error:
        return {"failed": str(error)}
    except (Exception, SystemExit) as error:
        return {"failed": f"{file} failed: {_failure(error, file)}"}


def _tried(file: str, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    began = time.monotonic()
    spec: Any = importlib.util.spec_from_file_location("reward_func", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reward_func: Any = getattr(module, "reward_func", None)
    if not callable(reward_func):
        raise RewardError(
            f"{file} has no reward_func; define reward_func(queries, prompts, labels, **kwargs)"
        )
    trial = Trial()
    for prompt, label in rows:
        responses = (prompt, label, "")
        trial.add([scored(reward_func, file, prompt + text, prompt, label) for text in responses])
        if time.monotonic() - began > _SCORING_S:
            break
    return vars(trial)


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
