"""Which part of a run has died, where and why; the others' complaints about it hide that."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_S = 10.0


@dataclass(frozen=True)
class Part:
    """An actor of a run.

    Attributes:
        name: what it is called.
        actor: Ray's handle.
        place: reference to its :func:`place`.
    """

    name: str
    actor: Any
    place: Any

    @classmethod
    def of(cls, name: str, actor: Any) -> Part:
        return cls(name, actor, actor.__ray_call__.remote(place))


def place(_actor: Any) -> tuple[str, int]:
    """Host, with its address, and process of the actor that this runs in."""
    import ray

    return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})", os.getpid()


def oom_kills() -> int:
    """How often this host's kernel has killed a process for want of memory; 0 if it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def find(parts: list[Part], oom_kills_before: int) -> str | None:
    """The part of a run that has died, in a line; None if none has, or if an exception of its own has ended it.

    Args:
        parts: all actors that the run needs.
        oom_kills_before: :func:`oom_kills` when the run began.
    """
    import ray

    deadline = time.monotonic() + LOOK_S
    asked = {part.actor.__ray_ready__.remote(): part for part in parts}
    gone: dict[str, Exception] = {}
    while asked and (left := deadline - time.monotonic()) > 0:
        answered, _ = ray.wait(list(asked), timeout=left)
        for reference in answered:
            part = asked.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.ActorUnavailableError as error:  # dead or only late: known a moment later
                gone[part.name] = error
                asked[part.actor.__ray_ready__.remote()] = part
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    return None
                gone[part.name] = error
                deadline = min(deadline, time.monotonic() + 1.0)  # for the others of its host
        time.sleep(0.1)
    if not gone:
        return None
    places = {part.name: _known(part) for part in parts}
    name = min(gone, key=lambda each: (isinstance(gone[each], ray.exceptions.ActorUnavailableError), each))
    host, process = places[name]
    on_host = [each for each, (other, _) in places.items() if other == host]
    lost = len(on_host) > 1 and set(on_host) <= set(gone) and len({other for other, _ in places.values()}) > 1
    if lost and host is not None:
        return f"host {host} is gone or cut off, and with it {' and '.join(on_host)}"
    where = f" (process {process} on host {host})" if host is not None else ""
    return f"{name}{where} has died: {_why(str(gone[name]), oom_kills_before)}"


def named(error: Exception, oom_kills_before: int) -> str | None:
    """The actor that has died by what Ray's error says, in a line, where only OpenRLHF's own trainer knows the actors.

    Args:
        error: as Ray raises it here, or has handed it on from the actor that saw it.
        oom_kills_before: as of :func:`find`.

    Returns:
        None if no actor's process has died, or if an exception of its own has ended it.
    """
    found = re.findall(r"\tclass_name: (\w+)\n\tactor_id: \w+\n\tpid: (\d+)\n", str(error))
    if not found:
        return None
    name, process = found[-1]
    return f"{name} (process {process}) has died: {_why(str(error), oom_kills_before)}"


def _known(part: Part) -> tuple[str | None, int | None]:
    """Where a part is, or was."""
    import ray

    try:
        found: tuple[str, int] = ray.get(part.place, timeout=0)
    except ray.exceptions.RayError:  # it was gone before it could tell
        return None, None
    return found


def _why(text: str, oom_kills_before: int) -> str:
    if "memory pressure" in text:
        return "Ray has killed it for want of memory on its host"
    if oom_kills() > oom_kills_before:
        return "the kernel has killed a process for want of memory meanwhile"
    return "its process was killed or has crashed (for want of memory? dmesg on its host tells)"
