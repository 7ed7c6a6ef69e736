"""Watches a training from its driver: the line of its progress, actors that have died."""

import _thread
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.actors.progress import COUNTED_BY_ENGINES, Progress
from openrlhf_dbb.driver import interrupt
from openrlhf_dbb.driver.progress_line import ProgressLine, progress_text
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform import ray_start

_CHECK_HOSTS_EVERY_S = 5
_GROUPS = {
    "actor_model_group": "policy",
    "reference_model_group": "reference",
    "reward_model_group": "reward model",
}


class PartDied(RunError):
    """An actor or an engine of the run is gone, or the last host."""


def parts_of(trainer: Any) -> dict[str, Any]:
    """Return the actors that a run needs, by name."""
    parts = {}
    for number, engine in enumerate(trainer.vllm_engines):
        parts[f"vLLM engine {number}"] = engine
    for attribute, name in _GROUPS.items():
        group = getattr(trainer, attribute)
        if group is not None:
            for rank, handler in enumerate(group._actor_handlers):
                parts[f"rank {rank} of the {name}"] = handler
    return parts


def find_dead(parts: Mapping[str, Any], wait_s: float = 10) -> str | None:
    """Return a line about the actors that have died.

    None if none has died, and if one could not be made: its exception says more. Ray's list of
    actors learns of a lost host too late, so each actor is asked; a busy rank answers after
    ``wait_s``.
    """
    import ray

    calls = {actor.__ray_ready__.remote(): name for name, actor in parts.items()}
    answered = []
    if calls:
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=wait_s)
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
    hosts = {}
    lost = set()
    for node in ray.nodes():
        hosts[node["NodeID"]] = node["NodeManagerHostname"]
        if not node["Alive"]:
            lost.add(node["NodeID"])
    places = []
    is_lost = False
    for name in dead:
        about = _actor_table(parts[name])
        node_id = about["Address"]["NodeID"]
        is_lost = is_lost or node_id in lost
        host = f"{hosts[node_id]} ({about['Address']['IPAddress']})"
        places.append(f"{name} (process {about['Pid']} on host {host})")
    cause = "killed or crashed, perhaps for want of memory (see dmesg on that host)"
    if is_lost:
        cause = ray_start.HOST_LOST
    return f"{' and '.join(places)} has died: {cause}"


def _actor_table(actor: Any) -> dict[str, Any]:
    """Return what Ray knows of an actor: its process and where it is."""
    from ray._private.state import actors  # what Ray documents needs its dashboard

    about: dict[str, Any] = actors(actor._actor_id.hex())
    return about


@contextlib.contextmanager
def watching(trainer: upstream.InThisProcess, progress: Progress) -> Iterator[None]:
    """Show progress within the block, and end it when an engine has died, or Ray has lost all hosts.

    Raises:
        RayError: the engine's, in the place of the KeyboardInterrupt that ends the wait.
        PartDied: no host is left.
    """
    import ray

    line = ProgressLine()
    done = threading.Event()
    warned: set[str] = set()
    died: list[Exception] = []

    def draw(unfinished: int, *, last: bool = False) -> None:
        warnings = {} if trainer.made is None else trainer.made.warnings()
        for kind, warning in warnings.items():
            if kind not in warned:
                warned.add(kind)
                line.warn(warning)
        finished = None
        # An engine does not count requests that it has not taken yet.
        if progress.phase in COUNTED_BY_ENGINES and unfinished:
            finished = max(progress.size - unfinished, 0)
        line.show(progress_text(progress, finished, time.monotonic()), last=last)

    def show() -> None:
        calls: dict[Any, Any] = {}  # that an engine has not answered yet
        unfinished: dict[Any, int] = {}  # requests of each engine, as last answered
        while not done.wait(0.5):
            engines = [] if trainer.made is None else trainer.made.vllm_engines
            try:
                for engine in engines:
                    call = calls.pop(engine, None) or engine.get_num_unfinished_requests.remote()
                    answered, _ = ray.wait([call], timeout=0)
                    if answered:
                        unfinished[engine] = ray.get(call)  # raises if the engine has died
                    else:
                        calls[engine] = call
            except ray.exceptions.RayError as error:
                end(error)
                break
            draw(sum(unfinished.values()))
        draw(0, last=True)

    def check_hosts() -> None:
        while not done.wait(_CHECK_HOSTS_EVERY_S):
            # Blocks for as long as Ray's head does not answer, so it has a thread of its own.
            all_lost = ray_start.find_all_lost()
            if all_lost is not None:
                end(PartDied(all_lost))
                break

    def end(error: Exception) -> None:
        # The main thread mostly sees the same error, with more to say.
        if not done.wait(5) and not died:
            died.append(error)
            interrupt.raise_from_now_on()
            _thread.interrupt_main()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    threading.Thread(target=check_hosts, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if died:
            raise died[0] from None
        raise
    finally:
        done.set()
        thread.join(timeout=10)
