"""Start Ray and OpenRLHF's actors, watch them, and show one progress bar."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import cpu, upstream
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.driver.start import Start

POLL_S = 0.5
GRACE_S = 5.0


def launch(settings: Settings, start: Start | None) -> Any:
    """Train; returns when OpenRLHF's training has ended and the model is saved.

    Returns:
        The trainer's last :class:`openrlhf_dbb.actors.trainer.Progress`, or None for OpenRLHF alone.

    Raises:
        Exception: whatever ended the training, with the worker's traceback in its text.
    """
    import ray

    from openrlhf_dbb.actors.policy_actor import PolicyActor
    from openrlhf_dbb.actors.trainer import PosteriorTrainer
    from openrlhf_dbb.actors.vllm_actor import PlatformRolloutActor, StrictRolloutActor

    start_ray(settings)
    args = settings.openrlhf_args()
    get_strategy = cpu_strategy if settings.on_cpu else None
    try:
        if start is None:
            upstream.run(args, rollout_actor=ray.remote(PlatformRolloutActor), get_strategy=get_strategy)
            return None

        watch = Watch(settings, start, ray.remote(PosteriorTrainer))
        with watch.progress_bar(), upstream.quiet(settings.verbose):
            upstream.run(
                args,
                trainer=watch,
                rollout_actor=watch.watching(ray.remote(StrictRolloutActor)),
                policy_actor=ray.remote(num_gpus=1)(PolicyActor),
                get_strategy=get_strategy,
            )
            return ray.get(watch.trainer.finish.remote())
    finally:
        ray.shutdown()


def start_ray(settings: Settings) -> None:
    """Start Ray, or join the cluster of ``RAY_ADDRESS``.

    Raises:
        RuntimeError: it has fewer GPUs than the flags need.
    """
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
        raise RuntimeError(
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


def cpu_strategy(args: Any) -> Any:
    """For OpenRLHF's ``get_strategy``, without CUDA."""
    from openrlhf.utils import get_strategy

    from openrlhf_dbb.cpu.deepspeed_strategy import CpuStrategy

    strategy = get_strategy(args)
    strategy.__class__ = CpuStrategy  # same attributes; upstream's factory names its class itself
    return strategy


class Watch:
    """Stands where OpenRLHF looks for its trainer class; remembers the actors it creates and watches them."""

    def __init__(self, settings: Settings, start: Start, trainer_class: Any) -> None:
        self._settings, self._start, self._trainer_class = settings, start, trainer_class
        self._error: Exception | None = None
        self._done = threading.Event()
        self._engines: list[Any] = []
        self.trainer: Any = None

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Create the trainer actor; called by OpenRLHF in place of ``PPOTrainer.remote``."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from openrlhf_dbb.actors.trainer import RunPlan

        plan = RunPlan(
            store_url=self._start.store_url,
            run_uuid=self._start.run.uuid,
            rows=self._start.prompts.rows,
        )
        # On this node, where a SQLite file is; two threads, so that progress() is answered during fit().
        here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        actor = self._trainer_class.options(max_concurrency=2, scheduling_strategy=here)
        self.trainer = actor.remote(*args, plan=plan, **kwargs)
        return self.trainer

    def watching(self, rollout_actor: Any) -> Any:
        """``rollout_actor`` with its instances remembered."""
        return _Remembering(rollout_actor, self._engines)

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
        healthy: dict[Any, Any] = {}
        last = None
        while not self._done.wait(POLL_S):
            try:
                for engine in self._engines:
                    healthy.setdefault(engine, engine.get_num_unfinished_requests.remote())
                ready, _ = (
                    ray.wait(list(healthy.values()), num_returns=len(healthy), timeout=0) if healthy else ([], [])
                )
                ray.get(ready)
                if self.trainer is None:
                    continue
                answer, _ = ray.wait([self.trainer.progress.remote()], timeout=60)
                last = ray.get(answer[0]) if answer else last
            except ray.exceptions.RayError as error:
                # The main thread mostly sees the same error, with more to say.
                if not self._done.wait(GRACE_S):
                    self._error = error
                    _thread.interrupt_main()
                break
            if last is not None:
                _draw(bar, last)
        if last is not None:
            _draw(bar, last)
        bar.close()


class _Remembering:
    """A Ray actor class whose instances are also put into a list."""

    def __init__(self, actor_class: Any, instances: list[Any]) -> None:
        self._class, self._instances = actor_class, instances

    def options(self, **options: Any) -> _Remembering:
        return _Remembering(self._class.options(**options), self._instances)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        self._instances.append(self._class.remote(*args, **kwargs))
        return self._instances[-1]


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
