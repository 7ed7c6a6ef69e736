"""Ray of one run: started for it alone, or a cluster that is joined and checked."""

import logging
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openrlhf_dbb.driver import interrupt
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings
from openrlhf_dbb.driver.checks import gpus_needed, too_few_gpus
from openrlhf_dbb.driver.progress_line import waiting
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, machine, ray_start

# A task waits until its host has started a worker, and a busy host takes minutes.
_TASK_WITHIN_S = 300


class RayStart:
    """Starts Ray in a thread of its own, while the main thread goes on with the checks.

    Raises:
        UsageError: the cluster to join does not answer.
    """

    # Until this process ends: Ray's processes die with their thread.
    _thread = ThreadPoolExecutor(1, "ray")

    def __init__(self, settings: Settings) -> None:
        ray_start.prepare()
        import ray  # noqa: F401  two threads that import Ray at the same time may see half of it

        # The address of the cluster that is joined; None if Ray is started for this run alone.
        self.joins = machine.ray_cluster()
        _check_answers(self.joins)
        self._settings = settings
        # Ray wants to handle SIGTERM and warns that it cannot outside the main thread;
        # interrupt.py does.
        worker = logging.getLogger("ray._private.worker")
        worker.addFilter(lambda record: "SIGTERM" not in record.getMessage())
        self._started = self._thread.submit(start, settings)

    def wait(self) -> None:
        """Wait until Ray has started.

        Raises as :func:`start`.
        """
        with waiting("starting Ray"):
            self._started.result()
        interrupt.arm()

    def check_hosts(self, folder: Path) -> list[str]:
        """If a cluster is joined: refuse hosts that do not share the run's folder.

        Returns:
            Lines with its address, GPUs and hosts, and one if the GPUs are taken.

        Raises:
            UsageError: a host does not see the folder, or runs no task.
        """
        if self.joins is None:
            return []
        import ray

        self.wait()
        token = folder / f".seen-by-all-{uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
        try:
            _check_seen(token)
        finally:
            token.unlink(missing_ok=True)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        free = int(ray.available_resources().get("GPU", 0))
        hosts = sorted(_host(node) for node in ray.nodes() if node["Alive"])
        joined = f"{gpus} GPUs on {len(hosts)} nodes, {', '.join(hosts)}"
        lines = [f"cluster    joined {self.joins}: {joined}"]
        needed = gpus_needed(self._settings.args)
        if free < needed:
            taken = f"{free} of {gpus} are free, others run on the rest"
            lines.append(f"waiting for {needed} GPUs: {taken}")
        return lines


def _check_answers(address: str | None) -> None:
    """Raise UsageError if nobody listens at the address; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:
        return  # no address, or a form that only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"the Ray cluster at {address} does not answer ({reason}); start it, call `ray stop` "
            f"if it is gone, or set RAY_ADDRESS={machine.ALONE} to start one for this run alone"
        ) from error


def start(settings: Settings) -> None:
    """Start Ray or join the cluster.

    Raises:
        UsageError: the flags need more GPUs than the cluster has.
        RunError: Ray does not start.
    """
    args = settings.args
    needed = gpus_needed(args)
    ray_start.start(
        # A rank or an engine takes one logical GPU. With too few, OpenRLHF would wait for ever.
        {"num_gpus": needed, "num_cpus": 16 + 2 * needed},
        {"NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"},
        # One weight sync alone prints a line per parameter.
        verbose=args.verbose or settings.estimator == NO_ESTIMATOR,
        worker_process_setup_hook="openrlhf_dbb.platform.ray_start.prepare_worker",
    )
    for refusal in too_few_gpus(args, ray_start.places()):
        raise UsageError(refusal)
    if cpu.active() and machine.ray_cluster() is None:
        ray_start.start_workers(args.vllm.num_engines + args.actor.num_gpus_per_node)


def _host(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _check_seen(token: Path) -> None:
    """Raise UsageError if a host with GPUs does not see a file, or runs no task."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(lambda: token.exists())  # Ray takes no method
    calls = {}
    for node in _hosts_with_gpus():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[_host(node)] = look.options(scheduling_strategy=there).remote()
    for host, call in calls.items():
        try:
            is_seen = ray.get(call, timeout=_TASK_WITHIN_S)
        except ray.exceptions.GetTimeoutError as error:
            problem = f"node {host} has run no task for {_TASK_WITHIN_S // 60} minutes"
            # Ray runs its workers at niceness 15, so that other programs go first.
            advice = "end other programs on it, or start its Ray with RAY_worker_niceness=0"
            raise UsageError(f"{problem}; {advice}") from error
        except ray.exceptions.RayError as error:  # a host that died just now counts as alive
            lines = str(error).strip().splitlines()
            problem = f"cannot run a task ({lines[0] if lines else type(error).__name__})"
            advice = "is Ray alive there? Try again in a minute"
            raise UsageError(f"node {host} {problem}; {advice}") from error
        if not is_seen:
            problem = f"node {host} does not see {token.parent} (--ckpt.path)"
            raise UsageError(f"{problem}; all hosts have to share it")


def _hosts_with_gpus() -> list[dict[str, Any]]:
    """Return the hosts with GPUs, each once.

    Ray lists a host that has died and come back twice, until it has noticed the death. Wait a
    minute for that.
    """
    import ray

    for _ in range(60):
        nodes = []
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("GPU", 0) >= 1:
                nodes.append(node)
        if len(set(map(_host, nodes))) == len(nodes):
            break
        time.sleep(1)
    return nodes


def stop() -> None:
    """Leave Ray, and stop the Ray that was started for this run.

    It may wait for a host that is gone.
    """
    ray = sys.modules.get("ray")
    if ray:
        leaving = threading.Thread(target=ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(timeout=15)
