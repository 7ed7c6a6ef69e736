"""Starts Ray, also on a busy machine.

The raylet waits 15 s for each of its agents to choose a port, and ends itself if one is late. An agent imports Python
packages for 2 s of processor time, which takes longer than that beside other jobs. So the agents get their ports here.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.secrets import mask_process
from openrlhf_dbb.terminal import prepare_streams

WAIT_S = 600
KILLED = "killed or crashed, perhaps for want of memory"
HOST_LOST = "Ray has lost the host, which is down or was too busy to answer"
_TRIES = 2
_LONGEST_SOCKET = 107  # bytes of a path; Linux has room for 108 with the zero behind it
_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
# Ray's processes read these variables when they start; `import ray` reads some of them in this process.
_VARIABLES = {
    "RAY_agent_register_timeout_ms": 1000 * WAIT_S,
    "RAY_worker_register_timeout_seconds": WAIT_S,
    # Ray gives up a host whose raylet answers five health checks in a row too late, by default after 10 s each. With a
    # single host the run is lost then, although nothing has died.
    "RAY_health_check_timeout_ms": 1000 * WAIT_S,
    # Ray would start as many idle workers as there are cores; see start_workers.
    "RAY_prestart_worker_first_driver": 0,
    "RAY_enable_worker_prestart": 0,
}


def prepare() -> None:
    """Let Ray's processes take their time, and Ray start no idle ones. Call this before ``import ray``."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, str(value))


def prepare_worker() -> None:
    """Prepare a worker of Ray before its actor is made, which calls this: its output and imports."""
    prepare_streams()
    mask_process()
    if cpu.active():
        cpu.prepare_worker()
    else:
        machine.add_shims()


def start(
    on_cpu: Mapping[str, int], environment: Mapping[str, str], *, verbose: bool, **runtime: Any
) -> None:
    """Start Ray, or join the cluster; call :func:`prepare` first. Raises RunError if it does not start.

    ``on_cpu`` has the cores and logical GPUs of a Ray of our own without CUDA, ``environment`` the variables of all
    workers that this process does not set.
    """
    from ray._private.utils import get_num_cpus

    options: dict[str, Any] = {}
    if machine.ray_cluster() is None:
        gpus = len(machine.look().gpus)
        # With fewer cores than one beside each GPU, Ray would wait for ever. Two are for OpenRLHF's trainers.
        options |= on_cpu if cpu.active() else {"num_cpus": max(int(get_num_cpus()), gpus + 2)}
        # A dashboard that does not start holds up Ray for as long as Ray may take
        options["include_dashboard"] = False
    unless_set = {"TOKENIZERS_PARALLELISM": "true", **environment}
    variables = {name: os.environ.get(name, value) for name, value in unless_set.items()}
    variables |= (cpu if cpu.active() else cuda).worker_environment()
    init(
        runtime_env={"env_vars": variables, **runtime},
        log_to_driver=verbose,
        logging_level="warning",
        **options,
    )


def init(**options: Any) -> None:
    """Call ``ray.init``, with ports for the agents if it starts a cluster; try it twice.

    Raises:
        RunError: Ray did not start.
        UsageError: the folder of its sockets has too long a path.
    """
    import ray
    from ray._private import node

    check_socket_path()
    began = time.monotonic()
    rays_node = node.Node
    for left in reversed(range(_TRIES)):
        try:
            node.Node = _small_node(rays_node, logs=options.get("log_to_driver", True))
            ray.init(**options)
            return
        # Of any class: Ray raises a bare Exception where a start takes too long
        except Exception as error:
            ray.shutdown()
            if not left:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                took = f"tried {_TRIES} times in {time.monotonic() - began:.0f} s ({busyness()})"
                logs = f"{_folder()}/session_latest/logs"
                advice = "; start again when the machine is less busy" if _is_late(reason) else ""
                raise RunError(
                    f"Ray did not start, {took}: {reason} Its logs are in {logs}{advice}"
                ) from error
        finally:
            node.Node = rays_node


def _is_late(reason: str) -> bool:
    return bool(re.search(r"time[ds]?[ -]?out|too long to|deadline", reason, re.IGNORECASE))


def _folder() -> str:
    """Return where a Ray of our own keeps its sessions."""
    return os.path.join(os.environ.get(_folder_variable(), "/tmp"), "ray")


def _folder_variable() -> str:
    return "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"


def check_socket_path() -> None:
    """Raise UsageError if Ray's sockets would have longer paths than the system takes."""
    if machine.ray_cluster() is not None:
        return
    session = f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    path = os.path.join(_folder(), session, "sockets", "plasma_store")
    surplus = len(os.fsencode(path)) - _LONGEST_SOCKET
    if surplus > 0:
        name = _folder_variable()
        raise UsageError(
            f"{name} {os.environ[name]} is {surplus} bytes too long for the paths of Ray's sockets; "
            "set RAY_TMPDIR to a shorter folder, such as /tmp"
        )


def places(gpus_each: int = 1) -> int:
    """Return how many actors with so many GPUs and one CPU each the hosts of Ray can hold."""
    import ray

    hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(host.get("GPU", 0) // gpus_each, host.get("CPU", 0))) for host in hosts)


def find_lost(gpus: int = 0) -> str | None:
    """Return a line if Ray has given up all its hosts, or so many that too few ``gpus`` are left; else None.

    Ask it where something waits for an actor: one that was not made yet would wait for a host for ever. Without CUDA
    the GPUs are logical ones.
    """
    import ray

    nodes = ray.nodes()
    lost = sorted({node["NodeManagerHostname"] for node in nodes if not node["Alive"]})
    if not any(node["Alive"] for node in nodes):
        return f"no host is left ({', '.join(lost)}): {HOST_LOST} (now: {busyness()})"
    left = places()
    if not lost or left >= gpus:
        return None
    return f"too few hosts are left (without {', '.join(lost)} {left} of {gpus} GPUs): {HOST_LOST}"


def busyness() -> str:
    """Return how busy this machine is, as in "load 38 on 2 cores"."""
    return f"load {os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores"


def start_workers(number: int) -> None:
    """Let the only host of Ray start so many processes now; actors that are made later take them."""
    import ray
    from ray._private import grpc_utils, ray_constants, worker
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

    core = worker.global_worker.core_worker
    [host] = ray.nodes()
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.PYTHON, job_id=core.get_current_job_id().binary(), num_workers=number,
        runtime_env_info=core.get_job_config().runtime_env_info, keep_alive_duration_secs=WAIT_S,
    )  # fmt: skip
    address = f"{host['NodeManagerAddress']}:{host['NodeManagerPort']}"
    with grpc_utils.init_grpc_channel(address, ray_constants.GLOBAL_GRPC_OPTIONS) as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request)


def _small_node(rays_node: Any, *, logs: bool) -> Any:
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    class Node(rays_node):
        def start_head_processes(self) -> None:
            # One monitor grows clusters, the other prints what workers write. Each imports for a second.
            self._ray_params.update(no_monitor=True, include_log_monitor=logs)
            super().start_head_processes()

        def start_api_server(self, **options: Any) -> None:
            """Start no dashboard; Ray would start a part of it in any case."""

        def start_raylet(self, *args: Any, **options: Any) -> None:
            with contextlib.ExitStack() as stack:
                # All are open at once, so that no two get the same port.
                sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in _PORTS]
                numbers = [server.getsockname()[1] for server in sockets]
            ports = dict(zip(_PORTS, numbers, strict=True))
            self._ray_params.update(**ports)
            # The raylet knows the other ports from its arguments, and this one from a file alone.
            port = ports["dashboard_agent_listen_port"]
            persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
            super().start_raylet(*args, **options)

    return Node
