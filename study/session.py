"""Trainings one after the other in the same Ray actors, so that a start-up is paid once.

What lives on between runs are processes: Ray's, vLLM's engine and the imports of all of them. What a run could hand to
the next one is made anew: the policy with its optimizer is loaded from the run's own model and sent to vLLM before the
first rollout, random streams begin at the run's own seed, vLLM's cached prefixes are dropped, and trainer, estimator,
order of the data and trackers are new objects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf_dbb.driver import arguments, launch, preflight
from openrlhf_dbb import upstream
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.actors.policy_actor import PolicyActor
from openrlhf_dbb.actors.vllm_actor import StrictExecutor, StrictRolloutActor
from openrlhf_dbb.actors.trainer import PosteriorTrainer, Progress

_A_RUNS_OWN = ("model", "seed", "remote_rm_url")
"""Arguments of a vLLM engine in which the runs of a session may differ."""


class SharedPolicy(PolicyActor):
    """The policy's actor, which can be given another model."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Forget the model of the run before, load that of this one, and send it to vLLM, which holds the other."""
        self.actor = self.actor_optim = self.actor_scheduler = self.trainer = None
        gc.collect()
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        self.broadcast_to_vllm()


class SharedRollouts(StrictRolloutActor):
    """vLLM's actor, which can begin another run."""

    async def begin(self, seed: int, reward: Any) -> None:
        """Sample from a new random stream, and judge by this reward function."""
        await self.llm.collective_rpc(_seed, args=(seed,))
        await self.llm.reset_prefix_cache()
        self.executor = StrictExecutor(reward)


def _seed(worker: Any, seed: int) -> None:
    """Runs in a vLLM worker."""
    import torch

    torch.manual_seed(seed)


class SharedTrainer:
    """An actor around one trainer after the other; OpenRLHF sees it as its trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.begin(*args, **kwargs)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Take up the next run, with the arguments of its trainer."""
        self._trainer = PosteriorTrainer(*args, **kwargs)

    def get_max_steps(self) -> int:
        return int(self._trainer.get_max_steps())

    def fit(self) -> None:
        self._trainer.fit()

    def progress(self) -> Progress:
        return self._trainer.progress()

    def finish(self) -> Progress:
        """As the trainer's; then its database connections are closed."""
        progress = self._trainer.finish()
        self._trainer.close()
        return progress


class _Kept:
    """Creates things for the first run, and gives them to the later ones in the same order.

    Args:
        create: makes one.
        reuse: called with one, the keyword arguments that it was created with, and the arguments of the new run.
    """

    def __init__(self, create: Callable[..., Any], reuse: Callable[..., None] | None = None) -> None:
        self._create, self._reuse = create, reuse
        self._made: list[tuple[Any, dict[str, Any]]] = []
        self._waiting: list[tuple[Any, dict[str, Any]]] = []

    def begin_run(self) -> None:
        self._waiting = list(self._made)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._waiting:
            thing, made_with = self._waiting.pop(0)
            if self._reuse:
                self._reuse(thing, made_with, *args, **kwargs)
            return thing
        self._made.append((self._create(*args, **kwargs), kwargs))
        return self._made[-1][0]


class _KeptActors(_Kept):
    """In place of a Ray actor class."""

    def __init__(self, actor_class: Any, reuse: Callable[..., None] | None = None) -> None:
        super().__init__(lambda *args, **kwargs: actor_class.options(**self._options).remote(*args, **kwargs), reuse)
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> _KeptActors:
        self._options = options
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)


class Session:
    """Trains command lines one after the other in one Ray cluster. Not for several threads.

    The runs of a session may differ in anything but the flags of vLLM's engines and the number of ranks.
    """

    def __init__(self) -> None:
        self._kept: tuple[_KeptActors, _KeptActors, _KeptActors, _Kept] | None = None

    def train(self, argv: Sequence[str]) -> Progress:
        """Train as ``openrlhf_dbb.cli.train_grpo`` does with the same arguments.

        Raises:
            UsageError, storage.StoreError: the arguments cannot be trained with, or not in this session.
            Exception: whatever ended the training; the session is to be closed then.
        """
        import ray

        settings = arguments.parse(list(argv))
        settings, start = preflight.check(settings)
        if start is None:
            raise UsageError("--estimator none has no run in the store; a session needs one, for instance point")
        if self._kept is None:
            launch.start_ray(settings)
            self._kept = _actors()
        rollouts, policy, trainer, groups = self._kept
        for kept in self._kept:
            kept.begin_run()
        watch = launch.Watch(settings, start, trainer)
        with watch.progress_bar(), upstream.quiet(settings.verbose):
            upstream.run(
                settings.openrlhf_args(),
                trainer=watch,
                rollout_actor=watch.watching(rollouts),
                policy_actor=policy,
                get_strategy=launch.cpu_strategy if settings.on_cpu else None,
                placement_group=groups,
            )
            progress: Progress = ray.get(watch.trainer.finish.remote())
        return progress

    def close(self) -> None:
        """End all actors."""
        import ray

        ray.shutdown()
        self._kept = None


def _actors() -> tuple[_KeptActors, _KeptActors, _KeptActors, _Kept]:
    import ray
    from ray.util import placement_group

    return (
        _KeptActors(ray.remote(SharedRollouts), _next_rollouts),
        _KeptActors(ray.remote(num_gpus=1)(SharedPolicy)),
        _KeptActors(ray.remote(SharedTrainer), _next_trainer),
        _Kept(placement_group),
    )


def _next_rollouts(actor: Any, made_with: dict[str, Any], **wanted: Any) -> None:
    import ray

    for name, value in wanted.items():
        if name not in _A_RUNS_OWN and value != made_with[name]:
            raise UsageError(
                f"this run needs a vLLM engine with {name} = {value!r}, that of the session has {made_with[name]!r}; "
                "train it by itself"
            )
    ray.get(actor.begin.remote(wanted["seed"], wanted["remote_rm_url"]))


def _next_trainer(actor: Any, made_with: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    import ray

    ray.get(actor.begin.remote(*args, **kwargs))
