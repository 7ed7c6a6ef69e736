"""Watches a training from its driver: the line of its progress, actors that have died."""

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
_STUCK_S = 60  # after which a main thread that takes no exception never will
_GROUPS = {
    "actor_model_group": "policy",
    "reference_model_group": "reference",
    "reward_model_group": "reward model",
}


class PartDied(RunError):
    """An actor or an engine of the run is gone, or a host that it needs."""


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
    hosts = {node["NodeID"]: node for node in ray.nodes()}
    places = []
    cause = f"{ray_start.KILLED} (see dmesg on that host)"
    for name in dead:
        about = _actor_table(parts[name])
        host = hosts[about["Address"]["NodeID"]]
        if not host["Alive"]:
            cause = ray_start.HOST_LOST
        place = f"{host['NodeManagerHostname']} ({about['Address']['IPAddress']})"
        places.append(f"{name} (process {about['Pid']} on host {place})")
    return f"{' and '.join(places)} has died: {cause}"


def _actor_table(actor: Any) -> dict[str, Any]:
    """Return what Ray knows of an actor: its process and where it is."""
    from ray._private.state import actors  # what Ray documents needs its dashboard

    about: dict[str, Any] = actors(actor._actor_id.hex())
    return about


@contextlib.contextmanager
def watching(trainer: upstream.InThisProcess, progress: Progress, gpus: int) -> Iterator[None]:
    """Show progress within the block, and end it when an engine has died, or Ray has lost hosts.

    Raises:
        RayError: the engine's, in the place of the KeyboardInterrupt that ends the wait.
        PartDied: no host is left, or too few for these GPUs.
    """
    watch = _Watch(trainer, progress, gpus)
    showing = threading.Thread(target=watch.show, daemon=True)
    showing.start()
    # In a thread of its own: it waits for as long as Ray's head does not answer.
    threading.Thread(target=watch.check_hosts, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if watch.error is not None:
            raise watch.error from None
        raise
    finally:
        watch.done.set()
        showing.join(timeout=10)


class _Watch:
    """Two threads beside a training: one shows its progress, the other checks Ray's hosts.

    Attributes:
        done: tells the threads that the training has ended.
        error: ended the training from one of the threads; None: no thread has ended it.
    """

    def __init__(self, trainer: upstream.InThisProcess, progress: Progress, gpus: int) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._trainer = trainer
        self._progress = progress
        self._gpus = gpus
        self._line = ProgressLine()
        self._warned: set[str] = set()

    def show(self) -> None:
        """Show progress until the training ends; end it if an engine has died."""
        import ray

        calls: dict[Any, Any] = {}  # that an engine has not answered yet
        unfinished: dict[Any, int] = {}  # requests of each engine, as last answered
        while not self.done.wait(0.5):
            engines = [] if self._trainer.made is None else self._trainer.made.vllm_engines
            try:
                for engine in engines:
                    call = calls.pop(engine, None) or engine.get_num_unfinished_requests.remote()
                    answered, _ = ray.wait([call], timeout=0)
                    if answered:
                        unfinished[engine] = ray.get(call)  # raises if the engine has died
                    else:
                        calls[engine] = call
            except ray.exceptions.RayError as error:
                self._end(error)
                break
            self._draw(sum(unfinished.values()))
        self._draw(0, last=True)

    def _draw(self, unfinished: int, *, last: bool = False) -> None:
        warnings = {} if self._trainer.made is None else self._trainer.made.warnings()
        for kind, warning in warnings.items():
            if kind not in self._warned:
                self._warned.add(kind)
                self._line.warn(warning)
        progress = self._progress
        finished = None
        # An engine does not count requests that it has not taken yet.
        if progress.phase in COUNTED_BY_ENGINES and unfinished:
            finished = max(progress.size - unfinished, 0)
        self._line.show(progress_text(progress, finished, time.monotonic()), last=last)

    def check_hosts(self) -> None:
        """End the training if Ray has lost all hosts, or too many of them."""
        while not self.done.wait(_CHECK_HOSTS_EVERY_S):
            lost = ray_start.find_lost(self._gpus)
            if lost is not None:
                self._end(PartDied(lost))
                break

    def _end(self, error: Exception) -> None:
        # The main thread mostly sees the same error, with more to say.
        if not self.done.wait(5) and self.error is None:
            self.error = error
            interrupt.raise_in_main()
            if not self.done.wait(_STUCK_S):
                # Ray's errors end with the reason, after a traceback of the actor.
                reason = str(error).strip().splitlines()[-1]
                interrupt.give_up(f"error: {reason}")
