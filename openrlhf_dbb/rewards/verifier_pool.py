"""Math-Verify in processes of its own, with a hard time limit.

Some expressions never finish, Math-Verify's own time limit works only in the main thread, and OpenRLHF calls reward
functions in other threads: so each verification runs in a process that can be killed.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS_VARIABLE = "OPENRLHF_DBB_VERIFIER_SECONDS"
PROCESSES_VARIABLE = "OPENRLHF_DBB_VERIFIER_PROCESSES"
WORKER_SCRIPT = Path(__file__).with_name("verifier_worker.py")
START_LIMIT_S = 120.0  # a worker imports for long while all other processes of a training start

logger = logging.getLogger(__name__)


class VerifierStartError(RuntimeError):
    """A verifier process ended, or said nothing, before its first request."""


class VerifierPool:
    """Up to ``size`` verifier processes, each started when it is first needed. Safe to use from many threads.

    Args:
        size: processes, at least 1; default min(8, CPU count).
        time_limit_s: seconds of wall-clock time one verification may take, above 0.
        worker_script: the program each process runs.

    Raises:
        ValueError: size or time_limit_s out of range.
    """

    def __init__(self, size: int | None = None, time_limit_s: float = 5.0, worker_script: Path = WORKER_SCRIPT) -> None:
        self.size = min(8, os.cpu_count() or 1) if size is None else size
        self.time_limit_s = time_limit_s
        self.worker_script = worker_script
        if self.size < 1:
            raise ValueError(
                f"the number of verifier processes must be at least 1, got {self.size} (see {PROCESSES_VARIABLE})"
            )
        if not 0 < time_limit_s < float("inf"):
            raise ValueError(f"the time limit must be above 0 s, got {time_limit_s} (see {SECONDS_VARIABLE})")
        # Last in, first out: a process that runs is used before another one is started.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._idle.put(None)

    @classmethod
    def from_environment(cls) -> VerifierPool:
        """A pool with the size and time limit of the two environment variables, where they are set."""
        size, seconds = os.environ.get(PROCESSES_VARIABLE), os.environ.get(SECONDS_VARIABLE)
        try:
            return cls(size=int(size) if size else None, time_limit_s=float(seconds) if seconds else 5.0)
        except ValueError as error:
            raise ValueError(
                f"{PROCESSES_VARIABLE}={size}, {SECONDS_VARIABLE}={seconds}: {error}; "
                "give a whole number of processes and a number of seconds, or unset them"
            ) from error

    def verify(self, answer: str, label: str) -> bool | None:
        """Whether Math-Verify finds the answer equal to the label; None if it could not be verified.

        Args:
            answer: the text to find the answer in, boxed if the box is known.
            label: the right answer, boxed likewise.

        Raises:
            ValueError: Math-Verify cannot read the label.
            VerifierStartError: a process could not start; the message holds what it wrote.
        """
        reply = self._ask({"answer": answer, "label": label})
        if "bad_label" in reply:
            raise ValueError(
                f"Math-Verify cannot read the label {label!r} ({reply['bad_label']}); "
                "fix or drop this row of the data set"
            )
        if "correct" in reply:
            return bool(reply["correct"])
        logger.warning(
            "not verified (%s): answer %r, label %r",
            reply.get("ended") or reply["unverified"],
            answer[-200:],
            label,
        )
        return None

    def why_unreadable(self, label: str) -> str | None:
        """Why Math-Verify cannot read a label, boxed as for :meth:`verify`, in the time limit; None if it can.

        Raises:
            VerifierStartError: a process could not start; the message holds what it wrote.
        """
        reply = self._ask({"label": label})
        return reply.get("bad_label") or reply.get("ended")

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        """A worker's reply, or ``{"ended": reason}``."""
        worker = self._idle.get()
        reusable = None
        try:
            if worker is not None and not worker.is_alive():
                worker.kill()  # it ended while idle, not because of this answer
                worker = None
            if worker is None:
                worker = _Worker(self.worker_script, self.time_limit_s)
            reply = worker.ask(request, self.time_limit_s)
            reusable = worker if "ended" not in reply else None
        finally:
            # Also after an interrupt: a late reply must not meet the next question.
            if reusable is None and worker is not None:
                worker.kill()
            self._idle.put(reusable)
        return reply

    def close(self) -> None:
        """Wait for running verifications and end all processes; the pool starts new ones if used again."""
        workers = [self._idle.get() for _ in range(self.size)]
        for worker in workers:
            if worker is not None:
                worker.kill()
            self._idle.put(None)


class _Worker:
    """One verifier process; used by one thread at a time."""

    def __init__(self, script: Path, time_limit_s: float) -> None:
        # A file: nobody reads a pipe while the worker runs, so that a full one would block it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in kill)
        # Twice the limit, so that ours ends it first; its own is for when the parent has died.
        command = [sys.executable, str(script), str(2 * time_limit_s + 1)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )
        self._unread = b""
        reply = self._read_reply(START_LIMIT_S)
        if "ready" not in reply:
            written = self._written_errors()
            self.kill()
            raise VerifierStartError(
                f"{' '.join(command)} did not start ({reply.get('ended', reply)}); is math-verify installed? "
                f"It wrote:\n{written}"
            )

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, str], limit_s: float) -> dict[str, Any]:
        """The worker's reply, or ``{"ended": reason}`` after which it must be killed."""
        assert self.process.stdin is not None
        line = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while line:
                line = line[self.process.stdin.write(line) :]
        except BrokenPipeError:
            return {"ended": self._why_ended()}
        return self._read_reply(limit_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _read_reply(self, limit_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        poll = select.poll()  # not select(): a training process may hold more than 1024 files
        poll.register(self.process.stdout, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return {"ended": f"no reply within {limit_s} s"}
            if poll.poll(remaining_s * 1000):
                received = os.read(self.process.stdout.fileno(), 65536)
                if not received:
                    return {"ended": self._why_ended()}
                self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _why_ended(self) -> str:
        return f"process ended with code {self.process.wait()}: {self._written_errors()[-300:]}"

    def _written_errors(self) -> str:
        # pread: the worker writes at the same file offset.
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
