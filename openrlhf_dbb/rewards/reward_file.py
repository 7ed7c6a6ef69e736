"""Checks reward functions: each result during a training, and the whole file before it, in a process of its own.

The process imports the file as OpenRLHF does. Then it scores some prompts as if they were responses: a reward function
that pays for a repeated question teaches the model to repeat it. Right answers and empty responses are scored too.

Usage: python -m openrlhf_dbb.rewards.reward_file FILE    [prompt, label] pairs in JSON on stdin; JSON on stdout
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.estimators import RewardEstimator, RewardSupportError

LIMIT_S = 120.0  # for the import and the first verdicts
TRIED_PROMPTS = 16
_SCORING_S = 30.0  # a slow function is tried on fewer prompts
Scored = tuple[float | None, float | None, dict[str, Any]]
_FORM = 'return {"rewards": [one number or None for each response]}'


class RewardError(RunError):
    """The reward function raised, or returned something that is not a reward."""


def scored(reward_func: Callable[..., Any], file: str, query: str, prompt: str, label: Any) -> Scored:
    """Call the reward function of a file for one response; return and raise the same as :func:`checked`."""
    source = f"reward_func of {Path(file).name}"
    try:
        result = reward_func([query], [prompt], [label])
    except (Exception, SystemExit) as error:  # asyncio would end its loop on SystemExit
        raise RewardError(f"{source} failed: {failure(error, file)}") from error
    return checked(result, source)


def checked(result: Any, source: str) -> Scored:
    """Return reward, score and logs of one response; reward and score are finite, or both None for a missing one.

    Args:
        result: the return value of the reward function or server ``source`` for this response.

    Raises:
        RewardError: it is no dictionary with one number or None as "rewards" (and "scores").
    """
    if not isinstance(result, dict) or "rewards" not in result:
        raise RewardError(f"{source} returned {_short(result)}; {_FORM}")
    logs = result.get("extra_logs")
    if not isinstance(logs, dict | None):
        raise RewardError(f'{source} returned {_short(logs)} as "extra_logs"; return a dictionary, or leave it out')
    reward, score = (_number(result.get(key), key, source) for key in ("rewards", "scores"))
    return reward, reward if reward is None or score is None else score, logs or {}


def _number(values: Any, key: str, source: str) -> float | None:
    """Return the number in a scalar, or in a list, array or tensor of one; None stays None."""
    values = _plain(values)
    if isinstance(values, (list, tuple)):
        if len(values) != 1:
            raise RewardError(f'{source} returned {len(values)} "{key}" for 1 response; {_FORM}')
        values = _plain(values[0])
    if values is None:
        return None
    if not isinstance(values, Real) or not abs(values) <= sys.float_info.max:
        raise RewardError(
            f'{source} returned {_short(values)} in "{key}"; finite numbers are allowed, and None for a response that '
            "could not be verified"
        )
    return float(values)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _short(value: Any) -> str:
    return " ".join(repr(value)[:200].split())[:80]


def failure(error: BaseException, file: str) -> str:
    """Return an exception in one line, with the last line of the file that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, lines, error = error.filename, [error.lineno], type(error)(error.msg)
    where = f" ({Path(file).name}:{lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ") + where


def check(file: str, prompts: Sequence[str], labels: Sequence[str], estimator: RewardEstimator | None) -> str | None:
    """Return a warning in one line if prompts are right as responses to themselves.

    Args:
        estimator: that must be able to take the scores; None: OpenRLHF's own advantages take any.

    Raises:
        UsageError: the file cannot be imported, fails or hangs, or returns something that is not a reward.
    """
    name, step = Path(file).name, max(1, len(prompts) // TRIED_PROMPTS)
    rows = list(zip(prompts, labels, strict=True))[::step][:TRIED_PROMPTS]
    if not Path(file).is_file():
        raise UsageError(f"--reward.remote_url {file}: there is no such file")
    tried = _tried(file, rows)
    if "error" in tried:
        raise UsageError(tried["error"])
    if not tried["scores"]:
        raise UsageError(f"reward_func of {name} returned None for all responses that were tried")
    try:
        if estimator is not None:
            estimator.check(np.array([tried["scores"]]))
    except RewardSupportError as error:
        raise UsageError(
            f"reward_func of {name} returned the score {error.value:g}, and --estimator {estimator.name} needs "
            f"{error.allowed}; change it, or give --dbb.partial_credit or --estimator point (docs/rewards.md)"
        ) from error
    if not tried["paid"]:
        return None
    return (
        f"{name}, given the prompt itself as the response, scores {tried['paid'] / tried['prompts']:.0%} of "
        f"{tried['prompts']} sampled prompts as right: the model can learn to repeat the question; use a stricter "
        "reward, or ask for the answer in another form"
    )


def _tried(file: str, rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the result of :func:`try_file` in a process of its own, none of whose children stay."""
    command = [sys.executable, "-m", "openrlhf_dbb.rewards.reward_file", file]
    # Ray's workers have the driver's import path too.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # Files, because a child of the process could keep a pipe open.
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as replies:
        json.dump(rows, given)
        given.seek(0)
        process = subprocess.Popen(
            command, stdin=given, stdout=replies, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"{file} gave no verdict within {LIMIT_S:g} s; does its reward_func end?"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        replies.seek(0)
        reply = replies.read()
    return json.loads(reply) if reply else {"error": f"{file}: its process ended with code {code}"}


def try_file(file: str, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Import the file and score some responses to prompts with labels.

    Returns:
        The "scores", the number of "prompts" that were tried, and of those whose repetition is "paid"; or an "error".
    """
    scores: list[float] = []
    paid, prompts, began = 0, 0, time.monotonic()
    try:
        reward_func = _imported(file)
        for prompt, label in rows:
            tried = [scored(reward_func, file, prompt + text, prompt, label) for text in (prompt, label, "")]
            scores += [score for _, score, _ in tried if score is not None]
            paid += (tried[0][0] or 0) >= 1
            prompts += 1
            if time.monotonic() - began > _SCORING_S:
                break
    except RewardError as error:
        return {"error": str(error)}
    except BaseException as error:  # SystemExit too
        return {"error": f"{file} failed: {failure(error, file)}"}
    return {"scores": scores, "prompts": prompts, "paid": paid}


def _imported(file: str) -> Any:
    """Return the function ``reward_func`` of a file, imported as OpenRLHF does."""
    spec = importlib.util.spec_from_file_location("reward_func", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "reward_func", None)):
        raise RewardError(f"{file} has no function reward_func; define reward_func(queries, prompts, labels, **kwargs)")
    return module.reward_func


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")  # what the file prints goes elsewhere
    os.dup2(2, 1)
    print(json.dumps(try_file(sys.argv[1], json.load(sys.stdin))), file=replies, flush=True)
    os._exit(0)  # threads of the file must not keep the process
