"""The process that owns a run, and whether it is still alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A process that may write a run.

    Attributes:
        host: its host name.
        pid: its process id on that host.
        started: when it started, which tells it from a later process with the same id; None if unknown.
    """

    host: str
    pid: int
    started: str | None

    @classmethod
    def of_this_process(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    @property
    def is_local(self) -> bool:
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Return whether the process is alive; only meaningful if ``is_local``."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it exists, but belongs to another user
        started = _start_of(self.pid)
        return self.started is None or started is None or started == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


NOBODY = Owner("", 0, None)
"""Owner of a released run: anyone may claim it at once."""

SILENT_S = 3600.0
"""How long an owner on another host may go without a write before it counts as ended, in seconds."""


def has_ended(owner: Owner, silent_s: float) -> bool:
    """Return whether the owner of an unfinished run, which wrote ``silent_s`` seconds ago, seems to have ended.

    A process of this host is looked up. A process of another host, and nobody, counts as ended after ``SILENT_S``.
    """
    return not owner.is_alive() if owner.is_local else silent_s > SILENT_S


def _start_of(pid: int) -> str | None:
    """Return the start of the process as clock ticks since boot, with the boot's id; "ended" for a zombie.

    None where there is no /proc. Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime).
    """
    try:
        # The second field, the command in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else f"{fields[19]}@{boot}"
