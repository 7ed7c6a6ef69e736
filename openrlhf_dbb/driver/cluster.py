"""Starts Ray on this host, or joins a cluster, checks its hosts and GPUs, and stops Ray."""

import logging
import os
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from openrlhf_dbb.driver import interrupt
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings
from openrlhf_dbb.driver.checks import gpus_needed, too_few_gpus
from openrlhf_dbb.driver.progress_line import waiting
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import machine, ray_start

_ALONE = f"set RAY_ADDRESS={machine.ALONE} to start one for this run alone"
STOP_S = 15.0
ANSWER_S = 120.0
NOTICE_S = 60


class RayStart:
    """Starts Ray in a thread of its own, while the main thread goes on with the checks."""

    def __init__(self, settings: Settings) -> None:
        """Begin to start Ray. Raises UsageError if the cluster to join does not answer."""
        ray_start.prepare()
        import ray  # noqa: F401  two threads that import Ray at the same time may see half of it

        # The address of the cluster that is joined; None if Ray is started for this run alone.
        self.joins = machine.ray_cluster()
        _check_answers(self.joins)
        self._settings, self._started = settings, Future[None]()
        # Ray wants to handle SIGTERM and warns that it cannot outside the main thread; interrupt.py does.
        logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM" not in record.getMessage())
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def wait(self) -> None:
        """Wait until Ray has started; raises what :func:`start` has raised."""
        with waiting("starting Ray"):
            self._started.result()
        interrupt.arm()

    def check_hosts(self, folder: Path) -> None:
        """If a cluster is joined: refuse hosts that do not share the run's folder, and say if the GPUs are taken."""
        if self.joins is None:
            return
        import ray

        self.wait()
        token = folder / f".seen-by-all-{uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
        try:
            _check_seen(token)
        finally:
            token.unlink(missing_ok=True)
        free, needed = int(ray.available_resources().get("GPU", 0)), gpus_needed(self._settings.args)
        if free < needed:
            print(f"waiting for {needed} GPUs: {free} of {_gpus()} are free, others run on the rest", flush=True)

    def describe(self) -> list[str]:
        """Return a line about the cluster that is joined, if any: its address, GPUs and hosts."""
        if self.joins is None:
            return []
        import ray

        hosts = sorted((node["NodeManagerAddress"], _host(node)) for node in ray.nodes() if node["Alive"])
        names = ", ".join(name for _, name in hosts)
        return [f"cluster    joined {self.joins}: {_gpus()} GPUs on {len(hosts)} nodes, {names}"]

    def _run(self) -> None:
        try:
            start(self._settings)
            self._started.set_result(None)
        except Exception as error:
            self._started.set_exception(error)
        threading.Event().wait()  # Ray's processes die with the thread that started them


def _check_answers(address: str | None) -> None:
    """Raise UsageError if nobody listens at the address; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:
        return  # no address, or a form that only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        silent = f"the Ray cluster at {address} does not answer ({error.strerror or error})"
        raise UsageError(f"{silent}; start it, call `ray stop` if it is gone, or {_ALONE}") from error


def start(settings: Settings) -> None:
    """Start Ray or join the cluster. Raises UsageError if the flags need more GPUs than the cluster has."""
    # Ray would start as many idle workers as there are cores. Ours are actors.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    needed = gpus_needed(settings.args)
    ray_start.start(
        # A rank or an engine takes one logical GPU. With too few, OpenRLHF would wait for ever.
        {"num_gpus": needed, "num_cpus": 16 + 2 * needed},
        {"NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"},
        # One weight sync alone prints a line per parameter.
        verbose=settings.args.verbose or settings.estimator == NO_ESTIMATOR,
        worker_process_setup_hook="openrlhf_dbb.platform.machine.add_shims",
    )
    for refusal in too_few_gpus(settings.args, ray_start.places()):
        raise UsageError(refusal)


def _gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def _host(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _check_seen(token: Path) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(lambda: token.exists())  # Ray takes no method
    calls = {}
    # Ray lists a host that has died and come back twice, until it has noticed the death.
    for _ in range(NOTICE_S):
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]
        if len(set(map(_host, nodes))) == len(nodes):
            break
        time.sleep(1)
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[_host(node)] = look.options(scheduling_strategy=there).remote()
    for host, call in calls.items():
        try:
            seen = ray.get(call, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:  # a host that died a moment ago still counts as alive
            raise UsageError(f"node {host} cannot run a task; is Ray alive there? Try again in a minute") from error
        if not seen:
            raise UsageError(f"node {host} does not see {token.parent} (--ckpt.path); all hosts have to share it")


def stop() -> None:
    """Leave Ray, and stop the Ray that was started for this run; it may wait for a host that is gone."""
    if ray := sys.modules.get("ray"):
        leaving = threading.Thread(target=ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(timeout=STOP_S)
