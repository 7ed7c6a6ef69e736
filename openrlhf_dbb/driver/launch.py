"""Start Ray, run OpenRLHF's training with our classes, watch its actors, and show one progress bar."""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import cpu, upstream
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start
from openrlhf_dbb.driver.strategy import DriverStrategy
from openrlhf_dbb.errors import UsageError

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
    if start is None:
        engines = Engines(ray.remote(PlatformRolloutActor), settings)
        upstream.run(settings.openrlhf_args(), rollout_actor=engines, get_strategy=get_strategy)
        return None
    engines = Engines(ray.remote(StrictRolloutActor), settings)
    watch = Watch(start, PosteriorTrainer, engines)
    with watch.progress_bar(), upstream.quiet(settings.verbose):
        upstream.run(
            settings.openrlhf_args(),
            trainer=watch,
            rollout_actor=engines,
            policy_actor=ray.remote(num_gpus=1)(PolicyActor),
            get_strategy=get_strategy,
            bars=settings.verbose,
        )
        return watch.finish()


class RayStart:
    """Ray, started in a thread of its own while the main thread goes on with the checks."""

    def __init__(self, settings: Settings) -> None:
        """Begin to start it, see :func:`start_ray`."""
        self._settings, self._done = settings, threading.Event()
        self._error: Exception | None = None
        # What Ray does in the main thread, and warns about elsewhere.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM" not in record.getMessage())
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def wait(self) -> None:
        """Wait until it has started.

        Raises:
            Exception: as :func:`start_ray`.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            start_ray(self._settings)
        except Exception as error:
            self._error = error
        self._done.set()
        threading.Event().wait()  # Ray's processes die with the thread that started them


def kill_ray() -> None:
    """Kill all that Ray has started, also while it starts; this process has to end then, which can no longer use it."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def stop_ray() -> None:
    """Stop Ray and all its actors, if it was started."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()


def start_ray(settings: Settings) -> None:
    """Start Ray, or join the cluster of ``RAY_ADDRESS``.

    Raises:
        UsageError: it has fewer GPUs than the flags need.
    """
    # No idle workers, which Ray would start as many of as there are cores; ours are actors.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    import ray

    environment = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": os.environ.get("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"),
    }
    options: dict[str, Any] = {}
    needed = gpus_needed(settings.args)
    if settings.on_cpu:
        environment |= cpu.worker_environment()
        if "RAY_ADDRESS" not in os.environ:
            # One logical GPU a rank or engine; too few would make OpenRLHF wait for ever.
            options = {"num_gpus": needed, "num_cpus": 16 + 2 * needed, "include_dashboard": False}
    # Workers are silent unless asked: one weight sync alone prints a line per parameter.
    ray.init(
        runtime_env={"env_vars": environment},
        log_to_driver=settings.verbose or settings.estimator == "none",
        logging_level="warning",
        **options,
    )
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus < needed:
        raise UsageError(
            f"these flags need {needed} GPUs, Ray has {gpus}; lower --actor.num_gpus_per_node and "
            "--vllm.num_engines, or share GPUs with --train.colocate_all (OpenRLHF would wait for ever)"
        )


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


class Watch:
    """Stands where OpenRLHF looks for its trainer class: makes the trainer in this process, and watches the engines."""

    def __init__(self, start: Start, trainer_class: Callable[..., Any], engines: Engines) -> None:
        self._start, self._trainer_class, self._engines = start, trainer_class, engines
        self._error: Exception | None = None
        self._done = threading.Event()
        self._trainer: Any = None

    def remote(self, *args: Any, **kwargs: Any) -> _Here:
        """Make the trainer; called by OpenRLHF in place of ``PPOTrainer.remote``."""
        from openrlhf_dbb.actors.trainer import RunPlan

        plan = RunPlan(
            store_url=self._start.store_url,
            run_uuid=self._start.run.uuid,
            rows=self._start.prompts.rows,
        )
        self._trainer = self._trainer_class(*args, plan=plan, **kwargs)
        return _Here(self._trainer)

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
        from tqdm import tqdm

        interactive = sys.stderr.isatty()
        bar = tqdm(
            desc="starting engines",
            unit="step",
            mininterval=0.1 if interactive else 5,
            dynamic_ncols=interactive,
        )
        asked: dict[Any, Any] = {}
        while not self._done.wait(POLL_S):
            try:
                for engine in self._engines.made:
                    call = asked.get(engine) or engine.get_num_unfinished_requests.remote()
                    answered, _ = ray.wait([call], timeout=0)
                    ray.get(answered)  # raises if the engine has died
                    asked[engine] = None if answered else call
            except ray.exceptions.RayError as error:
                # The main thread mostly sees the same error, with more to say.
                if not self._done.wait(GRACE_S):
                    self._error = error
                    _thread.interrupt_main()
                break
            if self._trainer is not None:
                _draw(bar, self._trainer.progress())
        if self._trainer is not None:
            _draw(bar, self._trainer.progress())
        bar.close()


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
        self._class, self._param_dtype = actor_class, settings.args.ds.param_dtype
        self.made: list[Any] = []

    def options(self, **options: Any) -> SimpleNamespace:
        """As of a Ray actor class."""
        return SimpleNamespace(remote=functools.partial(self._make, options))

    def _make(self, options: dict[str, Any], **kwargs: Any) -> Any:
        engine = self._class.options(**options).remote(param_dtype=self._param_dtype, **kwargs)
        self.made.append(engine)
        return engine


def _draw(bar: Any, progress: Any) -> None:
    if progress.phase == "starting":
        return
    if bar.total is None:
        # The clock starts with the training, and after a resume with the steps that are left.
        bar.reset(total=progress.total)
        bar.initial = bar.n = bar.last_print_n = progress.step
    bar.set_description(progress.phase, refresh=False)
    shown = {}
    if progress.reward is not None:
        shown["reward"] = f"{progress.reward:.3f}"
    if progress.accuracy:
        shown["accuracy"] = f"{list(progress.accuracy.values())[-1]:.3f}"
    bar.set_postfix(shown, refresh=False)
    bar.update(progress.step - bar.n)
    if bar.dynamic_ncols:  # a terminal; a log file gets a line now and then
        bar.refresh()
