"""The process that owns a run, and whether it is still alive."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Owner:
    """A process that may write a run."""

    host: str  # its host name
    pid: int  # its process id on that host
    # When, in which boot and PID namespace: a later process may have its id; None if unknown
    started: str | None

    @classmethod
    def of_this_process(cls) -> "Owner":
        """Return the owner that this process is."""
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    @classmethod
    def of(cls, row: Any) -> "Owner":
        """Return the owner of a run, from its row of ``dbb_run``."""
        return cls(row.owner_host, row.owner_pid, row.owner_started)

    @property
    def is_local(self) -> bool:
        """Return whether its process id means something here: same host, boot and PID namespace."""
        # Containers and machines may share a host name.
        return self.host == socket.gethostname() and _system_of(self.started) == _system_of(
            _start_of(os.getpid())
        )

    @property
    def is_gone(self) -> bool:
        """Return whether the run has no owner, or one that is known to have ended."""
        if not self.host or not self.is_local:
            return not self.host
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it exists, but belongs to another user
        return _start_of(self.pid) not in (None, self.started)

    def __str__(self) -> str:
        one_line = " ".join(self.host.split())  # a host that was edited by hand may have several
        return f"process {self.pid} on {one_line}"


NOBODY = Owner("", 0, None)  # of a released run: anyone may claim it at once
SILENT_S = 3600.0  # without a write, after which an owner that cannot be looked up counts as ended


def _system_of(started: str | None) -> str:
    return (started or "").partition("@")[2]


def _start_of(pid: int) -> str | None:
    """Return the start of the process as clock ticks since boot @ the boot's id @ this PID namespace.

    "ended" for a zombie, None where there is no /proc. Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime).
    """
    try:
        # The second field, the command in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else f"{fields[19]}@{boot}@{namespace}"
