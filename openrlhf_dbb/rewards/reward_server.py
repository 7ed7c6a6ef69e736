"""Asks a reward server: for each response of a training, and some prompts before it.

A server gets ``{"query": [text], "prompts": [text], "labels": [text]}`` of one response by POST. It
answers in JSON what a reward file returns: ``{"rewards": [number or None]}``.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.rewards.reward_file import RewardError, Trial, checked, judge, rows_to_try
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.terminal import shown

TRIAL_S = 30.0
_ANSWER_S = 180.0  # OpenRLHF's limits
_TRIES = 5
_PAUSE_S = 1.0
_QUOTED = 200  # characters of an answer that is no reward


def name_of(url: str) -> str:
    """Return how messages name a reward server, without the passwords of its URL."""
    return f"the reward server {without_passwords(url)}"


async def ask(url: str, query: str, prompt: str, label: Any) -> Any:
    """Return a server's answer for one response, as :func:`reward_file.checked` takes it.

    Raises:
        RewardError: the last of five tries gave no JSON; it holds what the server said.
    """
    for _ in range(_TRIES - 1):
        try:
            return await _ask_once(url, query, prompt, label, _ANSWER_S)
        except RewardError:
            await asyncio.sleep(_PAUSE_S)
    return await _ask_once(url, query, prompt, label, _ANSWER_S)


async def _ask_once(url: str, query: str, prompt: str, label: Any, seconds: float) -> Any:
    body = {"query": [query], "prompts": [prompt], "labels": [label]}
    limit = aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url, json=body) as response,
        ):
            text = await response.text(errors="replace")
    except TimeoutError:
        raise RewardError(f"{name_of(url)} did not answer within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RewardError(f"{name_of(url)} gave no answer: {without_passwords(reason)}") from None
    if response.ok and "json" in response.content_type:
        with contextlib.suppress(ValueError):
            return json.loads(text)
    status = f"{response.status} {response.reason} ({response.content_type})"
    said = shown(" ".join(without_passwords(text).split()), _QUOTED)
    raise RewardError(f"{name_of(url)} answered {status}: {said or 'nothing'}")


def check(
    url: str, prompts: Sequence[str], labels: Sequence[str], estimator: RewardEstimator
) -> list[str]:
    """Try a server on some prompts, as a reward file is tried.

    Returns a line with the scores that it gave, and a warning if it pays for repeated questions.

    Raises:
        UsageError: it is down or slow, or answers something else than scores the estimator takes.
    """
    try:
        tried = asyncio.run(_try(url, rows_to_try(prompts, labels)))
    except RewardError as error:
        advice = "start it, or fix it, or give another --reward.remote_url (docs/rewards.md)"
        raise UsageError(f"{error}; {advice}") from error
    warnings = judge(tried, name_of(url), estimator)
    scores = tried["scores"]
    missing = 3 * tried["prompts"] - len(scores)
    line = f"reward     {without_passwords(url)} gave {len(scores)} scores from {min(scores):g} "
    line += f"to {max(scores):g}, and {missing} None, on {tried['prompts']} prompts"
    return [line, *(f"warning: {warning}" for warning in warnings)]


async def _try(url: str, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return "scores", and the numbers of "prompts" and of those "paid" for a repeated question."""
    trial = Trial()
    began = time.monotonic()
    for prompt, label in rows:
        responses = (prompt, label, "")
        asked = [_ask_once(url, prompt + text, prompt, label, TRIAL_S) for text in responses]
        trial.add([checked(answer, name_of(url)) for answer in await asyncio.gather(*asked)])
        if time.monotonic() - began > TRIAL_S:  # a slow server is tried on fewer
            break
    return vars(trial)
