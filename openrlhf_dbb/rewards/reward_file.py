"""Try a reward file before a training, in a process of its own, beside other preparations.

The process imports the file as OpenRLHF does. Then it scores some prompts as if they were responses: a reward function
that pays for repeating the question teaches the model to repeat it.

Usage: python reward_file.py FILE SYS_PATH   (SYS_PATH is a JSON list)
Output: a JSON line ``{"problem": text or null}``. If stdin then holds a JSON line of [prompt, label] pairs, a second
line ``{"paid": count}`` or ``{"failed": text}``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

IMPORT_LIMIT_S = 120.0
TRIAL_LIMIT_S = 20.0
TRIED_PROMPTS = 32


class RewardTrial:
    """The process that has imported a reward file."""

    def __init__(self, file: str) -> None:
        self._file, self._began = file, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, __file__, file, json.dumps(sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._imported = False

    def finish_import(self) -> None:
        """Wait for the import.

        Raises:
            UsageError: the file cannot be imported, or has no ``reward_func(queries, prompts, labels)``.
        """
        if self._imported:
            return
        left = max(0.0, self._began + IMPORT_LIMIT_S - time.monotonic())
        reply = self._reply(left)
        if reply is None:
            problem = f"its import has not ended after {IMPORT_LIMIT_S:g} s"
        elif reply == {}:
            problem = f"its import ended Python with exit code {self._process.wait()}"
        else:
            problem = reply["problem"]
        if problem:
            from openrlhf_dbb.errors import UsageError

            raise UsageError(f"--reward.remote_url {self._file}: {problem}")
        self._imported = True

    def repeated_questions(self, prompts: Sequence[str], labels: Sequence[str]) -> str | None:
        """Score a sample of prompts as responses to themselves, and return a warning if some are right.

        Returns:
            One line for the user, also if the function failed on them; None if no prompt is right.
        """
        self.finish_import()
        if not prompts:
            return None
        step = max(1, len(prompts) // TRIED_PROMPTS)
        rows = list(zip(prompts, labels, strict=True))[::step][:TRIED_PROMPTS]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        reply = self._reply(TRIAL_LIMIT_S)
        about = f"{os.path.basename(self._file)}, given the prompt itself as the response,"
        if reply is None:
            return f"{about} took over {TRIAL_LIMIT_S:g} s for {len(rows)} prompts; not checked whether it pays for it"
        if "paid" not in reply:
            return f"{about} failed: {reply.get('failed', 'its process ended')}"
        if not reply["paid"]:
            return None
        share = reply["paid"] / len(rows)
        return (
            f"{about} scores {share:.0%} of {len(rows)} sampled prompts as right: the model can learn to repeat the "
            "question; use a stricter reward (math_answer for mathematics), or ask for the answer in a form that the "
            "prompt does not have"
        )

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _reply(self, limit_s: float) -> dict[str, Any] | None:
        """One line of the process; None if it takes longer, {} if the process ended without one."""
        assert self._process.stdout is not None
        overdue = threading.Event()

        def give_up() -> None:
            overdue.set()
            self._process.kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if line:
            return dict(json.loads(line))
        return None if overdue.is_set() else {}


@contextlib.contextmanager
def tried(file: str | None) -> Iterator[RewardTrial | None]:
    """Import a reward file beside the body and wait for it at the end; without a file do nothing.

    Raises:
        UsageError: the file cannot be imported, or has no ``reward_func(queries, prompts, labels)``.
    """
    if file is None:
        yield None
        return
    trial = RewardTrial(file)
    try:
        yield trial
        trial.finish_import()
    finally:
        trial.end()


def load(file: str) -> tuple[Callable[..., Any] | None, str | None]:
    """Import a file as OpenRLHF does.

    Returns:
        The function and None; or None and what is wrong with the file, in one line.
    """
    file = os.path.abspath(file)  # as tracebacks name it
    try:
        spec = importlib.util.spec_from_file_location("reward_func", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except BaseException as error:
        return None, _where_and_what(error, file)
    reward_func = getattr(module, "reward_func", None)
    if reward_func is None:
        return None, "it defines no reward_func(queries, prompts, labels)"
    if not callable(reward_func):
        return None, f"its reward_func is no function but {type(reward_func).__name__}"
    if inspect.iscoroutinefunction(reward_func):
        return None, "its reward_func is async, which OpenRLHF does not await; make it a plain function"
    try:
        inspect.signature(reward_func).bind([], [], [])
    except TypeError as error:
        return None, f"its reward_func is not called as reward_func(queries, prompts, labels): {error}"
    except ValueError:  # Python does not know the signature of a function written in C
        pass
    return reward_func, None


def _where_and_what(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return f"line {lines[-1]}: {what}" if lines else what


def _score_prompts(reward_func: Callable[..., Any], rows: list[list[str]], file: str) -> dict[str, Any]:
    paid = 0
    try:
        for prompt, label in rows:
            (reward,) = reward_func([prompt + prompt], [prompt], [label])["rewards"]
            paid += reward is not None and float(reward) >= 1
    except Exception as error:
        return {"failed": _where_and_what(error, os.path.abspath(file))}
    return {"paid": paid}


def main() -> None:
    """Import the file of the command line, then score the prompts that stdin holds."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the file prints is no answer
    file, path = sys.argv[1:]
    sys.path[:] = json.loads(path)
    reward_func, problem = load(file)
    print(json.dumps({"problem": problem}), file=answers, flush=True)
    line = sys.stdin.readline()
    if reward_func is not None and line:
        print(json.dumps(_score_prompts(reward_func, json.loads(line), file)), file=answers, flush=True)
    os._exit(0)  # threads of the file must not keep the process


if __name__ == "__main__":
    main()
