"""A reward file of the user's, imported before a training in a process of its own, beside other preparations.

Usage: python reward_file.py FILE SYS_PATH   (a JSON list; prints what is wrong with the file, or nothing)
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator

LIMIT_S = 120.0


@contextlib.contextmanager
def imported(file: str | None) -> Iterator[None]:
    """Import a reward file beside the body, and wait for it at the end; without a file do nothing.

    Raises:
        UsageError: it cannot be imported, or has no ``reward_func(queries, prompts, labels)``.
    """
    if file is None:
        yield
        return
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__, file, json.dumps(sys.path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            yield
            problem, _ = process.communicate(timeout=max(0.0, began + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            problem = f"its import has not ended after {LIMIT_S:g} s"
        finally:
            process.kill()
    if not problem and process.returncode:
        problem = f"its import ended Python with exit code {process.returncode}"
    if problem:
        from openrlhf_dbb.errors import UsageError

        raise UsageError(f"--reward.remote_url {file}: {problem}")


def problem_of(file: str) -> str | None:
    """Import a file as OpenRLHF does; what is wrong with it, in one line."""
    file = os.path.abspath(file)  # as tracebacks name it
    try:
        spec = importlib.util.spec_from_file_location("reward_func", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except BaseException as error:
        return _where_and_what(error, file)
    reward_func = getattr(module, "reward_func", None)
    if reward_func is None:
        return "it defines no reward_func(queries, prompts, labels)"
    if not callable(reward_func):
        return f"its reward_func is no function but {type(reward_func).__name__}"
    if inspect.iscoroutinefunction(reward_func):
        return "its reward_func is async, which OpenRLHF does not await; make it a plain function"
    try:
        inspect.signature(reward_func).bind([], [], [])
    except TypeError as error:
        return f"its reward_func is not called as reward_func(queries, prompts, labels): {error}"
    except ValueError:  # a signature that Python does not know, of a function in C
        return None
    return None


def _where_and_what(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return f"line {lines[-1]}: {what}" if lines else what


def main() -> None:
    """Print what is wrong with the file of the command line."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the file prints is no answer
    file, path = sys.argv[1:]
    sys.path[:] = json.loads(path)
    problem = problem_of(file)
    if problem:
        print(problem, file=answer, end="", flush=True)
    os._exit(0)  # not held up by threads of the file's


if __name__ == "__main__":
    main()
