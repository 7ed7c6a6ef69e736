"""Run OpenRLHF's training with our classes, watch its actors, and show one progress bar."""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.driver import deaths
from openrlhf_dbb.driver.cluster import RayStart
from openrlhf_dbb.driver.progress_line import ProgressLine
from openrlhf_dbb.driver.progress_line import text as progress_text
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start
from openrlhf_dbb.driver.strategy import DriverStrategy
from openrlhf_dbb.errors import RunError

POLL_S = 0.5
GRACE_S = 5.0


def launch(settings: Settings, start: Start | None, ray_start: RayStart) -> Any:
    """Train; returns when the training has ended and the model is saved.

    OpenRLHF's trainer runs in this process, the models and engines in actors.

    Returns:
        The trainer's last :class:`openrlhf_dbb.actors.trainer.Progress`, or None for OpenRLHF alone.

    Raises:
        Exception: whatever ended the training; an actor's with the actor's traceback in its text.
    """
    import ray

    with upstream.imports_for_driver():
        from openrlhf_dbb.actors.policy_actor import PolicyActor
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
        from openrlhf_dbb.actors.vllm_actor import PlatformRolloutActor, StrictRolloutActor

    ray_start.wait()
    get_strategy = functools.partial(DriverStrategy, on_cpu=settings.on_cpu)
    oom_kills = deaths.oom_kills()
    if start is None:
        engines = Engines(ray.remote(PlatformRolloutActor), settings)
        try:
            upstream.run(settings.openrlhf_args(), rollout_actor=engines, get_strategy=get_strategy)
        except ray.exceptions.RayError as error:
            died = deaths.named(error, oom_kills)
            if died is None:
                raise
            raise PartDied(died) from error
        return None
    engines = Engines(ray.remote(StrictRolloutActor), settings)
    watch = Watch(start, PosteriorTrainer, engines)
    try:
        with watch.progress_bar(), upstream.quiet(settings.verbose):
            upstream.run(
                settings.openrlhf_args(),
                trainer=watch,
                rollout_actor=engines,
                policy_actor=ray.remote(num_gpus=1)(PolicyActor),
                get_strategy=functools.partial(get_strategy, loads=start.checkpoint),
                bars=settings.verbose,
            )
            return watch.finish()
    except ray.exceptions.RayError as error:
        died = deaths.find(watch.parts, oom_kills)
        if died is None:
            raise
        raise PartDied(died) from error


_GROUPS = {"actor_model_group": "policy", "reference_model_group": "reference", "reward_model_group": "reward model"}


class PartDied(RunError):
    """An actor, an engine or a host of the run is gone."""


class Watch:
    """Stands where OpenRLHF looks for its trainer class: makes the trainer in this process, and watches the engines.

    Attributes:
        parts: the actors that the run needs, once they have been made.
    """

    def __init__(self, start: Start, trainer_class: Callable[..., Any], engines: Engines) -> None:
        self._start, self._trainer_class, self._engines = start, trainer_class, engines
        self._error: Exception | None = None
        self._done = threading.Event()
        self._trainer: Any = None
        self.parts: list[deaths.Part] = []
        self._warned: set[str] = set()

    def remote(self, *args: Any, **kwargs: Any) -> _Here:
        """Make the trainer; called by OpenRLHF in place of ``PPOTrainer.remote``."""
        from openrlhf_dbb.actors.trainer import RunPlan

        plan = RunPlan(
            store_url=self._start.store_url,
            run_uuid=self._start.run.uuid,
            checkpoint=self._start.checkpoint,
            rows=self._start.prompts.rows,
            benchmarks=self._start.benchmarks,
        )
        self._trainer = self._trainer_class(*args, plan=plan, **kwargs)
        self.parts = [deaths.Part.of(*named) for named in self._actors()]
        return _Here(self._trainer)

    def _actors(self) -> Iterator[tuple[str, Any]]:
        """The Ray actors that the run needs, and what they are called."""
        for number, engine in enumerate(self._engines.made):
            yield f"vLLM engine {number}", engine
        for name, called in _GROUPS.items():
            group = getattr(self._trainer, name)
            for rank, handler in enumerate(group._actor_handlers if group is not None else ()):
                yield f"rank {rank} of the {called}", handler

    def finish(self) -> Any:
        """Mark the run as finished and close its database; the last progress."""
        progress = self._trainer.finish()
        self._trainer.close()
        return progress

    @contextlib.contextmanager
    def progress_bar(self) -> Iterator[None]:
        """Show progress, and end the wait in the main thread when an actor it cannot see has died."""
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

        from openrlhf_dbb.actors.progress import Progress

        line, starting = ProgressLine(), Progress()
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
                    _thread.interrupt_main()
                break
            self._draw(line, starting, sum(unfinished.values()))
        self._draw(line, starting, 0, last=True)

    def _draw(self, line: ProgressLine, starting: Any, unfinished: int, *, last: bool = False) -> None:
        from openrlhf_dbb.actors import progress as phases

        progress = starting if self._trainer is None else self._trainer.progress()
        if progress.phase == "starting":
            progress = starting  # its clock began with the engines
        done = None
        if progress.phase in phases.COUNTED_BY_ENGINES:
            # An engine does not count requests that it has not taken yet.
            done = max(progress.size - unfinished, 0) if unfinished else None
        for kind, warning in self.warnings().items():
            if kind not in self._warned:
                self._warned.add(kind)
                line.warn(warning)
        line.show(progress_text(progress, done, time.monotonic()), progress.step, last=last)

    def warnings(self) -> dict[str, str]:
        """Return what is wrong with the training so far, see :meth:`openrlhf_dbb.actors.progress.Progress.troubles`."""
        return self._trainer.warnings() if self._trainer is not None else {}


class _Here:
    """An object whose methods are called in this process as those of a Ray actor would be."""

    def __init__(self, called: Any) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        import ray

        method = getattr(self._called, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: ray.put(method(*args, **kwargs)))


class Engines:
    """Stands where OpenRLHF looks for its vLLM actor class: makes actors of ours, and keeps them in :attr:`made`.

    Args:
        actor_class: Ray actor class.
        settings: for the engine arguments that OpenRLHF does not give.
    """

    def __init__(self, actor_class: Any, settings: Settings) -> None:
        args = settings.args
        limits = {name: getattr(args.vllm, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        given = {name: value for name, value in limits.items() if value is not None}
        self._class, self._arguments = actor_class, {"param_dtype": args.ds.param_dtype, **given}
        self.made: list[Any] = []

    def options(self, **options: Any) -> SimpleNamespace:
        """As of a Ray actor class."""
        return SimpleNamespace(remote=functools.partial(self._make, options))

    def _make(self, options: dict[str, Any], **kwargs: Any) -> Any:
        engine = self._class.options(**options).remote(**self._arguments, **kwargs)
        self.made.append(engine)
        return engine
