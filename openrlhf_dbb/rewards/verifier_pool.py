"""Runs Math-Verify, or the verifiers of ``openrlhf_dbb.tasks``, in processes with a hard limit of CPU time.

Math-Verify never finishes on some expressions, and its own limit works only in the main thread, which calls no rewards.

Usage: python -m openrlhf_dbb.rewards.verifier_pool SECONDS    one such process: requests on stdin, replies on stdout
"""

import contextlib
import functools
import importlib
import json
import logging
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.secrets import mask_process, own_log

MATH_WORKER = "openrlhf_dbb.rewards.verifier_pool"
TASK_WORKER = "openrlhf_dbb.tasks"
SECONDS_VARIABLE = "OPENRLHF_DBB_VERIFIER_SECONDS"
# The import of Math-Verify takes long while all other processes of a training start
START_LIMIT_S = 120.0
# A process that gets a tenth of a core still has its seconds; then it is one that waits for something.
WALL_FACTOR = 10.0
GRACE_S = 1.0
MEMORY_BYTES = 4 * 1024**3

logger = own_log(__name__)


class VerifierPool:
    """Up to ``size`` verifier processes (default: one a core, at most 8), each started when it is needed.

    Threads may share a pool. One verification may take ``time_limit_s`` seconds of its process's CPU time (default: 5,
    or the environment variable OPENRLHF_DBB_VERIFIER_SECONDS), and ``wall_factor`` times as much by the clock.
    ``worker``, the module of the processes, calls :func:`serve`.
    """

    def __init__(
        self,
        size: int | None = None,
        time_limit_s: float | None = None,
        worker: str = MATH_WORKER,
        wall_factor: float = WALL_FACTOR,
    ) -> None:
        self._worker = worker
        self._wall_factor = wall_factor
        self.size = size or min(8, os.cpu_count() or 1)
        self.time_limit_s = (
            float(os.environ.get(SECONDS_VARIABLE) or 5.0) if time_limit_s is None else time_limit_s
        )
        # Last in, first out: a process that runs is used before another one is started.
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._idle.put(None)

    def verify(self, answer: str, label: str) -> bool | None:
        """Return whether the verifier finds the answer equal to the label; None if it could not be verified.

        Raise ValueError for a label that the verifier cannot read, UsageError if no process could start.
        """
        reply = self.ask({"answer": answer, "label": label})
        if "bad_label" in reply:
            reason = reply["bad_label"]
            raise ValueError(
                f"cannot read the label {label!r} ({reason}); fix or drop this row of the data set"
            )
        if "correct" in reply:
            return bool(reply["correct"])
        logger.warning(
            "not verified (%s): answer %r, label %r", reply["unverified"], answer[-200:], label
        )
        return None

    def close(self) -> None:
        """Wait for running verifications and end all processes. The pool starts new ones if it is used again."""
        for process in [self._idle.get() for _ in range(self.size)]:
            if process is not None:
                _end(process)
            self._idle.put(None)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a process's reply to a request, or why there is none as ``unverified``."""
        process = self._idle.get()
        reply = None
        try:
            # It may have been killed while it was idle
            if process is None or process.poll() is not None:
                process = self._start()
            limit_s = self._wall_factor * self.time_limit_s + GRACE_S
            reply = _exchange(process, json.dumps(request) + "\n", limit_s)
        finally:
            # After an interrupt too: a late reply must not answer the next request.
            if reply is None and process is not None:
                _end(process)
            self._idle.put(process if reply else None)
        if reply is not None:
            return reply
        is_late = process.returncode in (-signal.SIGPROF, -signal.SIGKILL)
        return {
            "unverified": f"no reply within {self.time_limit_s} s"
            if is_late
            else "its process ended"
        }

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", self._worker, str(self.time_limit_s)]
        # With a fixed hash seed every process makes the same problems.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # In a session of its own it is ended with its children, and Ctrl-C reaches the parent alone.
        process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        if _exchange(process, "", START_LIMIT_S) is None:
            _end(process)
            raise UsageError(
                f"{' '.join(command)} did not start, its error is on stderr; is its package installed?"
            )
        return process


def _exchange(
    process: subprocess.Popen[str], request: str, seconds: float
) -> dict[str, Any] | None:
    """Send a request, or nothing, and return the next reply; None if there is none."""
    assert process.stdin is not None and process.stdout is not None
    replies = select.poll()
    replies.register(process.stdout, select.POLLIN)
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    # Its own timer ends the process first, unless a verifier has reset it, or waits, or a child keeps the pipe.
    line = process.stdout.readline() if replies.poll(1000 * seconds) else ""
    return json.loads(line) if line.endswith("\n") else None


def _end(process: subprocess.Popen[str]) -> None:
    # The block closes the pipes and waits. The process may have ended, or may not have read a request.
    with contextlib.suppress(ProcessLookupError, BrokenPipeError), process:
        os.killpg(process.pid, signal.SIGKILL)


# The functions below run in the verifier process.


def _with_capitals() -> None:
    """Make Math-Verify tell R from r: its configuration of the parser cannot be set from outside."""
    from latex2sympy2_extended import latex2sympy2
    from math_verify import parser

    config = latex2sympy2.ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = functools.partial(latex2sympy2.latex2sympy, conversion_config=config)


@functools.lru_cache(maxsize=1024)  # a label comes back with each rollout of its group
def _parse(text: str) -> Any:
    from math_verify import LatexExtractionConfig, parse
    from sympy import Derivative, Symbol, nan, zoo

    # Only the whole box: else a number in a formula that it cannot read would stand for the formula. Math-Verify's own
    # time limits use the alarm of the main thread, which is our limit.
    # Units are read before. By default it takes 5t and 5c for 5 tons and cups, so for 5.
    form = replace(LatexExtractionConfig().normalization_config, units=False)
    whole = {
        "extraction_config": [LatexExtractionConfig(normalization_config=form)],
        "extraction_mode": "first_match",
    }
    # It would drop them
    text = re.sub("(?<=[A-Za-z])'+", lambda primes: f"_{{prime{len(primes[0])}}}", text)
    boxed = text if r"\boxed" in text else rf"\boxed{{{text}}}"
    parsed = parse(boxed, **whole, parsing_timeout=None, raise_on_error=True)
    # It did not understand it
    if not parsed or isinstance(parsed[0], str) or parsed[0].has(zoo, nan):
        raise ValueError(f"understood as {parsed}")
    # The derivative of a symbol would count as 0.
    return parsed[0].replace(
        lambda part: isinstance(part, Derivative), lambda part: Symbol(str(part))
    )


def reply_to(label: str, answer: str) -> dict[str, Any]:
    """Return ``correct``, ``unverified`` (the reason) or ``bad_label`` (the reason)."""
    failed = "bad_label"
    try:
        right = _parse(label)
        failed = "unverified"
        return {"correct": _is_equal(right, _parse(answer))}
    except MemoryError:  # ends the process: it cannot be trusted any more
        raise
    except Exception as error:
        return {failed: repr(error)}


def _is_equal(right: Any, given: Any) -> bool:
    """Compare values without variables by their ratio, because Math-Verify takes 1e-20 for 0, and all else by it."""
    from math_verify import verify
    from sympy import Eq, Expr, Symbol

    if isinstance(right, Symbol) and isinstance(given, Symbol):  # Math-Verify takes X_1 for x_1
        return bool(right.name == given.name)
    has_i = _with_imaginary(right, given)
    given = _with_imaginary(given, right)
    right = has_i
    if all(isinstance(value, Expr) and not value.free_symbols for value in (right, given)):
        verdict = _is_same_constant(right.doit(), given.doit())
        if verdict is not None:
            return verdict
    # Math-Verify may compare the right-hand sides alone
    if isinstance(right, Eq) and isinstance(given, Eq):
        return _is_same_equation(right, given)
    options = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}
    return bool(verify(right, given, **options) or verify(given, right, **options))


def _is_same_equation(right: Any, given: Any) -> bool:
    """Return whether one equation is a multiple of the other."""
    from sympy import simplify

    ratio = simplify((right.lhs - right.rhs) / (given.lhs - given.rhs))
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


def _with_imaginary(value: Any, other: Any) -> Any:
    """Return 2 + i with the imaginary unit as its i, if the other value has no variables."""
    from sympy import I

    if other.free_symbols or [symbol.name for symbol in value.free_symbols] != ["i"]:
        return value
    return value.subs(dict.fromkeys(value.free_symbols, I))


def _is_same_constant(right: Any, given: Any) -> bool | None:
    """Compare two values without variables; None if they have no finite value. A decimal may differ by 1e-6 of it."""
    from sympy import Float, N

    if right.is_Rational and given.is_Rational:
        return bool(right == given)
    difference = N(abs(given - right), 30)
    size = N(abs(right), 30)
    if not (difference.is_number and size.is_number and difference.is_finite):
        return None
    tolerance = 1e-6 if right.has(Float) or given.has(Float) else 1e-20
    return bool(difference <= tolerance * size)


def serve(
    seconds: float,
    library: str,
    reply_to: Callable[..., dict[str, Any]],
    memory: int | None = MEMORY_BYTES,
) -> None:
    """Import the library, then answer requests until stdin closes; stdin closes too when the parent is killed."""
    mask_process()
    # Nobody handles the timer's signal, so it ends the process even within a computation in C, also after the parent's
    # death. It counts CPU time: on a busy machine right answers would be lost by the clock.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.set_int_max_str_digits(0)  # the time limit bounds long numbers
    # Only replies may go into the pipe. What a library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    importlib.import_module(library)  # before the first request, whose time it would take
    logging.disable(logging.WARNING)  # Math-Verify warns that it has no time limit
    print("{}", file=replies, flush=True)
    serving = os.getpid()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = reply_to(**json.loads(line))
        # A child that the verifier has forked: a second reply would go to the next answer
        if os.getpid() != serving:
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    _with_capitals()
    serve(float(sys.argv[1]), "math_verify", reply_to)
