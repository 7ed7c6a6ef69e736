"""Which part of a run has died, where and why; the others' complaints about it hide that."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOOK_S = 10.0
_WORKER = re.compile(r"class_name: (?P<what>\w+)|pid: (?P<pid>\d+)|ip: (?P<ip>[\d.:a-fA-F]+)")


def oom_kills() -> int:
    """How often this host's kernel has killed a process for want of memory; 0 if it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def find(error: BaseException, parts: Mapping[str, Any], oom_kills_before: int) -> str | None:
    """The part of the run that has died, in a line; None if none has, or if an exception of its own has ended it.

    Args:
        error: what ended the training; a survivor's complaint, maybe.
        parts: Ray's actors by what they are called.
        oom_kills_before: :func:`oom_kills` when the run began.
    """
    import ray

    deadline = time.monotonic() + LOOK_S
    asked = {actor.__ray_ready__.remote(): name for name, actor in parts.items()}
    while asked:
        answered, _ = ray.wait(list(asked), timeout=max(0.0, deadline - time.monotonic()))
        if not answered:
            break
        name = asked.pop(answered[0])
        try:
            ray.get(answered[0])
        except ray.exceptions.ActorUnavailableError as unavailable:  # whether it is dead is known a moment later
            if time.monotonic() > deadline:
                return _line(name, unavailable, oom_kills_before)
            time.sleep(0.2)
            asked[parts[name].__ray_ready__.remote()] = name
        except ray.exceptions.RayActorError as dead:
            return None if dead.actor_init_failed else _line(name, dead, oom_kills_before)
    if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
        return _line(None, error, oom_kills_before)
    if isinstance(error, (ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)):
        return str(error).strip().splitlines()[0]
    return None


def _line(name: str | None, error: BaseException, oom_kills_before: int) -> str:
    text = str(error)
    known = {kind: value for match in _WORKER.finditer(text) for kind, value in match.groupdict().items() if value}
    what = name or known.get("what", "an actor")
    where = f" on {_host(known['ip'])}" if "ip" in known else ""
    process = f" (process {known['pid']})" if "pid" in known else ""
    return f"{what}{process}{where} has died: {_why(text, known.get('ip'), oom_kills_before)}"


def _why(text: str, ip: str | None, oom_kills_before: int) -> str:
    lower = text.lower()
    if any(said in lower for said in ("node died", "node has died", "dead node", "its node", "node is dead")):
        return "its host was lost"
    if "memory pressure" in lower:
        return "Ray killed it for want of memory on its host"
    if oom_kills() > oom_kills_before:
        return "the kernel has killed a process for want of memory meanwhile"
    return "its process was killed or has crashed (out of memory? then dmesg on its host says so)"


def _host(ip: str) -> str:
    """What an address is called in the cluster."""
    import ray

    names = {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes()}
    return f"{names[ip]} ({ip})" if ip in names else ip
