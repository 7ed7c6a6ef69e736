"""Ray: start it on this host or join the cluster that is there, check its nodes, wait for its GPUs, stop it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb.driver import nodes
from openrlhf_dbb.driver.arguments import OUTPUTS
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu, cuda, machine
from storage.url import choose_url

_ALONE = f"set RAY_ADDRESS={machine.ALONE} to start one for this run alone"
_POLL_S = 2.0
WAIT_MINUTES = 10.0
_STOP = "stop Ray"
STOP_S = 15.0


class RayStart:
    """Ray, started in a thread of its own while the main thread goes on with the checks.

    Attributes:
        joins: address of the cluster that is joined; None if Ray is started for this run alone.
    """

    def __init__(self, settings: Settings) -> None:
        """Begin to start it, see :func:`start`.

        Raises:
            UsageError: the cluster to join does not answer.
        """
        self.joins = machine.ray_cluster()
        _check_answers(self.joins)
        self._settings, self._done = settings, threading.Event()
        self._error: Exception | None = None
        # What Ray does in the main thread, and warns about elsewhere.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM" not in record.getMessage())
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def wait(self) -> None:
        """Wait until it has started.

        Raises:
            Exception: as :func:`start`.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            start(self._settings)
        except Exception as error:
            self._error = error
        self._done.set()
        threading.Event().wait()  # Ray's processes die with the thread that started them


def _check_answers(address: str | None) -> None:
    """Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:
        return  # none, or a form that Ray alone understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise UsageError(
            f"the Ray cluster at {address} does not answer ({error.strerror or error}); start it, call `ray stop` "
            f"if it is gone, or {_ALONE}"
        ) from error


def start(settings: Settings) -> None:
    """Start Ray, or join the cluster of :func:`openrlhf_dbb.platform.machine.ray_cluster`.

    Raises:
        UsageError: the cluster has fewer GPUs than the flags need.
    """
    # No idle workers, which Ray would start as many of as there are cores; ours are actors.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    joined, needed = machine.ray_cluster(), gpus_needed(settings.args)
    import ray

    runtime: dict[str, Any] = {
        "env_vars": {
            "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
            "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
            "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": os.environ.get("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"),
        }
    }
    runtime["worker_process_setup_hook"] = "openrlhf_dbb.platform.machine.add_shims"  # where the node has it
    options: dict[str, Any] = {}
    runtime["env_vars"] |= (cpu if settings.on_cpu else cuda).worker_environment()
    if settings.on_cpu and joined is None:
        # One logical GPU a rank or engine; too few would make OpenRLHF wait for ever.
        options = {"num_gpus": needed, "num_cpus": 16 + 2 * needed, "include_dashboard": False}
    # Workers are silent unless asked: one weight sync alone prints a line per parameter.
    ray.init(
        runtime_env=runtime,
        log_to_driver=settings.verbose or settings.estimator == "none",
        logging_level="warning",
        **options,
    )
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus < needed:
        alone = f", or {_ALONE}" if joined and settings.on_cpu else ""
        fewer = _fewer_gpus(settings.args)
        raise UsageError(
            f"these flags need {needed} GPUs, the Ray cluster has {gpus}; {fewer}{alone} (OpenRLHF would wait for ever)"
        )


def describe(joined: str | None) -> str:
    """The cluster in a line: how the run got to it, its address, GPUs and nodes."""
    if joined is None:
        return "cluster    none joined; Ray was started on this host for this run alone"
    import ray

    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    hosts = ", ".join(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive)
    return f"cluster    joined {joined}: {gpus} GPUs on {len(alive)} nodes, {hosts}"


def check_places(settings: Settings) -> None:
    """Refuse to write into the copy of the working directory that ``ray job submit`` makes, and deletes.

    Raises:
        UsageError: names the flag.
    """
    places = {flag: attrgetter(flag)(settings.args) for flag in OUTPUTS}
    url = choose_url(settings.store_url)
    if url.startswith("sqlite:///"):
        places["store.url"] = str(Path(url.removeprefix("sqlite:///")).absolute())
    for flag, place in places.items():
        if place and "/_ray_pkg_" in place:
            raise UsageError(
                f"--{flag} {place} is in Ray's temporary copy of the working directory; give an absolute path on a "
                "shared file system"
            )


def check_gpus(settings: Settings) -> None:
    """Refuse flags that need more GPUs than this machine has, unless a cluster is joined; see :func:`start`.

    Raises:
        UsageError: how many, and the flags to change.
    """
    needed, there = gpus_needed(settings.args), len(settings.machine.gpus)
    if not settings.on_cpu and machine.ray_cluster() is None and needed > there:
        raise UsageError(f"these flags need {needed} GPUs, this machine has {there}; {_fewer_gpus(settings.args)}")


def _fewer_gpus(args: SimpleNamespace) -> str:
    """What to change where there are too few."""
    lower = "lower --actor.num_gpus_per_node and --vllm.num_engines"
    if not args.train.async_enable:
        return f"{lower}, or share GPUs with --train.colocate_all"
    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    return (
        f"with --train.async_enable the engines have {engines} of their own (--vllm.num_engines x "
        f"--vllm.tensor_parallel_size), the policy has the others: use at least {1 + args.vllm.tensor_parallel_size} "
        f"GPUs, {lower}, or leave out --train.async_enable"
    )


def make_ready(ray_start: RayStart, settings: Settings) -> None:
    """If a cluster is joined: check its nodes, and wait for its GPUs.

    Raises:
        UsageError: a node lacks something that the run needs, or there are too few free GPUs.
    """
    if ray_start.joins is None:
        return
    reads, folder = files_read(settings.args), settings.args.ckpt.path
    for path, flag in reads.items():
        if not os.path.isabs(path):
            raise UsageError(f"{flag} {path} is relative, but other hosts read it too; give an absolute path")
    ray_start.wait()
    wrong = nodes.inspect(reads, folder)
    if wrong:
        raise UsageError("; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    wait_for_gpus(settings)


def files_read(args: SimpleNamespace) -> dict[str, str]:
    """Local files and folders that actors read, and the flag that names each."""
    named = [
        ("actor.model_name_or_path", args.actor.model_name_or_path),
        ("reward.model_name_or_path", args.reward.model_name_or_path),
        ("train.agent_func_path", args.train.agent_func_path),
        *(("reward.remote_url", url) for url in args.reward.remote_url or [] if url.endswith(".py")),
    ]
    return {path: f"--{flag}" for flag, path in named if path and Path(path).exists()}


def wait_for_gpus(settings: Settings) -> None:
    """Wait, saying so, until as many GPUs are free as the run needs.

    Raises:
        UsageError: they are not after ``WAIT_MINUTES``.
    """
    import ray

    needed = gpus_needed(settings.args)
    deadline, said = time.monotonic() + 60 * WAIT_MINUTES, False
    while (free := int(ray.available_resources().get("GPU", 0))) < needed:
        state = f"{free} of {int(ray.cluster_resources().get('GPU', 0))} are free, others run on the rest"
        if time.monotonic() > deadline:
            raise UsageError(
                f"waited {WAIT_MINUTES:g} minutes for {needed} GPUs: {state}; start again when they are free, or need "
                "fewer with --actor.num_gpus_per_node and --vllm.num_engines"
            )
        if not said:
            print(f"waiting for {needed} GPUs, {WAIT_MINUTES:g} minutes at most: {state}", flush=True)
            said = True
        time.sleep(_POLL_S)


def kill() -> None:
    """Kill all that Ray has started, also while it starts; this process has to end then, which can no longer use it."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def stop() -> None:
    """Leave Ray, and stop what was started for this run, if it was; see :func:`lingers`."""
    if ray := sys.modules.get("ray"):
        leaving = threading.Thread(target=ray.shutdown, name=_STOP, daemon=True)
        leaving.start()
        leaving.join(timeout=STOP_S)


def lingers() -> bool:
    """Whether Ray still waits for a host that is gone: then this process cannot end in order."""
    return any(thread.name == _STOP for thread in threading.enumerate())


def gpus_needed(args: SimpleNamespace) -> int:
    """GPUs that OpenRLHF's placement groups ask Ray for (without CUDA: logical ones)."""

    def of(part: SimpleNamespace) -> int:
        return int(part.num_nodes * part.num_gpus_per_node)

    needed = of(args.actor)
    if not (args.train.colocate_all and not args.train.async_enable):
        needed += (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    if args.train.colocate_all:
        return needed
    if args.algo.kl.init_coef > 0 and not args.train.colocate_actor_ref:
        needed += of(args.ref)
    if args.critic.model_name_or_path:
        needed += of(args.critic)
    if not args.reward.remote_url and not (args.critic.model_name_or_path and args.train.colocate_critic_reward):
        needed += of(args.reward)
    return needed
