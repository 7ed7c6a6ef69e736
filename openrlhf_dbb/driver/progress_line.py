"""The line that a training shows while it goes on."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from openrlhf_dbb.platform.ray_start import busyness
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.terminal import drop

_BETWEEN = " · "
_LOG_EVERY_S = 10.0
_PACE_STEPS = 10  # the mean over more steps would follow a changing length of responses too slowly
_CLEAR = "\r\x1b[K"


def progress_text(progress: Any, done: int | None, now: float) -> str:
    """Return the line, its most important fields first.

    Args:
        progress: an :class:`openrlhf_dbb.actors.progress.Progress`.
        done: the phase's rollouts so far, if they are counted.
        now: the time of ``time.monotonic``, in seconds.
    """
    parts = _phase(progress, done, now)
    if progress.reward is not None:
        parts.append(f"reward {progress.reward:.3f}")
    ends = progress.ends[-_PACE_STEPS - 1 :]  # of whole steps, with evaluations and checkpoints
    if len(ends) > 1:
        pace = (ends[-1] - ends[0]) / (len(ends) - 1)
        parts.append(f"{duration(pace)} a step")
        if progress.phase != "finished" and progress.total > progress.step:
            left = (progress.total - progress.step) * pace - (now - progress.ends[-1])
            parts.append(f"{duration(max(left, 0))} left")
    if progress.zero_variance is not None:
        parts.append(f"zero variance {100 * progress.zero_variance:.0f} %")
    return _BETWEEN.join(parts)


def _phase(progress: Any, done: int | None, now: float) -> list[str]:
    """Return what goes on at which step, and the last held-out accuracy."""
    seconds = now - progress.since
    if progress.phase == "starting":
        return [f"starting engines {duration(seconds)}"]
    held_out = []
    if progress.accuracy:
        last = progress.accuracy[max(progress.accuracy)]
        held_out.append(f"held-out {100 * last:.1f} %")
    if progress.phase == "finished":
        return [f"finished {progress.step} of {progress.total} steps", *held_out]
    phase = progress.phase
    silent_s = 2
    if done is not None and progress.size:
        phase += f" {min(done, progress.size)}/{progress.size}"
        silent_s = 10
    # Where nothing is counted, or the count stands still, the time shows that the run goes on.
    if seconds >= silent_s:
        phase += f" {duration(seconds)}"
    step = min(progress.step + 1, progress.total)
    return [f"step {step} of {progress.total}", *held_out, phase]


def duration(seconds: float) -> str:
    """Return a duration in a person's unit: "2.4 s", "74 s", "10 min", "1 h 07 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextlib.contextmanager
def waiting(why: str) -> Iterator[None]:
    """Show a line such as ``starting Ray 12 s (load 38 on 2 cores)`` during the block.

    It is removed at the end.
    """
    line = ProgressLine()
    done = threading.Event()
    began = time.monotonic()

    def show() -> None:
        # The first seconds are silent in a log, where lines stay.
        while not done.wait(1 if line.in_place else _LOG_EVERY_S):
            line.show(f"{why} {duration(time.monotonic() - began)} ({busyness()})")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.clear()


class ProgressLine:
    """One line that a terminal rewrites.

    Any other stream gets a line every 10 seconds, and the last one.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.in_place = self._stream.isatty()
        self._shown = ""
        self._written = 0.0

    def show(self, line: str, *, last: bool = False) -> None:
        """Show a line; ``last`` ends it."""
        if line == self._shown and not last:
            return
        if self.in_place:
            end = "\n" if last else ""
            self._write(f"\r{_fitting(line)}\x1b[K{end}")
        else:
            is_due = time.monotonic() - self._written >= _LOG_EVERY_S
            if not is_due and (not last or line == self._shown):
                return
            self._write(line + "\n")
            self._written = time.monotonic()
        self._shown = line

    def warn(self, warning: str) -> None:
        """Write a warning above the line."""
        self.clear()
        self._write(f"warning: {without_passwords(warning)}\n")

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self.in_place:
            self._write(_CLEAR)
        self._shown = ""

    def _write(self, characters: str) -> None:
        try:
            self._stream.write(characters)
            self._stream.flush()
        except OSError:  # nobody reads it any more, and the training goes on
            drop(self._stream)


def _fitting(line: str) -> str:
    """Return as many fields of a line as fit into the terminal; the first is cut to fit."""
    width = shutil.get_terminal_size().columns
    while len(line) >= width and _BETWEEN in line:
        line = line.rpartition(_BETWEEN)[0]
    return line[: width - 1]
