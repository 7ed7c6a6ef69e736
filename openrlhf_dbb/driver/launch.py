"""Runs OpenRLHF's training with our classes, watches its actors, and shows its progress."""

import _thread
import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from openrlhf_dbb import presets, upstream
from openrlhf_dbb.driver import cpu_fit, interrupt
from openrlhf_dbb.driver.cluster import RayStart
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.driver.progress_line import ProgressLine
from openrlhf_dbb.driver.progress_line import text as progress_text
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform import cuda

POLL_S = 0.5
GRACE_S = 5.0
LOOK_S = 10.0
_GROUPS = {"actor_model_group": "policy", "reference_model_group": "reference", "reward_model_group": "reward model"}


def actor_environment(settings: Settings) -> dict[str, Any]:
    """Return options of a Ray actor that set the OpenMP threads of its process; none on CUDA."""
    if not settings.on_cpu:
        return {}
    return {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(cpu_fit.threads(settings))}}}


class PartDied(RunError):
    """An actor or an engine of the run is gone."""


def launch(settings: Settings, start: Start | None, ray_start: RayStart) -> Any:
    """Train, with OpenRLHF's trainer in this process and the models and engines in actors.

    Returns the trainer's last :class:`openrlhf_dbb.actors.progress.Progress`, or None for OpenRLHF alone. Raises
    PartDied, which names the actor that has died, or another exception that ended the training.
    """
    import ray

    with upstream.imports_for_driver():
        from openrlhf_dbb.actors.policy_actor import PolicyActor
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
        from openrlhf_dbb.actors.vllm_actor import PlatformRolloutActor, StrictRolloutActor

    ray_start.wait()
    get_strategy = functools.partial(LightBackend, on_cpu=settings.on_cpu)
    if start is None:
        engines = Engines(ray.remote(PlatformRolloutActor), settings)
        return upstream.run(settings.openrlhf_args(), rollout_actor=engines, get_strategy=get_strategy)
    engines = Engines(ray.remote(StrictRolloutActor), settings)
    watch = Watch(start, PosteriorTrainer, engines)
    try:
        with watch.progress_bar(), upstream.quiet(settings.args.verbose):
            upstream.run(
                settings.openrlhf_args(),
                trainer=watch,
                rollout_actor=engines,
                policy_actor=ray.remote(num_gpus=1, **actor_environment(settings))(PolicyActor),
                get_strategy=functools.partial(get_strategy, loads=start.checkpoint),
                bars=settings.args.verbose,
            )
            return watch.trainer.finish()
    except ray.exceptions.RayError as error:
        died = find_dead(watch.parts)
        if died is None:
            raise
        raise PartDied(died) from error


class Part(NamedTuple):
    """An actor of a run: what people call it, Ray's handle, and the answer to :func:`ask_place`."""

    name: str
    actor: Any
    place: Any


def ask_place(actor: Any) -> Any:
    """Ask an actor for its process and host; return the reference to the answer."""

    # Nested, so that Ray sends it by value and the actor need not import the driver.
    def place(_actor: Any) -> str:
        import ray

        return f"process {os.getpid()} on host {socket.gethostname()} ({ray.util.get_node_ip_address()})"

    return actor.__ray_call__.remote(place)


def find_dead(parts: Sequence[Part]) -> str | None:
    """Return a line about the actors that have died; None if an actor could not be made: its exception says more."""
    import ray

    calls = {part.actor.__ray_ready__.remote(): part for part in parts}
    # A living rank may be busy and answer nothing until the time is over.
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=LOOK_S) if calls else ([], [])
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
    parts_died = " and ".join(map(_with_place, dead))
    return f"{parts_died} has died: killed or crashed, perhaps for want of memory (see dmesg on that host)"


def _with_place(part: Part) -> str:
    import ray

    with contextlib.suppress(ray.exceptions.RayError):  # the actor died before it could tell
        return f"{part.name} ({ray.get(part.place, timeout=0)})"
    return part.name


class Watch:
    """Stands where OpenRLHF looks for its trainer class: makes the trainer in this process, and watches the engines.

    It also stands for the trainer's actor: OpenRLHF calls ``watch.NAME.remote(...)``, and Ray gets the result.
    """

    def __init__(self, start: Start, trainer_class: Callable[..., Any], engines: "Engines") -> None:
        from openrlhf_dbb.actors.progress import Progress

        self._start, self._trainer_class, self._engines = start, trainer_class, engines
        self._error: Exception | None = None
        self._done = threading.Event()
        self._progress = Progress()  # its clock begins with the engines
        self.trainer: Any = None
        self.parts: list[Part] = []  # the actors that the run needs, once they have been made
        self._warned: set[str] = set()

    def remote(self, *args: Any, **kwargs: Any) -> "Watch":
        """Make the trainer; OpenRLHF calls this in place of ``PPOTrainer.remote``."""
        self.trainer = self._trainer_class(
            *args,
            store_url=self._start.store_url,
            run_uuid=self._start.run.uuid,
            checkpoint=self._start.checkpoint,
            rows=self._start.prompts.rows,
            sources=self._start.prompts.sources,
            benchmarks=self._start.benchmarks,
            progress=self._progress,
            **kwargs,
        )
        actors = {f"vLLM engine {number}": engine for number, engine in enumerate(self._engines.made)}
        for name, called in _GROUPS.items():
            group = getattr(self.trainer, name)
            for rank, handler in enumerate(group._actor_handlers if group is not None else ()):
                actors[f"rank {rank} of the {called}"] = handler
        self.parts = [Part(name, actor, ask_place(actor)) for name, actor in actors.items()]
        return self

    def __getattr__(self, name: str) -> Any:
        import ray

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "fit":
                interrupt.raise_from_now_on()
            return ray.put(getattr(self.trainer, name)(*args, **kwargs))

        return SimpleNamespace(remote=call)

    @contextlib.contextmanager
    def progress_bar(self) -> Iterator[None]:
        """Show progress, and end the wait in the main thread when an engine has died that it cannot see."""
        thread = threading.Thread(target=self._show, daemon=True)
        thread.start()
        try:
            yield
        except KeyboardInterrupt:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._done.set()
            thread.join(timeout=10)

    def _show(self) -> None:
        import ray

        line = ProgressLine()
        pending: dict[Any, Any] = {}
        unfinished: dict[Any, int] = {}
        while not self._done.wait(POLL_S):
            try:
                for engine in self._engines.made:
                    call = pending.get(engine) or engine.get_num_unfinished_requests.remote()
                    answered, _ = ray.wait([call], timeout=0)
                    if answered:
                        unfinished[engine] = ray.get(call)  # raises if the engine has died
                    pending[engine] = None if answered else call
            except ray.exceptions.RayError as error:
                # The main thread mostly sees the same error, with more to say.
                if not self._done.wait(GRACE_S):
                    self._error = error
                    interrupt.raise_from_now_on()
                    _thread.interrupt_main()
                break
            self._draw(line, sum(unfinished.values()))
        self._draw(line, 0, last=True)

    def _draw(self, line: ProgressLine, unfinished: int, *, last: bool = False) -> None:
        from openrlhf_dbb.actors.progress import COUNTED_BY_ENGINES

        progress, done = self._progress, None
        if progress.phase in COUNTED_BY_ENGINES and unfinished:
            done = max(progress.size - unfinished, 0)  # an engine does not count requests that it has not taken yet
        for kind, warning in (self.trainer.warnings() if self.trainer is not None else {}).items():
            if kind not in self._warned:
                self._warned.add(kind)
                line.warn(warning)
        line.show(progress_text(progress, done, time.monotonic()), last=last)


class Engines:
    """Stands where OpenRLHF looks for its vLLM actor class: makes our actors, and keeps them in :attr:`made`."""

    def __init__(self, actor_class: Any, settings: Settings) -> None:
        args = settings.args
        if settings.on_cpu:
            limits = cpu_fit.engine_arguments(settings)
        else:
            limits = {} if settings.preset == presets.NONE else cuda.engine_limits(args)
        ours = {"param_dtype": args.ds.param_dtype, "trust_remote_code": args.trust_remote_code}
        self._class, self._arguments = actor_class, {**ours, **limits}
        self._environment = actor_environment(settings)
        self.made: list[Any] = []

    def options(self, **options: Any) -> SimpleNamespace:
        """Do as a Ray actor class does."""
        return SimpleNamespace(remote=functools.partial(self._make, options))

    def _make(self, options: dict[str, Any], **kwargs: Any) -> Any:
        engine = self._class.options(**options, **self._environment).remote(**{**kwargs, **self._arguments})
        self.made.append(engine)
        return engine
