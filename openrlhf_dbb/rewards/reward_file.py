"""Tries a user's reward file before a training, in a process of its own.

The process imports the file as OpenRLHF does. Then it scores some prompts as if they were responses: a reward function
that pays for a repeated question teaches the model to repeat it.

Usage: python -m openrlhf_dbb.rewards.reward_file FILE    [prompt, label] pairs in JSON on stdin; JSON on stdout
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError

LIMIT_S = 120.0
TRIED_PROMPTS = 16


def check(file: str, prompts: Sequence[str], labels: Sequence[str]) -> str | None:
    """Return a warning in one line if prompts are right as responses to themselves, or if the file fails on them.

    Raises:
        UsageError: the file cannot be imported, or has no reward_func.
    """
    if Path(file).parent == Path(__file__).parent:  # the rewards of this package do not pay for a prompt
        return None
    step = max(1, len(prompts) // TRIED_PROMPTS)
    rows = list(zip(prompts, labels, strict=True))[::step][:TRIED_PROMPTS]
    command = [sys.executable, "-m", "openrlhf_dbb.rewards.reward_file", file]
    # Ray's workers have the driver's import path too.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command, input=json.dumps(rows), env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"{Path(file).name} could not be tried: no result within {LIMIT_S:g} s"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"its process ended with code {done.returncode}"])[-1]
        raise UsageError(f"--reward.remote_url {file}: {reason}")
    scored = json.loads(done.stdout.splitlines()[-1])
    about = f"{Path(file).name}, given the prompt itself as the response,"
    if "failed" in scored:
        return f"{about} failed: {scored['failed']}"
    if not scored["paid"]:
        return None
    return (
        f"{about} scores {scored['paid'] / len(rows):.0%} of {len(rows)} sampled prompts as right: the "
        "model can learn to repeat the question; use a stricter reward, or ask for the answer in another form"
    )


def score_prompts(file: str, rows: list[list[str]]) -> dict[str, Any]:
    """Import the file and return for how many prompts it pays as "paid", or an error as "failed"."""
    reward_func = runpy.run_path(file)["reward_func"]
    paid = 0
    try:
        for prompt, label in rows:
            (reward,) = reward_func([prompt + prompt], [prompt], [label])["rewards"]
            paid += reward is not None and float(reward) >= 1
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"paid": paid}


if __name__ == "__main__":
    print(json.dumps(score_prompts(sys.argv[1], json.load(sys.stdin))), flush=True)
    os._exit(0)  # threads of the file must not keep the process
