"""Starts Ray or joins a cluster, runs OpenRLHF's training there with our classes, and watches its actors."""

import _thread
import contextlib
import functools
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.actors.progress import COUNTED_BY_ENGINES, Progress
from openrlhf_dbb.driver import interrupt
from openrlhf_dbb.driver.arguments import NO_ESTIMATOR, Settings
from openrlhf_dbb.driver.checks import gpus_needed, too_few_gpus
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.driver.printed import ProgressLine, progress_text, waiting
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.platform import cpu, machine, ray_start
from openrlhf_dbb.platform.actor_start import started_actors

_GROUPS = {"actor_model_group": "policy", "reference_model_group": "reference", "reward_model_group": "reward model"}


class RayStart:
    """Starts Ray in a thread of its own, while the main thread goes on with the checks."""

    _thread = ThreadPoolExecutor(1, "ray")  # until this process ends: Ray's processes die with their thread

    def __init__(self, settings: Settings) -> None:
        """Begin to start Ray. Raises UsageError if the cluster to join does not answer."""
        ray_start.prepare()
        import ray  # noqa: F401  two threads that import Ray at the same time may see half of it

        # The address of the cluster that is joined; None if Ray is started for this run alone.
        self.joins = machine.ray_cluster()
        _check_answers(self.joins)
        self._settings = settings
        # Ray wants to handle SIGTERM and warns that it cannot outside the main thread; interrupt.py does.
        logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM" not in record.getMessage())
        self._started = self._thread.submit(start, settings)

    def wait(self) -> None:
        """Wait until Ray has started; raises what :func:`start` has raised."""
        with waiting("starting Ray"):
            self._started.result()
        interrupt.arm()

    def check_hosts(self, folder: Path) -> list[str]:
        """If a cluster is joined: refuse hosts that do not share the run's folder.

        Returns lines with its address, GPUs and hosts, and one if the GPUs are taken.
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
        gpus, free = (int(of.get("GPU", 0)) for of in (ray.cluster_resources(), ray.available_resources()))
        needed, hosts = gpus_needed(self._settings.args), sorted(_host(node) for node in ray.nodes() if node["Alive"])
        lines = [f"cluster    joined {self.joins}: {gpus} GPUs on {len(hosts)} nodes, {', '.join(hosts)}"]
        waits = f"waiting for {needed} GPUs: {free} of {gpus} are free, others run on the rest"
        return lines + [waits] * (free < needed)


def _check_answers(address: str | None) -> None:
    """Raise UsageError if nobody listens at the address; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:
        return  # no address, or a form that only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise UsageError(
            f"the Ray cluster at {address} does not answer ({error.strerror or error}); start it, call `ray stop` if "
            f"it is gone, or set RAY_ADDRESS={machine.ALONE} to start one for this run alone"
        ) from error


def start(settings: Settings) -> None:
    """Start Ray or join the cluster. Raises UsageError if the flags need more GPUs than the cluster has."""
    args, needed = settings.args, gpus_needed(settings.args)
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
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(lambda: token.exists())  # Ray takes no method
    calls = {}
    # Ray lists a host that has died and come back twice, until it has noticed the death.
    for _ in range(60):
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]
        if len(set(map(_host, nodes))) == len(nodes):
            break
        time.sleep(1)
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[_host(node)] = look.options(scheduling_strategy=there).remote()
    for host, call in calls.items():
        try:
            seen = ray.get(call, timeout=120)
        except ray.exceptions.RayError as error:  # a host that died a moment ago still counts as alive
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"node {host} cannot run a task ({reason}); is Ray alive there? Try again in a minute"
            ) from error
        if not seen:
            raise UsageError(f"node {host} does not see {token.parent} (--ckpt.path); all hosts have to share it")


def stop() -> None:
    """Leave Ray, and stop the Ray that was started for this run; it may wait for a host that is gone."""
    if ray := sys.modules.get("ray"):
        leaving = threading.Thread(target=ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(timeout=15)


class PartDied(RunError):
    """An actor or an engine of the run is gone."""


def launch(prepared: Prepared, ray_start: RayStart) -> Any:
    """Train, with OpenRLHF's trainer in this process and the models and engines in actors.

    Returns the trainer's last :class:`openrlhf_dbb.actors.progress.Progress`, or None for OpenRLHF alone. Raises
    PartDied, which names the actor that has died, or another exception that ended the training.
    """
    import ray

    with upstream.imports_for_driver():  # seconds, in which Ray starts
        from openrlhf_dbb.actors.policy_actor import PolicyActor
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
        from openrlhf_dbb.actors.vllm_actor import PlatformRolloutActor, StrictRolloutActor
    ray_start.wait()
    with started_actors():
        if prepared.run is not None:
            policy_actor = ray.remote(num_gpus=1)(PolicyActor)
            return train(prepared, PosteriorTrainer, ray.remote(StrictRolloutActor), policy_actor)
        engines = upstream.with_more(ray.remote(PlatformRolloutActor), **prepared.engine_arguments)
        backend = functools.partial(LightBackend, threads=prepared.threads)
        return upstream.run(prepared.settings.openrlhf_args(), rollout_actor=engines, get_strategy=backend)


def train(prepared: Prepared, trainer_class: Any, rollout_actor: Any, policy_actor: Any) -> Any:
    """Train with these classes, the last two of Ray actors; return and raise as :func:`launch`."""
    import ray

    class Trainer(trainer_class):
        def fit(self, global_step: int = 0) -> None:
            interrupt.raise_from_now_on()
            super().fit(global_step)

    run, args = prepared.run, prepared.settings.openrlhf_args()
    assert run is not None
    progress = Progress(has_end_token=prepared.has_end_token)  # its clock begins with the engines
    trainer = upstream.InThisProcess(
        Trainer,
        store_url=prepared.store_url,
        run_uuid=run.uuid,
        checkpoint=prepared.checkpoint,
        rows=prepared.prompts.rows,
        sources=prepared.prompts.sources,
        benchmarks=prepared.benchmarks,
        progress=progress,
    )
    verbose = prepared.settings.args.verbose
    try:
        with watching(trainer, progress), upstream.quiet(verbose):
            upstream.run(
                args,
                trainer=trainer,
                rollout_actor=upstream.with_more(rollout_actor, **prepared.engine_arguments),
                policy_actor=policy_actor,
                get_strategy=functools.partial(LightBackend, loads=prepared.checkpoint, threads=prepared.threads),
                bars=verbose,
                tokenizer=prepared.tokenizer,
            )
            return trainer.made.finish()
    except ray.exceptions.RayError as error:
        died = find_dead(_parts(trainer.made)) if trainer.made is not None else None
        if died is None:
            raise
        raise PartDied(died) from error


def find_dead(parts: Mapping[str, Any], wait_s: float = 10) -> str | None:
    """Return a line about the actors that have died.

    None if none has died, and if one could not be made: its exception says more.
    """
    import ray
    from ray._private.state import actors  # what Ray documents needs its dashboard

    # Ray's list of actors learns of a lost host too late, so each actor is asked. A busy rank answers after ``wait_s``.
    calls = {actor.__ray_ready__.remote(): name for name, actor in parts.items()}
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=wait_s) if calls else ([], [])
    dead = []
    for call in answered:
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                return None
            dead.append(calls[call])
    if not dead:
        return None
    hosts, named = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}, []
    for name in dead:
        about = actors(parts[name]._actor_id.hex())
        host, address = hosts[about["Address"]["NodeID"]], about["Address"]["IPAddress"]
        named.append(f"{name} (process {about['Pid']} on host {host} ({address}))")
    return f"{' and '.join(named)} has died: killed or crashed, perhaps for want of memory (see dmesg on that host)"


def _parts(trainer: Any) -> dict[str, Any]:
    """Return the actors that a run needs, by name."""
    parts = {f"vLLM engine {number}": engine for number, engine in enumerate(trainer.vllm_engines)}
    for name, called in _GROUPS.items():
        group = getattr(trainer, name)
        handlers = group._actor_handlers if group is not None else ()
        parts |= {f"rank {rank} of the {called}": handler for rank, handler in enumerate(handlers)}
    return parts


@contextlib.contextmanager
def watching(trainer: upstream.InThisProcess, progress: Progress) -> Iterator[None]:
    """Show progress within the block, and end the wait in the main thread when an engine has died that it misses."""
    import ray

    line, done, warned, died = ProgressLine(), threading.Event(), set[str](), list[Exception]()

    def draw(unfinished: int, *, last: bool = False) -> None:
        for kind, warning in (trainer.made.warnings() if trainer.made is not None else {}).items():
            if kind not in warned:
                warned.add(kind)
                line.warn(warning)
        # An engine does not count requests that it has not taken yet.
        counted = progress.phase in COUNTED_BY_ENGINES and unfinished
        finished = max(progress.size - unfinished, 0) if counted else None
        line.show(progress_text(progress, finished, time.monotonic()), last=last)

    def show() -> None:
        asked, unfinished = dict[Any, Any](), dict[Any, int]()
        while not done.wait(0.5):
            try:
                for engine in trainer.made.vllm_engines if trainer.made is not None else ():
                    call = asked.pop(engine, None) or engine.get_num_unfinished_requests.remote()
                    if ray.wait([call], timeout=0)[0]:
                        unfinished[engine] = ray.get(call)  # raises if the engine has died
                    else:
                        asked[engine] = call
            except ray.exceptions.RayError as error:
                # The main thread mostly sees the same error, with more to say.
                if not done.wait(5):
                    died.append(error)
                    interrupt.raise_from_now_on()
                    _thread.interrupt_main()
                break
            draw(sum(unfinished.values()))
        draw(0, last=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if died:
            raise died[0] from None
        raise
    finally:
        done.set()
        thread.join(timeout=10)
