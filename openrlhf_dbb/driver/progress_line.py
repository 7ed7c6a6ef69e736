"""Writes the line on the terminal that says what a training is doing: in place, or as lines of a log."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from openrlhf_dbb.platform.ray_start import busyness

_BETWEEN = " · "
_LOG_EVERY_S = 10.0
_PACE_STEPS = 10  # the mean over more steps would follow a changing length of responses too slowly


def text(progress: Any, done: int | None, now: float) -> str:
    """Return the line, its most important fields first; ``done`` counts the phase's rollouts, if they are counted."""
    held_out = [f"held-out {100 * progress.accuracy[max(progress.accuracy)]:.1f} %"] if progress.accuracy else []
    if progress.phase == "finished":
        parts = [f"finished {progress.step} of {progress.total} steps", *held_out]
    elif progress.phase == "starting":
        parts = [f"starting engines {duration(now - progress.since)}"]
    else:
        count = f" {min(done, progress.size)}/{progress.size}" if done is not None and progress.size else ""
        # The time shows that the run is not frozen where nothing is counted, or where the count stands still.
        time_too = f" {duration(seconds)}" if (seconds := now - progress.since) >= (10 if count else 2) else ""
        step = f"step {min(progress.step + 1, progress.total)} of {progress.total}"
        parts = [step, *held_out, f"{progress.phase}{count}{time_too}"]
    if progress.reward is not None:
        parts.append(f"reward {progress.reward:.3f}")
    ends = progress.ends[-_PACE_STEPS - 1 :]  # of whole steps, with evaluations and checkpoints
    if len(ends) > 1:
        pace = (ends[-1] - ends[0]) / (len(ends) - 1)
        parts.append(f"{duration(pace)} a step")
        left = (progress.total - progress.step) * pace - (now - progress.ends[-1])
        if progress.phase != "finished" and progress.total > progress.step:
            parts.append(f"{duration(max(left, 0))} left")
    if progress.zero_variance is not None:
        parts.append(f"zero variance {100 * progress.zero_variance:.0f} %")
    return _BETWEEN.join(parts)


def duration(seconds: float) -> str:
    """Return a duration in the unit that a person would use: "2.4 s", "74 s", "10 min", "1 h 07 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextlib.contextmanager
def waiting(why: str) -> Iterator[None]:
    """Show a line such as ``starting Ray 12 s (load 38 on 2 cores)`` for as long as the block takes; then remove it."""
    line, done, began = ProgressLine(), threading.Event(), time.monotonic()

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
    """One line that a terminal rewrites; any other stream gets a line every 10 seconds, and the last one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.in_place = self._stream.isatty()
        self._shown, self._written = "", 0.0

    def show(self, line: str, *, last: bool = False) -> None:
        """Show a line; ``last`` ends it."""
        if line == self._shown and not last:
            return
        if self.in_place:
            fits, width = line, shutil.get_terminal_size().columns
            while len(fits) >= width and _BETWEEN in fits:
                fits = fits.rpartition(_BETWEEN)[0]
            self._write("\r" + fits[: width - 1] + "\x1b[K" + ("\n" if last else ""))
        else:
            due = time.monotonic() - self._written >= _LOG_EVERY_S
            if not (due or (last and line != self._shown)):
                return
            self._write(line + "\n")
            self._written = time.monotonic()
        self._shown = line

    def warn(self, warning: str) -> None:
        """Write a warning above the line."""
        self.clear()
        self._write(f"warning: {warning}\n")

    def clear(self) -> None:
        self._write("\r\x1b[K" * self.in_place)
        self._shown = ""

    def _write(self, characters: str) -> None:
        self._stream.write(characters)
        self._stream.flush()
